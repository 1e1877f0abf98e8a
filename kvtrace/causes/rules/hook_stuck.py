"""hook-stuck: a call of a connector's hook that did not come back while the run stood still."""

from __future__ import annotations

from kvtrace.causes.evidence.stalled import evidence, in_hooks, name_of, seconds, worst
from kvtrace.causes.rule import FAULT, NOTE, Case, Cause, Results
from kvtrace.words import listed

CAUSE = Cause(
    id="hook-stuck",
    severity=FAULT,
    weighs=True,
    meaning="A hook of the connector does not come back: the engine stands still.",
    seen_as=(
        "A process of vLLM recorded nothing for --stuck-after seconds (or a signal asked), and at two looks "
        "of py-spy one thread stood in the same hook, with no step ended between. A note where it went on "
        "later."
    ),
    remedy=(
        "Give what the hook waits for a time limit, and report what did not come in time as failed: "
        "get_block_ids_with_load_errors for loads, get_finished for saves."
    ),
)


def rule(case: Case) -> Results:
    found = in_hooks(case)
    if not found:
        if case.run.stuck.unseen:
            yield CAUSE.not_observed(f"a process recorded nothing for a while, and {case.run.stuck.unseen}")
        return
    found, never = worst(found)
    hooks, look = listed(place.what for _, place in found), found[0][0]
    state = "never came back" if never else f"came back after {seconds(look.silent_ns)} or more"
    yield case.finding(
        CAUSE,
        f"{hooks} {state} in {name_of(case, look)}.",
        severity=FAULT if never else NOTE,
        evidence=[line for one, place in found[:2] for line in evidence(case, one, place)],
        headline=f"{hooks} {state}",
        requests=0,
    )
