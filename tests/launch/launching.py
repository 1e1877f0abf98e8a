"""kvtrace as a command, waiting for what it does, and a look of a clock's time at processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import kvtrace
from kvtrace.launch.spy import Spy
from kvtrace.trace.stuck_file import Thread

RUN = [sys.executable, "-m", "kvtrace", "run"]
ENVIRON = os.environ | {"PYTHONPATH": str(Path(kvtrace.__file__).parents[1])}
"""In which this kvtrace is found from everywhere."""


def until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Look(Spy):
    """Sees what it is told to."""

    def __init__(self, *threads: Thread) -> None:
        self._threads = threads

    def threads(self) -> tuple[Thread, ...]:
        return self._threads

    def stop(self) -> None:
        pass


class Watch(Protocol):
    def tick(self) -> None: ...


class Clocked:
    """A watch that is asked each half second of a clock that a test sets."""

    now = 0.0
    watch: Watch

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.watch.tick()
