"""Which hook of a connector runs, by the frames on a thread's stack: hooks themselves pay nothing for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from kvtrace.agent.wrap.hooked import Hooked

_wrappers: dict[int, tuple[CodeType, tuple[str, int] | None]] = {}
"""``id`` of a wrapper's code -> that code, and (hook, index of the connector), or None where the frame's
variable ``hooked`` says both. Not by the code itself: two that say the same are equal, and its hash takes in
all of its instructions."""
_MAX_DEPTH = 400
_ENGINE = ("/vllm/v1/engine/", "/vllm/v1/executor/")
"""Folders of code that calls hooks and that no hook calls."""


class Running(NamedTuple):
    hook: str
    connector: int
    layer: str | None


INTERNAL = "importlib_bootstrap"
"""In the name of a file: ``warnings`` and ``logging`` don't count its frames (``stacklevel``), as they don't
count those of the interpreter's import."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def internal(function: _Function) -> _Function:
    """A function that stands between vLLM and the connector: nobody's warning is attributed to it."""
    made: Any = function
    folder, _, name = made.__code__.co_filename.rpartition("kvtrace/agent/")
    made.__code__ = made.__code__.replace(co_filename=f"{folder}kvtrace/{INTERNAL}/kvtrace/agent/{name}")
    return function


def know(code: CodeType, hook: tuple[str, int] | None = None) -> None:
    """This is the code of a wrapper of ours."""
    _wrappers[id(code)] = code, hook


def any_known() -> bool:
    return bool(_wrappers)


def step_out(error: BaseException) -> None:
    """Take the calling frame, which is ours, out of the traceback of an exception that it passes on: for
    whoever catches it, it was raised as without us. (Python 3.10 keeps the frame.)"""
    trace = error.__traceback__
    if trace is not None and trace.tb_frame is sys._getframe(1):
        error.__traceback__ = trace.tb_next


def innermost(frame: FrameType | None) -> Running | None:
    """The innermost hook on the stack from ``frame`` on outwards, as far as a hook can be: each step of the
    engine hands something to a thread, and its whole stack would take longer than all other records."""
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return None
        code = frame.f_code
        wrapper = _wrappers.get(id(code))
        if wrapper is not None:
            known, values = wrapper[1], frame.f_locals
            layer = values.get("layer_name")
            if known is None:
                hooked: Hooked = values["hooked"]
                known = (hooked.hook.name, hooked.index)
            return Running(*known, None if layer is None else str(layer))
        if _of_engine(code.co_filename):
            return None
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _of_engine(file: str) -> bool:
    return any(folder in file for folder in _ENGINE)
