"""Stuck hooks: a process that writes nothing for a while is looked at from outside, twice.

An agent writes at least when a step ends, into the spool's window or at its end, so a spool that no longer
grows is that of an idle process, or of one that hangs. Only its threads tell: py-spy names their frames, and
kvtrace's own among them which hook or step is open. Nothing of this runs inside vLLM's processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from kvtrace.launch.finish import pid_in
from kvtrace.launch.rundir import RunDir
from kvtrace.launch.say import say
from kvtrace.launch.spy import FORBIDDEN, MISSING, Spy, SpyError
from kvtrace.regular import write_json
from kvtrace.trace.format import SPOOL_DIR, SPOOL_SUFFIX, Kind
from kvtrace.trace.stuck_file import (
    ASK_FILE,
    STEP,
    STUCK_FILE,
    StuckFile,
    StuckProcess,
    Thread,
    ThreadPlace,
    same_place,
    standing,
)
from kvtrace.trace.sums import summed
from kvtrace.trace.window import written

MOST_LOOKS = 8
"""Kept in a run, of those that nobody asked for."""
MOST_ASKED = 64
"""Kept in a run, all together."""
_APART_SECONDS = 5.0
_TRIES = 5
"""py-spy now and then cannot read a process that runs, or that a busy machine keeps waiting."""
_FOR_GOOD = (MISSING, FORBIDDEN)
"""Why nothing will be seen in this run."""
ROLES = ("worker-", "scheduler-", "engine-")


@dataclass
class _Spool:
    """A process's file. ``size``: how far it is written; ``since``: when that last grew (monotonic, s)."""

    name: str
    pid: int
    size: int
    since: float
    looked: bool = False
    """Whether this silence needs no further look."""
    after: float = 0.0
    """No look before that time: an idle process is looked at every so often, since a request that hangs in
    its first step writes nothing before."""
    asked: bool = False
    failures: int = 0
    """Looks in this silence that saw nothing."""
    first: tuple[float, ThreadPlace | None] | None = None
    """When it was looked at before in this silence, and what was seen."""


class StuckWatch:
    """Called at every tick of a run.

    Args:
        after: seconds without a record after which a process is looked at; 0: only where a signal asks.
        living: the pids of the run's processes that live; no other is ever looked at.
        look: starts a look at a pid, with native frames or without.
    """

    def __init__(
        self, rundir: RunDir, after: float, living: Callable[[], Collection[int]],
        look: Callable[[int, bool], Spy] = Spy, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._rundir, self._after, self._living = rundir, after, living
        self._start, self._clock = look, clock
        self._apart = min(after or _APART_SECONDS, _APART_SECONDS)
        self._spools: dict[int, _Spool] = {}  # by inode: a spool gets another name when its role is known
        self._current: tuple[_Spool, Spy] | None = None
        self._ended = False
        self._kept: dict[int, float] = {}  # index of a look -> when its process was seen second
        self.file = StuckFile()

    def ask(self) -> None:
        """Look at every process of the run now, whether it writes or not."""
        for spool in self._spools.values():
            spool.asked, spool.looked, spool.first = True, False, None

    def end(self) -> None:
        """The command was told to end: what is written from now on says nothing of what hung."""
        self._ended = True

    def stop(self) -> None:
        """No look outlives the run."""
        if self._current is not None:
            self._current[1].stop()
            self._current = None

    def tick(self) -> None:
        """Look at the files, and go on with what is under way. Raises nothing but OSError."""
        self._measure()
        if self._wanted():
            self.ask()
        if self._current is not None:
            self._go_on()
        elif (spool := self._due()) is not None:
            self._begin(spool)

    def _wanted(self) -> bool:
        """Whether somebody asked by a file, as `kvtrace top` does for a key."""
        try:
            os.unlink(self._rundir.path / ASK_FILE)
        except OSError:
            return False
        return True

    # --- which process ----------------------------------------------------------------------

    def _measure(self) -> None:
        now = self._clock()
        with os.scandir(self._rundir.path / SPOOL_DIR) as entries:
            for entry in entries:
                if not entry.name.startswith(ROLES) or not entry.name.endswith(SPOOL_SUFFIX):
                    continue
                inode = entry.stat(follow_symlinks=False).st_ino
                known = self._spools.get(inode)
                try:
                    size, _ = written(Path(entry.path))
                except ValueError:  # its header is not there yet
                    continue
                if known is None:
                    pid = pid_in(Path(entry.path))
                    if pid is not None:
                        self._spools[inode] = _Spool(entry.name, pid, size, now)
                    continue
                known.name = entry.name
                if known.size != size:
                    self._grew(known, size, now)

    def _grew(self, spool: _Spool, size: int, now: float) -> None:
        spool.size, spool.since, spool.looked, spool.failures = size, now, False, 0
        spool.after = 0.0
        if spool.first is not None and not spool.asked:
            spool.first = None
        if self._ended:
            return
        for index, seen in list(self._kept.items()):
            look = self.file.looks[index]
            if look.pid == spool.pid:
                del self._kept[index]
                self._replace(index, replace(look, resumed_ns=round((now - seen) * 1e9)))

    def _due(self) -> _Spool | None:
        now = self._clock()
        for spool in self._spools.values():
            most = MOST_ASKED if spool.asked else MOST_LOOKS
            if spool.looked or len(self.file.looks) >= most or self._ended:
                continue
            if spool.first is not None:
                if now - spool.first[0] >= self._apart:
                    return spool
            elif spool.asked or (self._silent(spool, now) and self._allowed(spool)):
                return spool
        return None

    def _silent(self, spool: _Spool, now: float) -> bool:
        return bool(self._after) and now - spool.since >= self._after and now >= spool.after

    def _allowed(self, spool: _Spool) -> bool:
        """Whether a silence of that process is worth a look: its recording goes on, and it may be seen."""
        if self.file.unseen in _FOR_GOOD or self._stopped(spool):
            spool.looked = True
            return False
        return True

    def _stopped(self, spool: _Spool) -> bool:
        """Whether the spool ends in a TRAILER (with its SEAL behind it)."""
        path = self._rundir.path / SPOOL_DIR / spool.name
        _, last = written(path)
        with open(path, "rb") as file:
            file.seek(last)
            return file.read(1) == bytes([Kind.TRAILER])

    # --- one look ---------------------------------------------------------------------------

    def _begin(self, spool: _Spool) -> None:
        if spool.pid not in self._living():
            spool.looked = True
            return
        try:
            # Native frames take a second or more: of a process that hangs, never of one that goes on.
            hangs = spool.first is not None and spool.since < spool.first[0]
            self._current = spool, self._start(spool.pid, hangs)
        except SpyError as error:
            self._unseen(spool, str(error))

    def _go_on(self) -> None:
        assert self._current is not None
        spool, spy = self._current
        try:
            threads = spy.threads()
        except SpyError as error:
            self._current = None
            if spool.pid in self._living():
                self._unseen(spool, str(error))
            return
        if threads is not None:
            self._current = None
            self._seen(spool, threads, spy.no_native)

    def _seen(self, spool: _Spool, threads: tuple[Thread, ...], no_native: str) -> None:
        now, place = self._clock(), standing(threads)
        if spool.first is None:
            if spool.asked or (place is not None and now - spool.since >= self._after):
                spool.first = now, place
            else:
                spool.after = now + self._after
            return
        (before, earlier), spool.first = spool.first, None
        stood = spool.since < before and same_place(earlier, place)
        asked, spool.asked = spool.asked, False
        spool.looked, spool.after = stood, now + self._after
        if stood or asked:
            silent, apart = round((now - spool.since) * 1e9), round((now - before) * 1e9)
            self._kept[len(self.file.looks)] = now
            look = StuckProcess(
                spool.pid, spool.name, time.time_ns(), silent, apart, asked, stood,
                threads=threads, no_native=no_native,
            )  # fmt: skip
            self._write(replace(self.file, looks=(*self.file.looks, look)))
            self._say(look, place)

    def _say(self, look: StuckProcess, place: ThreadPlace | None) -> None:
        where = "in no hook or step"
        if place is not None:
            where = "in its step" if place.what == STEP else f"in {place.what}"
        stands = f"has stood {where} for {look.apart_ns / 1e9:.0f} s or more" if look.stood else f"is {where}"
        say(f"pid {look.pid} {stands}: its threads are in {self._rundir.shown}/{STUCK_FILE}")

    def _unseen(self, spool: _Spool, why: str) -> None:
        spool.failures += 1
        if why not in _FOR_GOOD and spool.failures < _TRIES:
            return  # once more, at the next tick
        spool.looked, spool.asked, spool.first = why in _FOR_GOOD, False, None
        spool.failures, spool.after = 0, self._clock() + self._after
        if self.file.unseen != why:
            self._write(replace(self.file, unseen=why))
            quiet = self._clock() - spool.since
            say(
                f"pid {spool.pid} has recorded nothing for {quiet:.0f} s, "
                f"and whether it hangs is unknown: {why}"
            )

    def _replace(self, index: int, look: StuckProcess) -> None:
        looks = (*self.file.looks[:index], look, *self.file.looks[index + 1 :])
        self._write(replace(self.file, looks=looks))

    def _write(self, file: StuckFile) -> None:
        self.file = file
        write_json(self._rundir.path / STUCK_FILE, summed(file.to_json()))
