"""Exceptions that a connector raises and handles itself during an observed call.

Only the connector's own frames are looked at (see ``owners.py``, and ``watch/raises.py`` for how).

Left out: what escapes the hook (that is ``hook-raised``), the cause of an exception that is
itself reported or escapes, StopIteration and its like, and ordinary control flow:
KeyError, AttributeError, IndexError, ImportError, ``queue.Empty`` that the same frame handles.
"""

from __future__ import annotations

import threading
from typing import Any

from kvtrace.agent import logs, owners
from kvtrace.agent.owners import Owner
from kvtrace.agent.state import AGENT, where_raised
from kvtrace.agent.watch.raises import Raises
from kvtrace.trace import facts
from kvtrace.trace.format import Role
from kvtrace.trace.mask import mask_text

MAX_FACTS = 100
_MAX_LATEST = 64
_MAX_TOLD = 64
_IGNORED = (StopIteration, StopAsyncIteration, GeneratorExit)
_STOPS = (KeyboardInterrupt, SystemExit)
_ORDINARY = (KeyError, AttributeError, IndexError, ImportError)

_seen: dict[tuple[str, int, str, str], int] = {}
_observed: dict[tuple[str, int], int] = {}
_spool: object = None


class Swallowed:
    """``start`` and ``stop`` around one call or piece of work, in its thread.

    Args:
        hook: name of the hook; "thread", "executor" or "asyncio" for work in the background.
        index: of the connector.
    """

    def __init__(self, hook: str, index: int, role: Role, owner: Owner) -> None:
        self._hook, self._index, self._role = hook, index, role
        self._owner = owner
        self.raises = Raises(owner)
        self.running = False
        self._observed_it = False
        self._logged = 0
        self._told: dict[int, BaseException] = {}

    def start(self) -> bool:
        self._logged = logs.emitted()
        self.running = self.raises.start()
        self._observed_it |= self.running
        return self.running

    def stop(self) -> None:
        self.raises.stop()
        self.running = False

    def logged(self, error: BaseException) -> bool:
        """The connector logs an exception: it was caught, also where none of its frames saw it pass."""
        if len(self._told) < _MAX_TOLD:
            self._told[id(error)] = error
        return True

    def report(
        self, escaped: BaseException | None, layer: str | None, step: int, ended: bool = False
    ) -> None:
        """Write the facts, after ``stop``.

        Args:
            escaped: the exception that left the hook, or in which work in the background ended.
            ended: it was in the background: the exception stands in a future, and nobody may ask.
        """
        told, self._told = self._told, {}
        errors = [*({id(error): error for error in self.raises.take()} | told).values()]
        if self._observed_it or (ended and escaped is not None):
            self._counted()
        left_out = {id(error) for error in _with_causes(escaped)}
        for error in errors:
            left_out.update(id(cause) for cause in _with_causes(error.__cause__))
        for error in errors:
            if id(error) in left_out or isinstance(error, _IGNORED):
                continue
            where = _place(error, self._owner)
            if id(error) in told:
                where = where or where_raised(error)
            if where is not None:
                self._write(error, where, layer, step, id(error) in told)
        stopped = isinstance(escaped, (*_IGNORED, *_STOPS)) or type(escaped).__name__ == "CancelledError"
        if ended and escaped is not None and not stopped:
            self._write(escaped, _place(escaped, self._owner) or where_raised(escaped), layer, step)

    def _counted(self) -> None:
        global _spool
        if _spool is not AGENT.recorder:
            _spool = AGENT.recorder
            _seen.clear()
            _observed.clear()
        calls = (self._hook, self._index)
        _observed[calls] = _observed.get(calls, 0) + 1

    def _write(
        self, error: BaseException, where: str, layer: str | None, step: int, logged: bool = False
    ) -> None:
        name = type(error).__name__
        message = mask_text(_text(error)[:2000])[:500]
        if _same_again(error, name, message, self._hook):
            return
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
            message=message,
            where=where,
            observed_calls=_observed.get((self._hook, self._index), 0),
            count=count,
            logged=logged or logs.emitted() > self._logged,
        )
        AGENT.fact(fact, self._role)


_latest: dict[int, tuple[str, str, str]] = {}


def _same_again(error: BaseException, name: str, message: str, hook: str) -> bool:
    """Whether this very exception was written already, by other work that it went through."""
    known = _latest.get(id(error))
    if known is not None and known[:2] == (name, message) and known[2] != hook:
        return True
    _latest[id(error)] = (name, message, hook)
    while len(_latest) > _MAX_LATEST:
        _latest.pop(next(iter(_latest)), None)
    return False


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
    while trace is not None and owners.is_stdlib_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next  # the executor or event loop that ran it
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
