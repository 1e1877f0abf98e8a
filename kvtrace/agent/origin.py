"""For which step a thread works: what it was asked by, kept beside the work on its way through executors,
queues, event loops and threads."""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from typing import Any, NamedTuple

from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap import frames
from kvtrace.trace import hooks
from kvtrace.trace.format import Role


class WorkOrigin(NamedTuple):
    """``step`` 0: not known. ``hook``: the one that handed the work over, "" for none, with its layer."""

    step: int
    connector: int
    hook: str = ""
    layer: str | None = None

    def unless_after(self, step: int) -> WorkOrigin:
        """Of what may live on and do the work of later steps, with nothing to say for which: it holds until
        the worker is past that step."""
        return self if AGENT.worker.latest <= step else self._replace(step=0)


class _OfThread(threading.local):
    origin: WorkOrigin | None = None
    """Of the work that this thread does."""
    work: Any = None
    """The watched call, or piece of background work, that this thread is in."""
    did: int = 0
    """When (``clock``) this thread last read or wrote KV slots, or sent bytes out, where that is watched."""
    failed: int = 0
    """When code of a connector last met an error of the system here (a full disk), where that is watched."""
    own: int = 0
    """ns that the watch has taken in watched calls of this thread, of all so far."""


HERE = _OfThread()
ORIGIN: ContextVar[WorkOrigin | None] = ContextVar("kvtrace_origin", default=None)


def origin_here() -> WorkOrigin | None:
    """For what the calling thread works: a hook on its stack, or what it was handed; None for neither."""
    if HERE.origin is not None:
        return HERE.origin
    if not frames.any_known():
        return None
    running = frames.innermost(sys._getframe(2))
    if running is None:
        return ORIGIN.get()
    hook = hooks.BY_NAME.get(running.hook)
    if hook is None:  # a connector is being made
        return WorkOrigin(0, running.connector, running.hook)
    step = AGENT.worker.step if hook.role == Role.WORKER else AGENT.scheduler.step
    return WorkOrigin(step, running.connector, running.hook, running.layer)
