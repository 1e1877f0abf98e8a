"""Clocks of several hosts on one wall clock.

Processes with the same boot have the same clock, whatever their host names: their order is certain. Others
are put together by their anchors (a pair of both clocks in each spool's header), as well as the wall clocks
of their hosts agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtrace.merge.merged import Clock
from kvtrace.trace.facts import Header


@dataclass(frozen=True)
class Clocks:
    """``of``: (run, spool) -> index in ``all``."""

    all: tuple[Clock, ...]
    of: dict[tuple[int, str], int]
    error_ns: int

    def wall(self, clock: int, t: int) -> int:
        return t + self.all[clock].shift_ns

    def off_by(self, one: int, two: int) -> int:
        """By how much times of two clocks may be off against each other."""
        if one == two:
            return 0
        return self.error_ns + self.all[one].spread_ns + self.all[two].spread_ns


def clocks(headers: Iterable[tuple[int, str, Header]], error_ns: int) -> Clocks:
    """The clocks of (run, spool's name, its header)."""
    members: dict[str, list[Header]] = {}
    names: dict[tuple[int, str], str] = {}
    for run, spool, header in headers:
        # without a boot id the same host may have been booted anew between two runs
        key = header.boot or f"\0{run} {header.host}"
        members.setdefault(key, []).append(header)
        names[run, spool] = key
    keys = list(members)
    found = tuple(_clock(members[key]) for key in keys)
    return Clocks(found, {who: keys.index(key) for who, key in names.items()}, error_ns)


def _clock(headers: Sequence[Header]) -> Clock:
    anchored = sorted((one.wall_ns, one.wall_ns - one.perf_ns) for one in headers if one.wall_ns)
    shifts = [shift for _, shift in anchored] or [0]
    hosts = tuple(dict.fromkeys(one.host for one in headers))
    return Clock(headers[0].boot, hosts, shifts[0], max(shifts) - min(shifts))
