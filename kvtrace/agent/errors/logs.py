"""Log records of WARNING and above that appear inside a connector's hook, as LOG facts.

``logging.Logger.handle`` is wrapped: it gets every record that was made, before filters and
handlers, so a record that no handler shows counts as well. Nothing is added to what the user
sees and no logger, level or handler is changed. A record that its logger's level drops is
never made, and not seen.

The hooks themselves pay nothing: which one runs is found, for the rare warning, by walking
the stack to a frame of our wrappers. Warnings of the connector's own code outside any hook
(its threads, its constructor) are kept under the hook "thread" or "". Where a thread's warning
holds an exception, that is one which the connector caught there: a SWALLOWED fact as well.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from kvtrace.agent.code import foreign, owners
from kvtrace.agent.code.traces import type_name
from kvtrace.agent.origin import HERE
from kvtrace.agent.state import AGENT, get_ident, where_raised
from kvtrace.agent.wrap import frames
from kvtrace.agent.wrap.once import wrap_once
from kvtrace.trace.facts import LogFact, SwallowedFact
from kvtrace.trace.format import Role

MAX_FACTS = 100

_counts: dict[tuple[str, str, str], int] = {}
_by_thread: dict[int, int] = {}
AGENT.openings.append(_counts.clear)


def emitted() -> int:
    """Warnings seen inside hooks in this thread so far."""
    return _by_thread.get(get_ident(), 0)


def install() -> None:
    """Idempotent."""
    wrap_once(logging.Logger, "handle", _handling)


def _handling(original: Any) -> Any:
    def handle(self: logging.Logger, record: logging.LogRecord) -> Any:
        if record.levelno >= logging.WARNING:
            try:
                _seen(self, record)
            except Exception:
                AGENT.failed("log")
        return original(self, record)

    return handle


def _seen(logger: logging.Logger, record: logging.LogRecord) -> None:
    if AGENT.recorder is None:
        return
    if record.pathname.replace("\\", "/").endswith(owners.BASES):
        return  # vLLM's own: "Initializing KVConnectorBase_V1. This API is experimental"
    place = frames.innermost(sys._getframe(1))
    if place is None:
        index = owners.index_of(record.pathname)
        if not index:
            return
        main = threading.current_thread() is threading.main_thread()
        place = frames.Running("" if main else "thread", index, None)
    else:
        _by_thread[get_ident()] = emitted() + 1
    hook, index, layer = place
    key = (record.name, str(record.msg), hook)
    count = _counts.get(key, 0) + 1
    if count == 1 and len(_counts) >= MAX_FACTS:
        return
    _counts[key] = count
    error = _exception(record) if hook == "thread" else None
    if error is not None and HERE.work is not None:
        HERE.work.swallowed.logged(error)  # the watch of that work says it, with the step
        error = None
    if count & (count - 1):
        return  # repeats: said again at 2, 4, 8, ...
    if error is not None:
        _caught_in_thread(error, index, count)
    fact = LogFact(
        logger=record.name,
        level=record.levelname,
        message=foreign.of_record(record, AGENT.config.keep_messages),
        hook=hook,
        layer=layer,
        step=AGENT.worker.step,
        connector=index,
        shown=_shown(logger, record.levelno),
        count=count,
    )
    AGENT.fact(fact, Role.WORKER)


def _exception(record: logging.LogRecord) -> BaseException | None:
    """The exception that a record speaks of: its own, or one among its arguments."""
    logged = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    arguments = record.args if isinstance(record.args, tuple) else ()
    return logged or next((value for value in arguments if isinstance(value, BaseException)), None)


def _caught_in_thread(error: BaseException, index: int, count: int) -> None:
    fact = SwallowedFact(
        hook="thread",
        connector=index,
        type=type_name(error),
        message=AGENT.said(error),
        where=where_raised(error, owners.owner_of(index)),
        count=count,
        logged=True,
    )
    AGENT.fact(fact, Role.WORKER)


def _shown(logger: logging.Logger, level: int) -> bool:
    current: logging.Logger | None = logger
    found = False
    while current is not None:
        for handler in current.handlers:
            found = True
            if level >= handler.level and not isinstance(handler, logging.NullHandler):
                return True
        current = current.parent if current.propagate else None
    last = logging.lastResort
    return not found and last is not None and level >= last.level
