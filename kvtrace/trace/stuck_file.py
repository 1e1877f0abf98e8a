"""``stuck.json`` (``kvtrace.stuck/1``): where processes stood that had written nothing for a while, as
``kvtrace run`` saw it with py-spy (``launch/stuck.py``), and what that says: which hook, which step."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from kvtrace.trace import hooks
from kvtrace.trace.facts import Document
from kvtrace.trace.sums import read_document

STUCK_FILE = "stuck.json"
ASK_FILE = "look-now"
"""Who makes this file in a run directory asks `kvtrace run` to look at all processes."""
SCHEMA = "kvtrace.stuck/1"
STEP = "step"
"""What a thread stands in that is in a worker's step and in no hook."""
_MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class Frame(Document):
    """One call on a thread's stack. ``line``: in ``file``, 0 unknown. ``native``: in a shared library, which
    ``file`` names; ``function`` is an address where it has no symbols."""

    function: str = ""
    file: str = ""
    line: int = 0
    native: bool = False


@dataclass(frozen=True)
class Thread(Document):
    """``frames``: innermost first. ``active``: it ran, or was ready to, when it was looked at."""

    name: str = ""
    active: bool = False
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class StuckProcess(Document):
    """One process that was looked at twice, ``apart_ns`` from each other; ``threads`` as at the second look.

    ``silent_ns``: how long it had written nothing then. ``asked``: by a signal. ``stood``: whether one thread
    stood in the same place both times and nothing was written between. ``resumed_ns``: how long after the
    second look it wrote again, None where it never did, as far as was seen. ``no_native``: why the frames of
    native code are not among the threads', "" where they are."""

    pid: int = -1
    spool: str = ""
    wall_ns: int = 0
    silent_ns: int = 0
    apart_ns: int = 0
    asked: bool = False
    stood: bool = False
    resumed_ns: int | None = None
    threads: tuple[Thread, ...] = ()
    no_native: str = ""


@dataclass(frozen=True)
class StuckFile(Document):
    """``unseen``: why a process that had written nothing could not be looked at, "" where none could not."""

    schema: str = SCHEMA
    looks: tuple[StuckProcess, ...] = ()
    unseen: str = ""


@dataclass(frozen=True)
class ThreadPlace:
    """Where a thread stands. ``what``: the name of a hook, or STEP. ``way``: its Python calls from there, the
    innermost last. ``native``: those in native code that the innermost one is in, the innermost last."""

    thread: Thread
    what: str
    way: tuple[Frame, ...]
    native: tuple[Frame, ...] = ()


def read_stuck_file(run_dir: Path) -> tuple[StuckFile, list[str]]:
    """The stuck.json of a run directory and notes on it; nothing in it where there is none to be read."""
    return read_document(run_dir / STUCK_FILE, _MAX_BYTES, StuckFile, "where processes stood is unknown")


def standing(threads: tuple[Thread, ...]) -> ThreadPlace | None:
    """The thread that stands in a hook of the connector; else the one that is in a worker's step; None
    where no thread is, as in an idle process."""
    places = [place for thread in threads if (place := _place(thread)) is not None]
    in_hooks = [place for place in places if place.what != STEP]
    return next(iter(in_hooks or places), None)


def same_place(first: ThreadPlace | None, second: ThreadPlace | None) -> bool:
    """Whether it is one thread that did not move: in a hook it may have moved within that, as one that asks
    again and again whether a transfer has ended; elsewhere it must wait in the very same line."""
    if first is None or second is None or first.thread.name != second.thread.name:
        return False
    if first.what != STEP:
        return first.what == second.what
    waits = not (first.thread.active or second.thread.active)
    return second.what == STEP and waits and first.way == second.way


_GENERATED = re.compile(r"<(?:importlib_bootstrap: )?kvtrace wrapper of (?:.*\.)?(\w+)>\Z")
_WRAPPERS = re.compile(r"/kvtrace/agent/(?:hooks/)?wrappers\.py\Z")
_STEP_FRAMES = ("execute_model", "sample_tokens")
_WORKER = re.compile(r"/kvtrace/agent/(?:engine/)?worker\.py\Z")
_COMPILERS = re.compile(r"/(?:torch/_inductor|torch/_dynamo|triton)/")
"""A step that compiles is slow for a reason of its own."""


def _place(thread: Thread) -> ThreadPlace | None:
    """By kvtrace's own frames: the wrapper of the outermost connector's hook, and that of a worker's step."""
    frames, step = tuple(frame for frame in thread.frames if not frame.native), None
    for at in range(len(frames) - 1, -1, -1):
        if hook := _hook(frames, at):
            return ThreadPlace(thread, hook, _way(frames, at), innermost_native(thread))
        if _WORKER.search(frames[at].file) and _last(frames[at]) in _STEP_FRAMES:
            step = at
    if step is None or any(_COMPILERS.search(frame.file) for frame in frames[:step]):
        return None
    return ThreadPlace(thread, STEP, _way(frames, step), innermost_native(thread))


_INTERPRETER = re.compile(r"/(?:libpython|python)[\d.]*[^/]*\Z")


def innermost_native(thread: Thread) -> tuple[Frame, ...]:
    """The calls in native code below the innermost Python one, the interpreter's own left out; the innermost
    last."""
    inner = list(itertools.takewhile(lambda frame: frame.native, thread.frames))
    return tuple(frame for frame in reversed(inner) if not _INTERPRETER.search(frame.file))


def _hook(frames: tuple[Frame, ...], at: int) -> str:
    """The hook whose wrapper frame `at` is, "" where it is none."""
    if made := _GENERATED.match(frames[at].file):
        return made[1] if made[1] in hooks.BY_NAME else ""
    if _WRAPPERS.search(frames[at].file) and _last(frames[at]) == "wrapper":
        inner = (_last(frame) for frame in reversed(frames[:at]) if not _ours(frame))
        return next((name for name in inner if name in hooks.BY_NAME), "")
    return ""


def _way(frames: tuple[Frame, ...], at: int) -> tuple[Frame, ...]:
    return tuple(frame for frame in reversed(frames[:at]) if not _ours(frame))


def _ours(frame: Frame) -> bool:
    return "/kvtrace/agent/" in frame.file or bool(_GENERATED.match(frame.file))


def _last(frame: Frame) -> str:
    """py-spy puts the class before the name of a method."""
    return frame.function.rpartition(".")[2]
