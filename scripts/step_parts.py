"""Where the agent's share of a step goes: each part clocked, without the parts that it calls.

For an in-process engine under `kvtrace run`: :func:`clock_parts` before vLLM is imported, :func:`medians` in
the end. What is generated for each layer (hooks and ops without more to say) is in no part: its cost is that
of a record (`scripts/hook_cost.py`).
"""

from __future__ import annotations

import functools
import importlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

AGENT = "kvtrace.agent"
PARTS: dict[str, tuple[str, ...]] = {
    "scheduler: records of the step": (f"{AGENT}.engine.scheduler:_WRAPS",),
    "scheduler: block tables": (f"{AGENT}.steps.block_tables:RecordedTables.scheduled",),
    "scheduler: prompt digests": (f"{AGENT}.steps.prefixes:digests",),
    "scheduler: metadata reading": (f"{AGENT}.metadata.recording:Reader.built",),
    "worker: begin of step": (f"{AGENT}.engine.worker:_begin_of_step",),
    "worker: end of step": (f"{AGENT}.engine.worker:_end_of_step",),
    "worker: graphs": (f"{AGENT}.steps.graphs:step_begins", f"{AGENT}.steps.graphs:captured_in_step"),
    "worker: fingerprints": tuple(
        f"{AGENT}.prints.prints:Prints.{name}" for name in ("begins", "plan", "take")
    ),
    "worker: which steps to watch": tuple(
        f"{AGENT}.watch.policy:Policy.{name}" for name in ("begin", "end", "step_begins")
    ),
    "worker: slots of watched calls": (f"{AGENT}.watch.records:settle",),
    "worker: device timing": (f"{AGENT}.hooks.device:Device.begin", f"{AGENT}.hooks.device:Device.finish"),
    "both: proxies in place": (f"{AGENT}.hooks.held:of_scheduler", f"{AGENT}.hooks.held:of_worker"),
    "both: config keys": (f"{AGENT}.facts.config_keys:step_ended",),
    "both: hook records that say more": (f"{AGENT}.hooks.hook_records:recorder",),
    "both: facts, masked": (f"{AGENT}.state:Agent.fact",),
    "both: flush": ("kvtrace.trace.writer:Recorder.flush",),
    "both: log records": (f"{AGENT}.errors.logs:_seen",),
    "both: audit events": (f"{AGENT}.outside.files:_audit",),
}
"""What is clocked. A name that is gone is an error: then this table is out of date."""
MAKERS = ("recorder",)
"""Functions of which what they return is clocked."""

KINDS = ("decode", "prompt, not watched", "watched")

_now = time.perf_counter_ns
_main = threading.get_ident()
_stack: list[int] = []
_own: dict[str, int] = defaultdict(int)
_calls: dict[str, int] = defaultdict(int)
_inner: dict[str, int] = defaultdict(int)
"""Clocked calls that a part made in turn."""
_steps: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
_names: list[str] = []


def clocked(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != _main:
            return function(*args, **kwargs)
        if _names:
            _inner[_names[-1]] += 1
        _names.append(part)
        _stack.append(0)
        began = _now()
        try:
            return function(*args, **kwargs)
        finally:
            took = _now() - began
            _own[part] += took - _stack.pop()
            _names.pop()
            _calls[part] += 1
            if _stack:
                _stack[-1] += took

    return call


def clock_parts() -> None:
    for part, places in PARTS.items():
        for place in places:
            module_name, _, path = place.partition(":")
            holder: Any = importlib.import_module(module_name)
            *above, name = path.split(".")
            for one in above:
                holder = getattr(holder, one)
            found = getattr(holder, name)
            if isinstance(found, dict):  # (before, after) of each method of vLLM's
                for key, pair in found.items():
                    found[key] = tuple(one and clocked(part, one) for one in pair)
            elif name in MAKERS:
                setattr(holder, name, _maker(part, found))
            else:
                setattr(holder, name, clocked(part, found))
    from kvtrace.agent.engine import scheduler

    before, after = scheduler._WRAPS["schedule"]
    scheduler._WRAPS["schedule"] = _at_step(before), after


def _maker(part: str, make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    return lambda *args: clocked(part, make(*args))


def _at_step(before: Any) -> Callable[..., None]:
    def begins(*args: Any, **kwargs: Any) -> None:
        """A step begins: what was clocked since the last one began is that one's."""
        from kvtrace.agent.state import AGENT as agent

        worker = agent.worker
        if worker.latest:
            kind = KINDS[2 if worker.watched else 1 if worker.prompt else 0]
            _steps[kind].append({part: _cost(part) for part in _calls})
        for counts in (_own, _calls, _inner):
            counts.clear()
        before(*args, **kwargs)

    return begins


_clock_costs: list[tuple[float, float]] = []


def _cost(part: str) -> float:
    """ns, without what the clocks took."""
    inside, around = _clock_costs[0] if _clock_costs else _clock_costs.append(_calibrate()) or _clock_costs[0]
    return max(0.0, _own[part] - inside * _calls[part] - around * _inner[part])


def _calibrate() -> tuple[float, float]:
    """ns that a clocked call counts too much for its own part, and for the one that calls it."""
    plain, timed = (lambda: None), clocked("", lambda: None)
    rounds = 20_000

    def of(function: Callable[[], None]) -> int:
        began = _now()
        for _ in range(rounds):
            function()
        return _now() - began

    kept = dict(_own), dict(_calls), dict(_inner), list(_names), list(_stack)
    _names.clear()
    bare = min(of(plain) for _ in range(5))
    _own[""] = 0
    both = min(of(timed) for _ in range(5))
    inside = _own[""] / rounds / 5
    for counts, before in zip((_own, _calls, _inner), kept, strict=False):
        counts.clear()
        counts.update(before)
    _names[:], _stack[:] = kept[3], kept[4]
    return inside - bare / rounds, (both - bare) / rounds - inside + bare / rounds


def medians() -> dict[str, dict[str, float]]:
    """By kind of step, how many there were and each part's µs a step: the median over the steps."""
    return {
        kind: {"steps": len(steps), **{part: _median(part, steps) for part in PARTS}}
        for kind, steps in _steps.items()
    }


def _median(part: str, steps: Sequence[Mapping[str, float]]) -> float:
    return statistics.median([step.get(part, 0.0) / 1000 for step in steps] or [0.0])


def table(found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The lines to print, of what :func:`medians` found."""
    sums = {kind: sum(found[kind][part] for part in PARTS) for kind in KINDS}
    yield f"{'µs a step':36}" + "".join(f"{kind:>22}" for kind in KINDS)
    yield f"{'steps':36}" + "".join(f"{found[kind]['steps']:>22}" for kind in KINDS)
    for part in PARTS:
        yield f"{part:36}" + "".join(f"{found[kind][part]:22.1f}" for kind in KINDS)
    yield f"{'all of them':36}" + "".join(f"{sums[kind]:22.1f}" for kind in KINDS)
