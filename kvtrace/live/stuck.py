"""Hooks that are open now, from the looks of ``kvtrace run`` (stuck.json): one that hangs is in no record."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from kvtrace.live.look import OpenHook, ProcessLook
from kvtrace.trace.stuck_file import StuckFile, ThreadPlace, standing

_OF_LOOK_S = 1.0
"""What was written within so long of a look may have been written before it."""


def of_looks(file: StuckFile, processes: Iterable[ProcessLook], wall_ns: int) -> tuple[OpenHook, ...]:
    """Where processes stood at two looks, of which nothing was recorded since; the longest first."""
    known = {one.pid: one for one in processes}
    found: dict[int, OpenHook] = {}
    for look in file.looks:
        place, one = standing(look.threads), known.get(look.pid)
        if one is None or place is None or not look.stood or look.resumed_ns is not None or one.stopped:
            continue
        ago = max(0.0, (wall_ns - look.wall_ns) / 1e9)
        if one.silent_s is not None and one.silent_s + _OF_LOOK_S < ago:
            continue  # it went on, and kvtrace run has not written that yet
        least, most = look.apart_ns / 1e9 + ago, look.silent_ns / 1e9 + ago
        found[look.pid] = OpenHook(one.name, look.pid, place.what, _call(place), least, most)
    return tuple(sorted(found.values(), key=lambda one: -one.most_s))


def _call(place: ThreadPlace) -> str:
    if not place.way:
        return ""
    inner = place.way[-1]
    return f"{inner.function} ({PurePosixPath(inner.file).name}:{inner.line})"
