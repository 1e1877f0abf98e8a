"""load-failed: the connector reported blocks that it could not load, or its load hook raised."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.evidence.logs import error, exception_line
from kvtrace.causes.rule import FAULT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.ledger.loads.seen import ANEW, REPORTED
from kvtrace.ledger.reported import BACKGROUND, LOAD_HOOKS
from kvtrace.ledger.run import HookException, Swallowed
from kvtrace.versions import since
from kvtrace.words import of_all, plural

CAUSE = Cause(
    id="load-failed",
    severity=FAULT,
    ledger=LOADS,
    meaning=(
        "The connector reported blocks or requests that it could not load, its load hook raised, or it "
        "caught an exception there and what it was to load is not in the KV cache."
    ),
    seen_as=(
        "get_block_ids_with_load_errors, failed transfers, exceptions of start_load_kv and "
        "wait_for_layer_load. Blocks are counted, at most up to what was accepted; where vLLM computed anew, "
        "all from the first reported one on. Or an exception that the connector caught where it loads, its "
        "threads included, while no write was seen and the fingerprints "
        "of these blocks say that their KV is not there."
    ),
    remedy=(
        "Look at why these reads fail: what the connector logs, or catches. kv_load_failure_policy sets "
        'what happens to the request: "recompute" computes the tokens, "fail" ends it (from vLLM 0.13).'
    ),
    versions=f"{since('0.11.1')} (reported blocks; raised: all)",
    load_ends=(LoadEnd.FAILED,),
)


def rule(case: Case) -> Results:
    accepted = loads.accepted(case)
    failed = loads.affected(case, CAUSE)
    if not failed:
        caught = any(
            fact.hook in (*LOAD_HOOKS, *BACKGROUND) and not fact.harmless for fact in case.run.swallowed
        )
        if accepted and not caught and all(loads.came(case, row) for row in accepted):
            yield CAUSE.ruled_out(
                "no block was reported as not loaded, and no load hook raised "
                f"({plural(len(accepted), 'load')})"
            )
        return
    tokens = loads.tokens(case, failed, CAUSE)
    how = "the connector reported it, its hook raised, or an exception was caught there"
    reasons = [reason for row in failed for reason in row.reasons.get(LoadEnd.FAILED, ("",))]
    if all(REPORTED in reason for reason in reasons):
        anew = all(ANEW in reason for reason in reasons)
        how = f"the connector reported it{', and vLLM computed them anew' if anew else ''}"
    raised = [one for one in case.run.exceptions if one.hook in LOAD_HOOKS]
    handled = loads.handled(case)
    evidence = [f"{one.hook}: {error(one)} (at {one.where})" for one in raised[:2]]
    evidence += [exception_line(one) for one in handled[:2]]
    failing: list[HookException | Swallowed] = [*raised, *handled]
    mend = [f"mend what raised at {one.where}: {error(one)}" for one in failing[:1]]
    evidence += loads.reasons_and_places(case, failed, CAUSE)
    yield loads.finding(
        case,
        CAUSE,
        f"Loading failed for {plural(tokens, 'token')} of {of_all(len(failed), len(accepted), 'load')}: "
        f"{how}.",
        evidence=evidence,
        remedy=[*mend, CAUSE.remedy],
        headline=f"loading failed for {plural(len(failed), 'request')}",
    )
