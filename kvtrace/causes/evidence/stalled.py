"""What py-spy's looks at processes that had written nothing say: where each stood, and its threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from kvtrace.causes.case import Case
from kvtrace.trace.stuck_file import (
    STEP,
    Frame,
    StuckProcess,
    Thread,
    ThreadPlace,
    innermost_native,
    standing,
)
from kvtrace.words import listed, plural

_CALLS = 6
_THREADS = 4
_NATIVE = 2
_NAME = 60


def stalled(case: Case) -> Iterator[tuple[StuckProcess, ThreadPlace]]:
    """The looks that saw a thread stand in one place, and the place."""
    for look in case.run.stuck.looks:
        place = standing(look.threads)
        if look.stood and place is not None:
            yield look, place


def in_hooks(case: Case) -> list[tuple[StuckProcess, ThreadPlace]]:
    return [(look, place) for look, place in stalled(case) if place.what != STEP]


def worst(
    found: list[tuple[StuckProcess, ThreadPlace]],
) -> tuple[list[tuple[StuckProcess, ThreadPlace]], bool]:
    """Those that never went on, else all of them, the longest first; and whether they never did."""
    never = [one for one in found if one[0].resumed_ns is None]
    return sorted(never or found, key=lambda one: -one[0].silent_ns), bool(never)


def name_of(case: Case, look: StuckProcess) -> str:
    """``worker 0`` where the process is known."""
    names = [process.name for process in case.run.processes if process.pid == look.pid]
    return f"{names[0]}, pid {look.pid}" if names else f"pid {look.pid}"


def seconds(ns: int) -> str:
    return f"{ns / 1e9:.0f} s" if ns >= 10**10 else f"{ns / 1e9:.1f} s"


def evidence(case: Case, look: StuckProcess, place: ThreadPlace) -> list[str]:
    """Where it stood and for how long, and what the connector's threads did."""
    inside = "its step" if place.what == STEP else place.what
    lines = [
        f"{name_of(case, look)}: no step ended for {seconds(look.silent_ns)}, and at two looks "
        f"{seconds(look.apart_ns)} apart it stood in {inside}: {way(place.way)}{native(place.native)}",
        f"{seconds(look.resumed_ns)} later it went on"
        if look.resumed_ns is not None
        else "until the run's end nothing more was recorded of it",
    ]
    others = connector_threads(look, place)
    lines += [
        f"thread {thread.name}: {way(_calls(thread))}{native(innermost_native(thread))}"
        for thread in others[:_THREADS]
    ]
    if others[_THREADS:]:
        lines.append(f"and {plural(len(others) - _THREADS, 'more thread')} of the connector")
    if look.no_native:
        lines.append(f"its calls in native code are not known: {look.no_native}")
    return lines


def way(calls: tuple[Frame, ...]) -> str:
    """The innermost calls, from the outer ones inwards."""
    shown = [f"{one.function} ({PurePosixPath(one.file).name}:{one.line})" for one in calls[-_CALLS:]]
    return " > ".join(["...", *shown] if len(calls) > _CALLS else shown) or "its wrapper"


def native(calls: tuple[Frame, ...]) -> str:
    """The innermost calls in native code that have a name; "" for none."""
    named = [one for one in calls if not one.function.startswith("0x")][-_NATIVE:]
    return "".join(f" > {one.function[:_NAME]} ({PurePosixPath(one.file).name})" for one in named)


def connector_threads(look: StuckProcess, place: ThreadPlace) -> list[Thread]:
    """The other threads with a call in the packages that the hook's own calls lie in."""
    homes = {home for frame in place.way if (home := _home(frame.file))}
    return [
        thread
        for thread in look.threads
        if thread != place.thread
        and any(not frame.native and _home(frame.file) in homes for frame in thread.frames)
    ]


def _calls(thread: Thread) -> tuple[Frame, ...]:
    """Without those by which Python, and the agent, start a thread."""
    return tuple(
        frame
        for frame in reversed(thread.frames)
        if not frame.native
        and "/kvtrace/agent/" not in frame.file
        and not frame.function.endswith(("Thread.run", "_bootstrap", "_bootstrap_inner"))
    )


_NOT_THE_CONNECTORS = ("vllm", "torch", "kvtrace")


def _home(file: str) -> str:
    """The package that a file belongs to, else its folder; "" for Python's, torch's, vLLM's and ours (but the
    connectors within vLLM: their own module)."""
    parts = PurePosixPath(file).parts
    if file.startswith("<"):
        return ""
    if "kv_connector" in parts:
        return file
    for at, part in enumerate(parts):
        if part in ("site-packages", "dist-packages"):
            package = parts[at + 1] if at + 1 < len(parts) else ""
            return "" if package in _NOT_THE_CONNECTORS else package
    standard = any(part.startswith("python3") for part in parts[:-1])
    return "" if standard or "/kvtrace/agent/" in file else str(PurePosixPath(file).parent)


def processes(case: Case, looks: list[tuple[StuckProcess, ThreadPlace]]) -> str:
    return listed(name_of(case, look) for look, _ in looks)
