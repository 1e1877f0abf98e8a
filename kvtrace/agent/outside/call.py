"""One watched call, or one piece of background work: what it did to files and peers, as OUTSIDE records.

``files.py`` and ``sockets.py`` tell what happens, in the thread of the call; sizes are asked for when the
call is over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvtrace.agent.ids import Names, next_call
from kvtrace.agent.origin import HERE
from kvtrace.agent.outside import files, sockets
from kvtrace.agent.outside.files import PLACES, Removal, WrittenFile, Wrote
from kvtrace.agent.state import AGENT, clock
from kvtrace.trace.format import UNKNOWN, Flag, Kind, Role, Way, pack_head
from kvtrace.trace.mask import mask_text
from kvtrace.trace.rows import Outside as Row

_targets = Names(256)
AGENT.openings.append(PLACES.forget)


class OutsideCall:
    """Of one call; after :meth:`write`, of the next one."""

    def __init__(self, connector: int) -> None:
        files.install()
        sockets.install()
        self._call = 0
        self.connector = connector
        self._empty()

    @property
    def call(self) -> int:
        """The call's number, given at the first question."""
        self._call = self._call or next_call()
        return self._call

    def _empty(self) -> None:
        self._opened: dict[str, WrittenFile] = {}
        self._removed: list[Wrote] = []
        """What this call wrote and removes: how much it was is seen before it is gone."""
        self._moved: list[Removal] = []
        self._looks: list[Wrote] | None = None
        self._sent: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._began = clock()

    def opened(self, place: WrittenFile) -> None:
        HERE.did = clock()
        self._opened[place.path] = place
        place.holder = self

    def moved(self, removal: Removal, place: WrittenFile | None) -> None:
        own = self._opened.pop(removal.path, None)
        if place is not None:
            self._opened[place.path] = place
        elif own is not None:
            self._removed.append(self._seen(own))
        self._moved.append(removal)

    def sent(self, peer: str, amount: int) -> None:
        if not peer:
            return  # a pair of the process's own: an event loop wakes itself
        HERE.did = clock()
        self._sent[peer] = self._sent.get(peer, 0) + amount

    def failed(self, peer: str) -> None:
        """A connection was refused, or broke while something was sent."""
        if peer:
            self._failed[peer] = self._failed.get(peer, 0) + 1

    def _look(self) -> list[Wrote]:
        """At each file that it opened, once: what is there and what came."""
        if self._looks is None:
            self._looks = [*self._removed, *map(self._seen, self._opened.values())]
        return self._looks

    def _seen(self, place: WrittenFile) -> Wrote:
        """Where a write may have failed, by what the file occupies: its size may have been set before."""
        return PLACES.look(place, occupied=HERE.failed > self._began)

    def files(self) -> tuple[int, int, str]:
        """(bytes, files, first path) of what it opened for writing, but for databases and shared memory; -1
        where a file is written in place."""
        looks = [one for one in self._look() if one.place.way == Way.FILE]
        path = looks[0].place.path if looks else ""
        if any(one.written < 0 for one in looks):
            return UNKNOWN, UNKNOWN, path
        return sum(one.written for one in looks), len(looks), path

    def write(self, step: int, thread: int, role: Role = Role.WORKER) -> None:
        """Records of all that happened since it began, or since they were last written. Never raises."""
        try:
            for row in self._rows(step, thread) if role == Role.WORKER else ():
                AGENT.add(row)
            for one in self._moved:
                write_removal(one, (clock(), self.call, step), role, self.connector)
        except Exception:
            AGENT.failed("what came to rest")
        for place in self._opened.values():
            if place.holder is self:
                place.holder = None
        self._call = 0
        self._empty()

    def _rows(self, step: int, thread: int) -> Iterator[Row]:
        looked = list(self._look())
        for place in PLACES.still_open():
            if place.holder is None:
                new, wrote = not place.looks, PLACES.look(place)
                if new or wrote.changed:
                    looked.append(wrote)
        for wrote in looked:
            place = wrote.place
            marks = Flag.FIRST if place.anew else 0
            # What came by a handle that stays open is for the connector that opened it.
            index = self.connector if place.path in self._opened else place.connector
            head = pack_head(Kind.OUTSIDE, Role.WORKER, place.way, index, marks, thread)
            place.anew = False
            gone = wrote.size < 0
            size, target = max(0, wrote.size), _target(place.path)
            yield Row(head, clock(), self.call, step, target, wrote.written, size, int(gone))
        for peer in {**self._sent, **self._failed}:
            head = pack_head(Kind.OUTSIDE, Role.WORKER, Way.SOCKET, self.connector, 0, thread)
            amounts = self._sent.get(peer, 0), 0, self._failed.get(peer, 0)
            yield Row(head, clock(), self.call, step, _target(peer), *amounts)


def write_removal(removal: Removal, when: tuple[int, int, int], role: Role, connector: int) -> None:
    """``when``: time, call, step."""
    marks = 0 if removal.linked else Flag.REPLACED
    head = pack_head(Kind.OUTSIDE, role, Way.NAME, connector, marks, AGENT.thread())
    to = _target(removal.to) if removal.to else 0
    t, call, step = when
    AGENT.add(Row(head, removal.at or t, call, step, _target(removal.path), 0, to, 0))


def _elsewhere(removal: Removal) -> None:
    """In a call that is not watched."""
    write_removal(removal, (clock(), 0, 0), Role.WORKER, 0)


files.ELSEWHERE.append(_elsewhere)


def _target(name: str) -> int:
    return _targets.id(_shown(name))


@cache
def _home() -> str:
    """The user's; "" where it is not known, or the root of all."""
    try:
        return str(Path.home()).rstrip(os.sep)
    except RuntimeError:
        return ""


def _shown(path: str) -> str:
    """A path as it is recorded: ``~`` for the user's home, no secrets."""
    home = _home()
    return mask_text("~" + path[len(home) :] if home and path.startswith(home + os.sep) else path)
