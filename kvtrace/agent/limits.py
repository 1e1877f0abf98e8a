"""What of a connector's work the watch can't follow: WatchLimits facts, each thing said once.

A read that nobody saw is no proof that nothing was read: with these facts the analysis knows where it must
say "not observed", and why.
"""

from __future__ import annotations

import sys
import threading

from kvtrace.agent.code import owners, traces
from kvtrace.agent.origin import origin_here
from kvtrace.agent.state import AGENT
from kvtrace.trace import facts
from kvtrace.trace.facts import Limit
from kvtrace.trace.format import Role

_MOST_OF_A_KIND = 8
_MAX_TEXT = 200

_said: dict[tuple[int, Limit], set[str]] = {}
_lock = threading.Lock()
AGENT.openings.append(_said.clear)


def say(kind: Limit, what: str, index: int = 0, step: int = 0, where: str = "") -> None:
    """Write it down if it is new. Never raises.

    Args:
        what: the function, operation, program or thread by name.
        index: of the connector; 0: the one for which the calling thread works, if it does.
        step: from which on; 0 with no ``index``: the one for which the calling thread works.
        where: place in the connector's code; "": that which runs in the calling thread.
    """
    try:
        if AGENT.recorder is None:
            return
        hook = ""
        if not index:
            origin = origin_here()
            if origin is None:
                return
            step, index, hook = origin[:3]
        if _new(kind, what[:_MAX_TEXT], index):
            where = where or _place(index)
            fact = facts.WatchLimitsFact(index, kind, what[:_MAX_TEXT], where, hook, step)
            AGENT.fact(fact, Role.WORKER, flush=False)
    except Exception:
        AGENT.failed("limits")


def _new(kind: Limit, what: str, index: int) -> bool:
    with _lock:
        known = _said.setdefault((index, kind), set())
        if what in known or len(known) >= _MOST_OF_A_KIND:
            return False
        known.add(what)
        return True


def _place(index: int) -> str:
    """The connector's innermost line that runs in this thread."""
    owner = owners.owner_of(index)
    for frame in traces.outwards(sys._getframe(2)):
        if owner is not None and owner.owns(frame.f_code.co_filename):
            return traces.place(frame.f_code, frame.f_lineno)
    return ""
