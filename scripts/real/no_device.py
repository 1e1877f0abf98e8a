"""Streams and events of a device that computes in order and at once, for connectors that ask for a GPU's."""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        return

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_event(self, event: Any) -> None:
        return

    def wait_stream(self, stream: Any) -> None:
        return

    def synchronize(self) -> None:
        return


class Event:
    def __init__(self, **_: Any) -> None:
        return

    def record(self, stream: Any = None) -> None:
        return

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: Any) -> float:
        return 0.0


@contextmanager
def stream(_: Any) -> Any:
    yield


class Torch(ModuleType):
    """torch as a module of such a connector sees it: all but streams and events is its own."""

    cuda = SimpleNamespace(Stream=Stream, current_stream=lambda *_: Stream(), stream=stream)
    Event = Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
