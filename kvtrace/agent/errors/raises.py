"""Exceptions that are raised in a connector's frames while a thread works for it.

From Python 3.12 the RAISE event of ``sys.monitoring``, with a tool id of our own that is kept from the first
use on (to take it and give it back for each call would make Python look at all its code again); before that
a trace function confined to one thread and one piece of work. Where a debugger or a coverage tool has the
trace function, or no tool id is free, nothing is recorded: the user's tool goes first.

An exception holds its frames, and these their locals, KV tensors among them. So it is looked at while it
passes, and only texts and numbers are kept: it is gone when the connector lets go of it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from kvtrace.agent.code.owners import Owner, OwnerToCome
from kvtrace.agent.code.traces import entries, type_name
from kvtrace.agent.state import get_ident
from kvtrace.agent.wrap.tracing import set_trace

_MAX_KEPT = 64
_MAX_CALLERS = 16
_MAX_CAUSES = 16
_MANY_CALLS = 1 << 12
_CALL = 500
"""ns that a call takes longer with a trace function, more or less."""
_MONITORED = hasattr(sys, "monitoring")
_TOOLS = (4, 3)

_here: dict[int, list[Raises]] = {}
_tool = -1


IGNORED = (StopIteration, StopAsyncIteration, GeneratorExit)
"""How generators end."""
_LEAVES = frozenset({"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "RETURN_GENERATOR", "SUSPEND"})
"""Instructions with which a frame is left without an exception."""


class Raised(NamedTuple):
    """What is kept of an exception. ``key``: its id, good only while it lives; ``t``: when a frame of the
    connector's saw it last, host ns; ``inside``: the innermost frame of all; the rest as in
    :class:`kvtrace.trace.facts.SwallowedFact`."""

    key: int
    name: str
    t: int
    where: str
    inside: str
    message: str
    handed: bool
    """Whether it was raised again outside of the calls in which it was raised first."""
    broad: bool | None = None
    far: bool | None = None
    logged: bool = False
    went_on: bool | None = None
    ended: bool | None = None


See = Callable[[BaseException, "TracebackType | None"], "Raised | None"]
"""What is to be kept of an exception that has come as far as the traceback says; None: nothing."""


class _Entry(NamedTuple):
    """``top``, ``frame``: ids of the traceback's first entry and its frame."""

    seen: Raised
    top: int
    frame: int

    def passed(self, trace: TracebackType | None) -> bool:
        """Whether a traceback goes through it: both ids, as another exception may have got one of them."""
        return (self.top, self.frame) in ((id(one), id(one.tb_frame)) for one in entries(trace))


class Raises:
    """The exceptions of one piece of work. ``start`` and ``stop`` in its thread; those who start last stop
    first.

    Args:
        handled: what to call once nothing that was raised is on its way any more, and every now and then.
        passing: keep also what leaves the connector's frames unhandled, as far as the work's own.
    """

    def __init__(
        self,
        owner: Owner | OwnerToCome,
        see: See,
        handled: Callable[[], None] | None = None,
        passing: bool = False,
    ) -> None:
        self.owner = owner
        self._see = see
        self._handled = handled
        self._passing = passing
        self._ident = 0
        self._entries: list[_Entry] = []
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
        return not self._entries

    def take(self) -> list[Raised]:
        """What was raised so far; it is forgotten here."""
        entries, self._entries = self._entries, []
        return [entry.seen for entry in entries]

    def forget(self, error: BaseException | None) -> None:
        """What is said of an exception says it of its causes too."""
        for one in with_causes(error):
            known = self._known(one)
            if known is not None and known.passed(one.__traceback__):
                self._entries.remove(known)

    def cost(self) -> int:
        """ns of processor time that looking took since it was last asked, more or less."""
        calls, self._calls = self._calls, 0
        return calls * _CALL

    def _known(self, error: BaseException) -> _Entry | None:
        name = type_name(error)
        found = (
            one for one in reversed(self._entries) if one.seen.key == id(error) and one.seen.name == name
        )
        return next(found, None)

    def _goes_on(self) -> None:
        """Before a frame begins, or something else is raised: where no handler runs, all was handled."""
        if self._handled is None or not (self._entries or self._calls > _MANY_CALLS):
            return
        if sys.exc_info()[1] is None:
            self._handled()

    def keep(self, error: Any, trace: TracebackType | None) -> None:
        if not isinstance(error, BaseException) or isinstance(error, IGNORED) or trace is None:
            return
        known = self._known(error)
        if known is None:
            self._goes_on()
        elif known.passed(trace.tb_next):
            self._entries.remove(known)  # it has come further; else another one had its id
        if len(self._entries) >= _MAX_KEPT:
            return
        self.forget(error.__cause__)
        seen = self._see(error, trace)
        if seen is not None:
            self._entries.append(_Entry(seen, id(trace), id(trace.tb_frame)))

    def _exited(self, frame: FrameType) -> None:
        """A frame of the connector's did not handle what it saw last."""
        if not self._passing and self._entries:
            at = id(frame)
            self._entries = [entry for entry in self._entries if entry.frame != at]

    # --- before 3.12 ----------------------------------------------------------------------

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._calls += 1
        try:
            self._goes_on()
            if not self.owner.owns(frame.f_code.co_filename):
                return None
            frame.f_trace_lines = False
            return self._inside
        except Exception:
            return None

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._calls += 1
        try:
            if event == "exception" and arg:
                self.keep(arg[1], arg[2])
                # Python keeps a copy of the frame's variables from one event to the next: what the handler
                # lets go of must not wait for the call's end.
                frame.f_trace_lines = True
            elif event == "return" and arg is None and self._entries and _raises(frame):
                self._exited(frame)
        except Exception:
            return self._inside
        return self._inside


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__


def _raises(frame: FrameType) -> bool:
    """Whether a frame that is being left is left by an exception."""
    at, code = frame.f_lasti, frame.f_code.co_code
    return not (0 <= at < len(code) and dis.opname[code[at]] in _LEAVES)


def _around(owner: Owner | OwnerToCome) -> Raises | None:
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
        monitoring.register_callback(tool, monitoring.events.PY_UNWIND, _unwound)
        monitoring.set_events(tool, monitoring.events.RAISE | monitoring.events.PY_UNWIND)
        _tool = tool
        return True
    return False


def _raised(code: CodeType, offset: int, error: BaseException) -> None:
    stack = _here.get(get_ident(), [])
    for raises in stack:
        try:
            # What is raised in a connector inside another one is the inner one's.
            if raises.owner is stack[-1].owner and raises.owner.owns(code.co_filename):
                raises.keep(error, error.__traceback__)
        except Exception:
            return


def _unwound(code: CodeType, offset: int, error: BaseException) -> None:
    for raises in _here.get(get_ident(), []):
        if not raises.none:
            raises._exited(sys._getframe(1))
