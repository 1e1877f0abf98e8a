"""Exceptions that a connector raises and handles itself during an observed call.

From Python 3.12 ``sys.monitoring`` (a tool id of our own, taken for the call and given back);
before that a trace function confined to the call and its thread. Where a debugger or a
coverage tool has the trace function, or no tool id is free, nothing is observed: the user's
tool goes first. Only the connector's own frames are looked at (see ``owners.py``).

Left out: what escapes the hook (that is ``hook-raised``), the cause of an exception that is
itself reported or escapes, StopIteration and its like, and ordinary control flow:
KeyError, AttributeError, IndexError, ImportError, ``queue.Empty`` that the same frame handles.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

from kvtrace.agent import logs, owners
from kvtrace.agent.owners import Owner
from kvtrace.agent.site import Site
from kvtrace.agent.state import AGENT, get_ident
from kvtrace.trace import facts
from kvtrace.trace.mask import mask_text

MAX_FACTS = 100
_MAX_KEPT = 64
_IGNORED = (StopIteration, StopAsyncIteration, GeneratorExit)
_ORDINARY = (KeyError, AttributeError, IndexError, ImportError)

_seen: dict[tuple[str, int, str, str], int] = {}
_observed: dict[tuple[str, int], int] = {}
_spool: object = None


class _Kept:
    """The exceptions of one call, by identity; freed with it."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.errors: dict[int, BaseException] = {}

    def keep(self, error: Any) -> None:
        if isinstance(error, BaseException) and len(self.errors) < _MAX_KEPT:
            self.errors[id(error)] = error


class _Tracer(_Kept):
    """Before 3.12: ``sys.settrace`` for one call."""

    def start(self) -> bool:
        if sys.gettrace() is not None:
            return False
        sys.settrace(self._call)
        return True

    def stop(self) -> None:
        if sys.gettrace() == self._call:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
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


class _Monitor(_Kept):
    """From 3.12: the RAISE event of ``sys.monitoring``."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._tool = -1
        self._ident = get_ident()

    def start(self) -> bool:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        for tool in (4, 3):
            try:
                monitoring.use_tool_id(tool, "kvtrace")
            except ValueError:
                continue
            self._tool = tool
            monitoring.register_callback(tool, monitoring.events.RAISE, self._raised)
            monitoring.set_events(tool, monitoring.events.RAISE)
            return True
        return False

    def stop(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        if self._tool >= 0:
            monitoring.set_events(self._tool, 0)
            monitoring.register_callback(self._tool, monitoring.events.RAISE, None)
            monitoring.free_tool_id(self._tool)

    def _raised(self, code: CodeType, offset: int, error: BaseException) -> None:
        try:
            if get_ident() == self._ident and self.owner.owns(code.co_filename):
                self.keep(error)
        except Exception:
            return


class Swallowed:
    """``start`` and ``stop`` around one call, in its thread."""

    def __init__(self, site: Site, owner: Owner) -> None:
        self._hook, self._index, self._role = site.hook.name, site.index, site.role
        self._owner = owner
        self._kept: Any = None
        self._logged = 0

    def start(self) -> None:
        kept: Any = (_Monitor if hasattr(sys, "monitoring") else _Tracer)(self._owner)
        self._logged = logs.emitted()
        if kept.start():
            self._kept = kept

    def stop(self) -> None:
        if self._kept is not None:
            self._kept.stop()

    def report(self, escaped: BaseException | None, layer: str | None, step: int) -> None:
        """Write the facts, after ``stop``. ``escaped``: the exception that left the hook."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        global _spool
        if _spool is not AGENT.recorder:
            _spool = AGENT.recorder
            _seen.clear()
            _observed.clear()
        calls = (self._hook, self._index)
        _observed[calls] = _observed.get(calls, 0) + 1
        errors = list(kept.errors.values())
        kept.errors.clear()
        left_out = {id(error) for error in _with_causes(escaped)}
        for error in errors:
            left_out.update(id(cause) for cause in _with_causes(error.__cause__))
        for error in errors:
            if id(error) in left_out or isinstance(error, _IGNORED):
                continue
            where = _place(error, self._owner)
            if where is not None:
                self._write(error, where, layer, step)

    def _write(self, error: BaseException, where: str, layer: str | None, step: int) -> None:
        name = type(error).__name__
        key = (self._hook, self._index, name, where)
        count = _seen.get(key, 0) + 1
        if count == 1 and len(_seen) >= MAX_FACTS:
            return
        _seen[key] = count
        if count > 16 and count & (count - 1):
            return
        fact = facts.Swallowed(
            hook=self._hook,
            layer=layer,
            step=step,
            connector=self._index,
            type=name,
            message=mask_text(_text(error)[:2000])[:500],
            where=where,
            observed_calls=_observed[(self._hook, self._index)],
            count=count,
            logged=logs.emitted() > self._logged,
        )
        AGENT.fact(fact, self._role)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _with_causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and len(found) < 16:
        found.append(error)
        error = error.__cause__
    return found


def _place(error: BaseException, owner: Owner) -> str | None:
    """Innermost frame of the connector's; None for ordinary control flow, and for what the
    connector's code did not itself handle."""
    frames: list[tuple[str, int, str]] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    if not frames or not owner.owns(frames[0][0]):
        return None
    of_connector = [frame for frame in frames if owner.owns(frame[0])]
    deeper = frames[1:]
    ordinary = isinstance(error, _ORDINARY) or type(error).__name__ == "Empty"
    if ordinary and all(owners.is_stdlib_file(file) for file, _, _ in deeper):
        return None
    file, line, function = of_connector[-1]
    return f"{'/'.join(file.replace(chr(92), '/').split('/')[-2:])}:{line} in {function}"


# --- the connector's own threads ----------------------------------------------------------


def install_thread_hook() -> None:
    """Note what ends a thread of the connector's (``threading.excepthook``, chained)."""
    before = threading.excepthook
    if hasattr(before, "_kvtrace"):
        return

    def excepthook(args: Any, /) -> Any:
        try:
            _thread_died(args.exc_value)
        except Exception:
            AGENT.failed("thread")
        return before(args)

    excepthook._kvtrace = True  # type: ignore[attr-defined]
    threading.excepthook = excepthook


def _thread_died(error: BaseException | None) -> None:
    trace = error.__traceback__ if error is not None else None
    index = 0
    while trace is not None and not index:
        index = owners.index_of(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    if index and error is not None:
        AGENT.exception("thread", None, AGENT.worker.step, index, error)
