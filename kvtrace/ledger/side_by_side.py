"""Spools that are read side by side, on all cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

Add = Callable[[int], None]
"""Called with how many bytes more were read."""
Progress = Callable[[int, int], None]
"""Called with how many bytes are read, and of how many."""
_WORTH = 32 << 20
"""Bytes, all spools together, from which on other processes are worth their start."""
_shared: tuple[Callable[[Any, Add], Any], Sequence[Any]] | None = None
"""What a process inherits as it is forked."""


def unwatched(done: int, total: int) -> None:
    """A Progress that nobody watches."""


def silent(amount: int) -> None:
    """An Add that nobody watches."""


def each(work: Callable[[T, Add], R], of: Sequence[T], sizes: Sequence[int], add: Add) -> Iterator[R]:
    """The results of `work`, in order; a process of several threads is not forked and does all by itself.

    Args:
        sizes: of each in bytes.
    """
    global _shared
    cores = min(len(of), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if cores < 2 or sum(sizes) < _WORTH or threading.active_count() > 1:
        for one in of:
            yield work(one, add)
        return
    _shared = work, of
    try:
        # A pool ends its processes by a signal: one that comes before they are ready for it has to wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            processes = multiprocessing.get_context("fork").Pool(cores, _ends_when_told)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with processes as pool:
            for size, result in zip(sizes, pool.imap(_done, range(len(of))), strict=True):
                add(size)
                yield result
    finally:
        _shared = None


def _ends_when_told() -> None:
    """Whatever handler it inherits: that might run, and not end it, and the pool would hang."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _done(at: int) -> Any:
    assert _shared is not None
    work, of = _shared
    return work(of[at], silent)
