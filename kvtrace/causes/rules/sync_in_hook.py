"""sync-in-hook: a hook that makes the host wait for the device, by the events around its calls."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, NotObserved, RuledOut
from kvtrace.ledger.device import BEHIND_NS, Waits
from kvtrace.trace.format import HOOKS
from kvtrace.words import count, plural

ID = "sync-in-hook"


def rule(case: Case) -> Iterator[Finding | NotObserved | RuledOut]:
    if not any(worker.steps for worker in case.run.workers()):
        return
    times = case.run.device
    hooks: dict[str, Waits] = {}
    for (_, hook), waits in times.waits.items():
        if waits.shown():
            hooks.setdefault(HOOKS[hook], Waits()).add(waits)
    if hooks:
        worst = sorted(hooks.items(), key=lambda item: -item[1].total_ns)
        yield case.finding(
            ID,
            f"{worst[0][0]} makes the host wait for the device.",
            evidence=[_evidence(hook, waits) for hook, waits in worst[:4]],
        )
        return
    timed = [row for row in times.rows() if row.kind == "hook"]
    behind = sum(row.behind for row in timed)
    early = sum(waits.early for waits in times.waits.values())
    if behind and early == behind:
        yield RuledOut(
            ID,
            f"in all {count(behind)} timed calls that began with device work outstanding the hook returned "
            "before that work was done",
        )
    elif timed:
        yield NotObserved(
            ID,
            f"{plural(behind, 'timed call')} began with {BEHIND_NS / 1e6:.1f} ms of device work or more "
            f"outstanding, {count(early)} of them returned before it was done: too little, or too mixed, "
            "to say",
        )
    else:
        yield NotObserved(ID, "whether a hook waits for the device shows on a device clock only")


def _evidence(hook: str, waits: Waits) -> str:
    return (
        f"{hook}: {count(waits.behind)} timed calls began while the device had work left; none returned "
        f"before it was done, {count(waits.waited)} as it was done, after {waits.least_ns / 1e6:.1f} to "
        f"{waits.most_ns / 1e6:.1f} ms ({waits.total_ns / 1e6 / waits.waited:.1f} ms a call; host and "
        "device clock)"
    )
