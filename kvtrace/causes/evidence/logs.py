"""What the connector logged and caught: its exceptions and log lines as evidence."""

from __future__ import annotations

from collections.abc import Iterable

from kvtrace.causes.case import Case
from kvtrace.ledger.reported import BACKGROUND, SAVE_HOOKS
from kvtrace.ledger.run import Engine, HookException, LogLine, Swallowed
from kvtrace.trace.facts import TOLD_EACH
from kvtrace.words import plural

_MAX_TEXT = 200
_MOST = 2
"""Lines of a kind that are quoted."""
_BACKGROUND = {
    "thread": "its threads",
    "executor": "jobs of its thread pool",
    "asyncio": "tasks of its event loop",
}


def shortened(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= _MAX_TEXT else one[: _MAX_TEXT - 1] + "…"


def place(hook: str) -> str:
    """Where an exception was caught, in words."""
    return _BACKGROUND.get(hook, hook)


def error(fact: HookException | Swallowed) -> str:
    """``OSError: no space``."""
    return fact.type + (f": {shortened(fact.message)}" if fact.message else "")


def exception_line(fact: Swallowed) -> str:
    """``OSError: no space (at store.py:12 in write), caught 8 times in 8 watched calls of save_kv_layer``."""
    times = f"{'at least ' if fact.count >= TOLD_EACH else ''}{plural(fact.count, 'time')}"
    calls = f"caught {times} in {place(fact.hook)}"
    if fact.observed_calls and fact.hook not in _BACKGROUND:
        # Times, not calls: one call may raise for each of its requests.
        watched = f"{plural(fact.observed_calls, 'watched call')} of {fact.hook}"
        calls = f"caught {times} in {watched}"
    return f"{error(fact)} (at {fact.where}), {calls}"


def caught_where_it_saves(case: Case) -> list[str]:
    """Exceptions of the connector's work that saves: of a save, or of the index that a lookup asks, they may
    be the end, also those that code finds out with."""
    saving = [
        fact
        for fact in case.run.swallowed
        if not fact.broad and (fact.asked_by or fact.hook) in (*SAVE_HOOKS, *BACKGROUND)
    ]
    return [f"where it saves: {exception_line(fact)}" for fact in saving[:_MOST]]


def log_line(line: LogLine) -> str:
    """``save_kv_layer logged "disk full" (error, my_store, 8 times; no handler shows it)``."""
    who = line.hook or "the connector"
    hidden = "; no handler shows it" if line.shown is False else ""
    times = f", {plural(line.count, 'time')}" if line.count > 1 else ""
    level = line.level.lower() or "warning"
    return f'{who} logged "{shortened(line.message)}" ({level}, {line.logger}{times}{hidden})'


def logs_in(case: Case, hooks: Iterable[str]) -> list[str]:
    """What was logged in these hooks, the most frequent first."""
    wanted = set(hooks)
    lines = [line for line in case.run.logs if line.hook in wanted]
    lines.sort(key=lambda line: -line.count)
    return list(dict.fromkeys(log_line(line) for line in lines))[:_MOST]


def see_why_logged(case: Case, hooks: Iterable[str]) -> list[str]:
    """A remedy: what the connector itself warned of there."""
    return [f"see why {line}" for line in logs_in(case, hooks)[:1]]


def of_engine(engine: Engine, lines: Iterable[LogLine]) -> list[LogLine]:
    """Log lines of an engine's processes, and of its steps where they name one."""
    pids = {engine.pid, *(worker.pid for worker in engine.workers)}
    return [line for line in lines if line.pid in pids and (line.step <= 0 or line.step >> 32 == engine.tag)]
