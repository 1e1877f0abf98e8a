"""How untraced runs end that are cut short in the same way: measured once for each kind of end, and kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from killing.engines import ENDING, NotReached, Place, Setup
from killing.kinds import FORKED, KINDS, End, Seen, cut_short

Ends = dict[str, set[int | None]]
"""Kind of end -> exit codes, as a shell says them (None: it did not end); of a fork as
``os.waitstatus_to_exitcode`` does."""

MOST = 4
"""Untraced runs of one kind at most: what a second Ctrl-C meets is a matter of milliseconds."""


class Twins:
    """Makes untraced runs as they are asked for. ``place``: a folder for the run of this name."""

    def __init__(self, place: Callable[[str], Place]) -> None:
        self._place = place
        self._seen: dict[tuple[str, str], list[End]] = {}
        self._lock = threading.Lock()

    def of(self, setup: Setup, kinds: tuple[str, ...], seed: int) -> list[End]:
        """The untraced runs so far of a kind (one at least); of a family those of all its kinds."""
        with self._lock:
            return self._seen.get(_key(setup, kinds)) or [self._another(setup, kinds, seed)]

    def ends(self, seen: Seen, seed: int) -> Ends:
        """The exit codes of the untraced runs. Where that of the traced run is not among them, more are made,
        cut short after as many calls as that one."""
        twins = self.of(seen.setup, seen.kinds, seed)
        while not _among(seen, found := _codes(seen, twins)) and len(twins) < MOST:
            with self._lock:
                self._another(seen.setup, seen.kinds, seed)
                twins = self._seen[_key(seen.setup, seen.kinds)]
        return found

    def stored(self, setup: Setup, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
        """The untraced runs of a kind so far, as :meth:`load` takes them back; plain JSON."""
        return [
            {"forks": one.setup.forks}
            | {name: getattr(one, name) for name in ("kinds", "code", "ends", "left")}
            for one in self._seen.get(_key(setup, kinds), [])
        ]

    def load(self, setup: Setup, rows: list[dict[str, Any]]) -> None:
        """What :meth:`stored` gave of a setup, through JSON."""
        found = []
        for row in rows:
            ends = {int(fork): code for fork, code in row["ends"].items()}
            forked, kinds = replace(setup, forks=row["forks"]), tuple(row["kinds"])
            found.append(End(forked, kinds, row["code"], ends, row["left"]))
        if found:
            self._seen[_key(found[0].setup, found[0].kinds)] = found

    def seen(self) -> list[tuple[str, str, set[str], list[str]]]:
        """(setup, kind, exit codes, processes left by the first) of each kind so far."""
        found = []
        for (setup, kind), twins in sorted(self._seen.items()):
            codes = {(one, code) for twin in twins for one, code in twin.codes()}
            told = {f"{one}: {code}" if not kind else _said(code) for one, code in codes}
            found.append((setup, kind or "each", told, sorted(twins[0].left)))
        return found

    def _another(self, setup: Setup, kinds: tuple[str, ...], seed: int) -> End:
        key = _key(setup, kinds)
        number = len(self._seen.get(key, [])) + 1
        if setup.forks:
            setup, kinds = replace(setup, forks=len(FORKED)), tuple(FORKED)
        place = self._place(f"{seed}-{setup.name}-{kinds[0]}-untraced-{number}")
        twin = cut_short(setup, kinds, place, seed, traced=False)
        if twin.problems:
            raise NotReached(f"the untraced run: {'; '.join(twin.problems)}")
        self._seen.setdefault(key, []).append(twin)  # only now: seen() may be asked meanwhile
        return twin


def _said(code: int | None) -> str:
    return str(code) if code is not None else f"has not ended after {ENDING} s"


def _key(setup: Setup, kinds: tuple[str, ...]) -> tuple[str, str]:
    if setup.forks:
        return setup.name, ""
    return setup.name, "goes on" if KINDS[kinds[0]].survives else kinds[0]


def _codes(seen: Seen, twins: Sequence[End]) -> Ends:
    found: Ends = {}
    for twin in twins:
        for kind, code in twin.codes():
            found.setdefault(kind if seen.setup.forks else seen.kinds[0], set()).add(code)
    if "launcher" in seen.kinds:  # what was started is kvtrace itself
        found["launcher"] = {128 + signal.SIGKILL}
    return found


def _among(seen: Seen, ends: Ends) -> bool:
    return all(code in ends.get(kind, set()) for kind, code in seen.codes())
