"""Where an exception came through, who called a function, and how a place is written."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType


def entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Of a traceback, the outermost first."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def outwards(frame: FrameType | None, most: int = 64) -> Iterator[FrameType]:
    """A frame and those that called it, at most so many."""
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def short(filename: str) -> str:
    """``folder/file.py``."""
    return "/".join(filename.replace("\\", "/").split("/")[-2:])


def type_name(error: BaseException) -> str:
    """The name of an exception's class; with its module where it is ``error``, which many libraries have."""
    cls = type(error)
    return f"{cls.__module__}.{cls.__name__}" if cls.__name__.lower() == "error" else cls.__name__


def place(code: CodeType, line: int) -> str:
    """``folder/file.py:12 in function``."""
    return f"{short(code.co_filename)}:{line} in {code.co_name}"
