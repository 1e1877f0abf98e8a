"""Exceptions that are raised in a connector's frames while a thread works for it.

From Python 3.12 the RAISE event of ``sys.monitoring``, with a tool id of our own that is kept from the first
use on (to take it and give it back for each call would make Python look at all its code again); before that
a trace function confined to one thread and one piece of work. Where a debugger or a coverage tool has the
trace function, or no tool id is free, nothing is recorded: the user's tool goes first.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kvtrace.agent.owners import Owner
from kvtrace.agent.state import clock, get_ident
from kvtrace.agent.tracing import set_trace

_MAX_KEPT = 64
_MAX_CALLERS = 16
_CALL = 500
"""ns that a call takes longer with a trace function, more or less."""
_MONITORED = hasattr(sys, "monitoring")
_TOOLS = (4, 3)

_here: dict[int, list[Raises]] = {}
_tool = -1


class Raised(NamedTuple):
    """``t``: when a frame of the connector's saw it last, host ns."""

    error: BaseException
    t: int


class Raises:
    """The exceptions of one piece of work. ``start`` and ``stop`` in its thread; those who start last stop
    first."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._ident = 0
        self._errors: dict[int, Raised] = {}
        self._callers: list[FrameType] = []
        self._calls = 0
        self._around: Raises | None = None
        """Of the call around this one, of the connector that this one's connector is inside of."""

    def start(self) -> bool:
        """False where nothing can be recorded."""
        self._ident = get_ident()
        if _MONITORED:
            if not _monitor():
                return False
            _here.setdefault(self._ident, []).append(self)
            return True
        self._around = _around(self.owner)
        if sys.gettrace() is not None and self._around is None:
            return False
        return set_trace(self._call)

    def stop(self) -> None:
        if _MONITORED:
            stack = _here.get(self._ident, [])
            if self in stack:
                stack.remove(self)
            if not stack:
                _here.pop(self._ident, None)
            return
        while self._callers:
            frame = self._callers.pop()
            if frame.f_trace == self._inside:
                frame.f_trace = None
        if sys.gettrace() == self._call:
            set_trace(None if self._around is None else self._around._call)

    def callers_too(self, frame: FrameType | None) -> None:
        """Frames that run already, from this one on outwards: a trace function sees only calls to come."""
        for _ in range(_MAX_CALLERS):
            if _MONITORED or frame is None or sys.gettrace() != self._call:
                return
            if frame.f_trace is None and self.owner.owns(frame.f_code.co_filename):
                frame.f_trace_lines = False
                frame.f_trace = self._inside
                self._callers.append(frame)
            frame = frame.f_back

    @property
    def none(self) -> bool:
        return not self._errors

    def take(self) -> list[Raised]:
        """What was raised so far; it is forgotten here."""
        errors = list(self._errors.values())
        self._errors.clear()
        return errors

    def cost(self) -> int:
        """Host ns that looking took since it was last asked, more or less."""
        calls, self._calls = self._calls, 0
        return calls * _CALL

    def keep(self, error: Any) -> None:
        if isinstance(error, BaseException) and (len(self._errors) < _MAX_KEPT or id(error) in self._errors):
            self._errors[id(error)] = Raised(error, clock())

    # --- before 3.12 ----------------------------------------------------------------------

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._calls += 1
        try:
            if not self.owner.owns(frame.f_code.co_filename):
                return None
            frame.f_trace_lines = False
            return self._inside
        except Exception:
            return None

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception" and arg:
            error = arg[1]
            if not isinstance(error, BaseException):
                # An error raised in C is not made an object before somebody needs one.
                try:
                    error = arg[0](error) if error is not None else arg[0]()
                except Exception:
                    return self._inside
                error.__traceback__ = arg[2]
            self.keep(error)
        return self._inside


def _around(owner: Owner) -> Raises | None:
    """What has this thread's trace function, where that is a call of another connector."""
    outer = getattr(sys.gettrace(), "__self__", None)
    return outer if isinstance(outer, Raises) and outer.owner is not owner else None


def ours() -> bool:
    """Whether this thread's trace function is one of these: that of a call around this one."""
    return isinstance(getattr(sys.gettrace(), "__self__", None), Raises)


# --- from 3.12 --------------------------------------------------------------------------------


def _monitor() -> bool:
    """Have RAISE events come; False where no tool id is free."""
    global _tool
    if _tool >= 0:
        return True
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    for tool in _TOOLS:
        try:
            monitoring.use_tool_id(tool, "kvtrace")
        except ValueError:
            continue
        monitoring.register_callback(tool, monitoring.events.RAISE, _raised)
        monitoring.set_events(tool, monitoring.events.RAISE)
        _tool = tool
        return True
    return False


def _raised(code: CodeType, offset: int, error: BaseException) -> None:
    stack = _here.get(get_ident(), [])
    for raises in stack:
        try:
            # What is raised in a connector inside another one is the inner one's.
            if raises.owner is stack[-1].owner and raises.owner.owns(code.co_filename):
                raises.keep(error)
        except Exception:
            return
