"""sync-in-hook: a hook that makes the host wait for the device, by the events around its calls."""

from __future__ import annotations

from kvtrace.causes.rule import NOTE, Case, Cause, Results
from kvtrace.ledger.device import BEHIND_NS, Waits
from kvtrace.words import count, plural

CAUSE = Cause(
    id="sync-in-hook",
    severity=NOTE,
    meaning="The hook waits for the device.",
    seen_as=(
        "Events around its calls (CUDA): calls that began while their stream had 0.1 ms of work left or "
        "more, of which none returned before that work was done, and half or more took little longer than "
        "it, over a spread of its length. Without a device clock it is not observed."
    ),
    remedy="Copy asynchronously on a separate stream, and wait for it in wait_for_save or get_finished.",
    live=False,
    timed=True,
)


def rule(case: Case) -> Results:
    if not any(worker.steps for worker in case.run.workers()):
        return
    times = case.run.device
    hooks = {hook: waits for hook, waits in times.waits.items() if waits.shown()}
    if hooks:
        worst = sorted(hooks.items(), key=lambda item: -item[1].total_ns)
        yield case.finding(
            CAUSE,
            f"{worst[0][0]} makes the host wait for the device.",
            evidence=[_evidence(hook, waits) for hook, waits in worst[:4]],
        )
        return
    timed = [row for row in times.rows if row.kind == "hook"]
    behind = sum(row.behind for row in timed)
    early = sum(waits.early for waits in times.waits.values())
    if behind and early == behind:
        yield CAUSE.ruled_out(
            f"in all {count(behind)} timed calls that began with device work outstanding the hook returned "
            "before that work was done"
        )
    elif timed:
        yield CAUSE.not_observed(
            f"{plural(behind, 'timed call')} began with {BEHIND_NS / 1e6:.1f} ms of device work or more "
            f"outstanding, {count(early)} of them returned before it was done: too few, or too mixed, to "
            "decide"
        )
    else:
        yield CAUSE.not_observed("whether a hook waits for the device shows on a device clock only")


def _evidence(hook: str, waits: Waits) -> str:
    return (
        f"{hook}: {count(waits.behind)} timed calls began while the device had work left; none returned "
        f"before it was done, {count(waits.waited)} as it was done, after {waits.least_ns / 1e6:.1f} to "
        f"{waits.most_ns / 1e6:.1f} ms ({waits.total_ns / 1e6 / waits.waited:.1f} ms a call; host and "
        "device clock)"
    )
