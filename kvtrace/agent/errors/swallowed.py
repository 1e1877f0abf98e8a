"""Exceptions that a connector raises and handles itself during an observed call.

Only the connector's own frames are looked at (see ``code/owners.py``, and ``raises.py`` for how).

Left out: what escapes the hook (that is ``hook-raised``), the cause of an exception that is
itself reported or escapes, StopIteration and its like, and ordinary control flow:
KeyError, AttributeError, IndexError, ImportError, ``queue.Empty`` that the same frame handles. Where such a
one meets a handler for anything at all (``except Exception``) in a hook that saves, and the call reads no KV
after it, it may be a mistake of the author's: it is written, marked ``broad``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import dropwhile
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from kvtrace.agent import limits
from kvtrace.agent.code import handlers, owners, traces
from kvtrace.agent.code.owners import Owner, OwnerToCome
from kvtrace.agent.errors import logs, raises
from kvtrace.agent.errors.raises import Raised, Raises
from kvtrace.agent.origin import HERE
from kvtrace.agent.state import AGENT, clock, is_ours, where_raised
from kvtrace.agent.wrap.once import wrap_once
from kvtrace.trace import facts, hooks
from kvtrace.trace.facts import Limit
from kvtrace.trace.format import Role

THREAD, EXECUTOR, ASYNCIO = "thread", "executor", "asyncio"
BACKGROUND = (THREAD, EXECUTOR, ASYNCIO)
MAX_FACTS = 100
_MAX_LATEST = 64
_MAX_TOLD = 64
_STOPS = (KeyboardInterrupt, SystemExit)
_ORDINARY = (KeyError, AttributeError, IndexError, ImportError)
_NO_FAILED_WRITE = (FileNotFoundError, FileExistsError, ConnectionError, TimeoutError)
_SAVING = frozenset(hook.name for hook in hooks.SAVING)

_seen_before: dict[tuple[str, int, str, str], int] = {}
_observed: dict[tuple[str, int], int] = {}


class About(NamedTuple):
    """The call or work in which exceptions were caught. ``asked_by``: the hook that handed the work over."""

    layer: str | None
    step: int
    asked_by: str = ""


class CallErrors:
    """``start`` and ``stop`` around one call or piece of work, in its thread.

    Args:
        hook: name of the hook; one of BACKGROUND for work in the background.
        handled: what to call as soon as exceptions of work that need not end were handled.
    """

    def __init__(
        self, hook: str, role: Role, owner: Owner | OwnerToCome, handled: Callable[[], None] | None = None
    ) -> None:
        self._hook, self._role = hook, role
        self._owner = owner
        self._background = hook in BACKGROUND
        self.raises = Raises(owner, self._see, handled, self._background)
        self.running = False
        self._observed_it = False
        self._logged = 0
        self._began = 0
        self._told: dict[int, Raised] = {}
        self._gone: dict[int, str] = {}
        """Ids and types of exceptions of which other facts speak."""

    def start(self) -> bool:
        self._logged = logs.emitted()
        self._began = self._began or clock()
        self.running = self.raises.start()
        self._observed_it |= self.running
        if not self.running and not raises.ours():
            limits.say(Limit.EXCEPTIONS, _tracer(), self._owner.index)
        return self.running

    def stop(self) -> None:
        self.raises.stop()
        self.running = False

    def logged(self, error: BaseException) -> None:
        """The connector logs an exception: it was caught, also where none of its frames saw it pass."""
        if len(self._told) < _MAX_TOLD:
            trace = error.__traceback__
            where = _place(trace, error, self._owner, self._background) or where_raised(error, self._owner)
            self._told[id(error)] = _seen(error, trace, where)._replace(logged=True)

    def said_elsewhere(self, error: BaseException) -> None:
        """Another fact speaks of it."""
        if len(self._gone) < _MAX_TOLD:
            self._gone[id(error)] = traces.type_name(error)

    def report(self, escaped: BaseException | None, about: About) -> None:
        """Write the facts, after ``stop``, or between two pieces of work.

        Args:
            escaped: the exception that left the hook, or in which work in the background ended.
        """
        if escaped is None and self.raises.none and not self._told:
            self._began = clock()
            self._gone.clear()
            if self._observed_it:
                self._counted()
            return
        ended = escaped if self._background and not _is_a_stop(escaped) else None
        if self._observed_it or ended is not None:
            self._counted()
        for caught in self._caught(escaped):
            self._write(caught, about)
        if ended is not None:
            where = _place(ended.__traceback__, ended, self._owner, True) or where_raised(ended, self._owner)
            self._write(_seen(ended, ended.__traceback__, where)._replace(ended=True), about)
        self._gone.clear()
        self._began = clock()

    def _see(self, error: BaseException, trace: TracebackType | None) -> Raised | None:
        """What is written of an exception, should it be caught where it has come to."""
        if isinstance(error, OSError) and not isinstance(error, _NO_FAILED_WRITE):
            HERE.failed = clock()
        where = _place(trace, error, self._owner, self._background)
        broad = None
        if where is None and self._hook in _SAVING:
            where = _broad_place(trace, error, self._owner)
            broad = where is not None or None
        if where is None:
            return None
        far = broad is None and _taken_far(trace, error, self._owner)
        return _seen(error, trace, where, broad)._replace(far=far or None)

    def _caught(self, escaped: BaseException | None) -> list[Raised]:
        """What was raised and caught since the last report, and what was logged."""
        self.raises.forget(escaped)
        told, self._told = self._told, {}
        for error in raises.with_causes(escaped):
            told.pop(id(error), None)
        raised = [one for one in self.raises.take() if one.key not in told]
        found = [one for one in (*raised, *told.values()) if self._gone.get(one.key) != one.name]
        last = {(one.name, one.where): one.t for one in found}
        timed = [one._replace(went_on=self._went_on(last[one.name, one.where])) for one in found]
        return [one for one in timed if not (one.broad and one.went_on)]

    def _went_on(self, t: int) -> bool | None:
        if HERE.did > t:
            return True
        return False if HERE.did > self._began and self._hook != ASYNCIO else None

    def _counted(self) -> None:
        calls = (self._hook, self._owner.index)
        _observed[calls] = _observed.get(calls, 0) + 1

    def _write(self, seen: Raised, about: About) -> None:
        if _repeated(seen, self._hook):
            return
        index = self._owner.index
        key = (self._hook, index, seen.name, seen.where)
        count = _seen_before.get(key, 0) + 1
        if count == 1 and len(_seen_before) >= MAX_FACTS:
            return
        _seen_before[key] = count
        if count > facts.TOLD_EACH and count & (count - 1):
            return
        fact = facts.SwallowedFact(
            hook=self._hook,
            layer=about.layer,
            step=about.step,
            connector=index,
            type=seen.name,
            message=seen.message,
            where=seen.where,
            asked_by=about.asked_by,
            ended=seen.ended,
            went_on=seen.went_on,
            observed_calls=_observed.get((self._hook, index), 0),
            count=count,
            logged=seen.logged or logs.emitted() > self._logged,
            broad=seen.broad,
            far=seen.far,
        )
        AGENT.fact(fact, self._role)


def _seen(error: BaseException, trace: TracebackType | None, where: str, broad: bool | None = None) -> Raised:
    inside, message = _innermost(trace), AGENT.said(error, trace=trace)
    return Raised(id(error), traces.type_name(error), clock(), where, inside, message, _handed(trace), broad)


class _Known(NamedTuple):
    """An exception that was written at ``t``."""

    seen: Raised
    hook: str
    t: int


_latest: dict[int, _Known] = {}
AGENT.openings += (_seen_before.clear, _observed.clear, _latest.clear)


def _repeated(seen: Raised, hook: str) -> bool:
    """Whether this very exception was written already, by other work that it went through.

    Its id says so only while it lives, and nothing may keep it alive for us. So it must have been seen here
    when the other was written, or one of the two came from another stack, as out of a future."""
    known = _latest.get(seen.key)
    if known is not None and known.hook != hook:
        old = known.seen
        asked = (old.ended or seen.ended) and (old.logged or seen.logged)
        later = seen.t <= known.t or old.handed or seen.handed or asked
        if later and (old.name, old.inside) == (seen.name, seen.inside):
            return True
    _latest[seen.key] = _Known(seen, hook, clock())
    while len(_latest) > _MAX_LATEST:
        _latest.pop(next(iter(_latest)), None)
    return False


def _handed(trace: TracebackType | None) -> bool:
    """Whether it was raised again outside of the calls in which it was raised first."""
    while trace is not None and trace.tb_next is not None:
        frame: FrameType | None = trace.tb_next.tb_frame
        if frame is not trace.tb_frame:  # else: raised again where it was caught
            frame = trace.tb_next.tb_frame.f_back
        while frame is not None and frame is not trace.tb_frame and is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not trace.tb_frame:
            return True
        trace = trace.tb_next
    return False


def _tracer() -> str:
    """What holds this thread's trace function."""
    tracer = sys.gettrace()
    return str(getattr(type(tracer), "__module__", "")) if tracer is not None else "sys.monitoring"


def _is_a_stop(error: BaseException | None) -> bool:
    return isinstance(error, (*raises.IGNORED, *_STOPS)) or type(error).__name__ == "CancelledError"


def _innermost(trace: TracebackType | None) -> str:
    """The frame that raised it; never a wrapper of ours."""
    last = None
    for one in traces.entries(trace):
        if last is None or not is_ours(_file(one)):
            last = one
    return "" if last is None else _place_of(last)


def _place_of(trace: TracebackType) -> str:
    return traces.place(trace.tb_frame.f_code, trace.tb_lineno)


def _broad_place(trace: TracebackType | None, error: BaseException, owner: Owner | OwnerToCome) -> str | None:
    """The frame of the connector's whose handler for anything took an exception; None for any other."""
    if trace is None or not owner.owns(_file(trace)):
        return None
    return _place_of(trace) if _takes_anything(trace, error) else None


def _taken_far(trace: TracebackType | None, error: BaseException, owner: Owner | OwnerToCome) -> bool:
    """Whether a handler for anything takes it in another frame of the connector's than the innermost one."""
    if trace is None or not owner.owns(_file(trace)):
        return False
    deeper = any(owner.owns(_file(one)) for one in traces.entries(trace.tb_next))
    return deeper and _takes_anything(trace, error)


def _takes_anything(trace: TracebackType, error: BaseException) -> bool:
    names = [cls.__name__ for cls in type(error).__mro__ if cls not in (Exception, BaseException, object)]
    return bool(handlers.takes_anything(trace.tb_frame.f_code, trace.tb_lasti, names))


def _place(
    trace: TracebackType | None, error: BaseException, owner: Owner | OwnerToCome, background: bool
) -> str | None:
    """Innermost frame of the connector's; None for ordinary control flow, and for what the
    connector's code did not itself handle (in the background: what did not pass through it)."""
    # without the executor or event loop that ran it
    passed = list(dropwhile(lambda one: owners.is_stdlib_file(_file(one)), traces.entries(trace)))
    own = [one for one in passed if owner.owns(_file(one))]
    if not own or not (background or own[0] is passed[0]):
        return None
    deeper = [_file(one) for one in passed[passed.index(own[0]) + 1 :]]
    ordinary = isinstance(error, _ORDINARY) or type(error).__name__ == "Empty"
    if ordinary and all(map(owners.is_stdlib_file, deeper)):
        return None
    return _place_of(own[-1])


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


# --- the connector's own threads ----------------------------------------------------------


def install_thread_hook() -> None:
    """Note what ends a thread of the connector's (``threading.excepthook``, chained)."""
    wrap_once(threading, "excepthook", _dying)


def _dying(before: Any) -> Any:
    def excepthook(args: Any, /) -> Any:
        try:
            _thread_died(args.exc_value)
        except Exception:
            AGENT.failed("thread")
        return before(args)

    return excepthook


def _thread_died(error: BaseException | None) -> None:
    if error is None:
        return
    origin = HERE.origin
    index = 0 if origin is None else origin.connector
    index = index or next(
        filter(None, map(owners.index_of, map(_file, traces.entries(error.__traceback__)))), 0
    )
    if not index:
        return
    if HERE.work is not None:
        HERE.work.swallowed.said_elsewhere(error)
    # of work that no step asked for, the last step that had begun
    step = (0 if origin is None else origin.step) or AGENT.worker.latest
    AGENT.exception(THREAD, None, step, index, error)
