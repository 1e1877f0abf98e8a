"""worker-stuck: a worker that waits in the middle of its step, outside of the connector's hooks."""

from __future__ import annotations

from kvtrace.causes.evidence.stalled import evidence, in_hooks, processes, seconds, stalled, worst
from kvtrace.causes.rule import FAULT, NOTE, Case, Cause, Results

CAUSE = Cause(
    id="worker-stuck",
    severity=FAULT,
    weighs=True,
    meaning="A worker waits in the middle of its step, in no hook of the connector: the engine stands still.",
    seen_as=(
        "A worker recorded nothing for --stuck-after seconds (or a signal asked), and at two looks of py-spy "
        "it waited in the same line within its step, in no hook and no compiler. Not where another process "
        "stood in a hook: then it may wait for that one. A note where it went on later."
    ),
    remedy=(
        "Look at the call that it waits in. Where that is a collective operation, another rank did not get "
        "there: look at what that one waits for."
    ),
)


def rule(case: Case) -> Results:
    found = list(stalled(case))
    if not found or in_hooks(case):
        return
    found, never = worst(found)
    longest = found[0][0].silent_ns
    state = "never went on" if never else f"went on after {seconds(longest)} or more"
    yield case.finding(
        CAUSE,
        f"{processes(case, found)} stood in the middle of a step, and {state}.",
        severity=FAULT if never else NOTE,
        evidence=[line for look, place in found[:2] for line in evidence(case, look, place)],
        headline=f"a worker stood in the middle of its step and {state}",
        requests=0,
    )
