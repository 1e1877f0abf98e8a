"""load-never-finished: an asynchronous load of which nobody ever heard again."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import FAULT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.words import capital, of_all, plural

CAUSE = Cause(
    id="load-never-finished",
    severity=FAULT,
    ledger=LOADS,
    meaning="The request waits for remote KV forever.",
    seen_as=(
        "An asynchronous load that was accepted, that no get_finished reports and after which the request "
        "never ran: the connector defines no hook by which vLLM hears of an end; or it was open for 5 s or "
        "more when the request was aborted, or for 60 s or more when the trace "
        "ends; or all of its slots were seen to be written, and after that 20 steps and four times as long "
        "as the load took went by, or 100 steps and 0.5 s; or work in the background that asked for the "
        "address of every layer, a piece of it for each such load of the step, was over, and after that 100 "
        "steps and four times as long, or 0.5 s."
    ),
    remedy=(
        "Look at get_finished: every rank must report the request, also when its load failed (then together "
        "with get_block_ids_with_load_errors)."
    ),
    load_ends=(LoadEnd.NOT_FINISHED,),
)

_DEFINE = (
    "Define get_finished: by it vLLM hears that a load is over, and this connector has none. "
    "Every rank must report the request, also when its load failed."
)


def rule(case: Case) -> Results:
    asynchronous = [row for row in loads.accepted(case) if row.asynchronous]
    never = loads.affected(case, CAUSE)
    if never:
        longest = max(row.waited_ns for row in never) / 1e9
        lost = {id(row) for row in never}
        others = [r.waited_ns / 1e9 for r in asynchronous if id(r) not in lost and r.waited_ns >= 0]
        evidence = loads.reasons(never, CAUSE)
        evidence.append("no worker and no scheduler record says that it finished; the request never ran")
        if others:
            evidence.append(f"the longest of {plural(len(others), 'other load')} took {max(others):.2f} s")
        yield loads.finding(
            case,
            CAUSE,
            f"{capital(of_all(len(never), len(asynchronous), 'asynchronous load'))} never finished: the "
            f"longest was open for {longest:.1f} s.",
            evidence=evidence,
            remedy=[_DEFINE if any(case.engines[row.engine].mute for row in never) else CAUSE.remedy],
            headline=f"{plural(len(never), 'request')} waited for a load that never finished",
        )
    elif asynchronous:
        still = sum(bool(row.ends.get(LoadEnd.PENDING)) for row in asynchronous)
        finished = of_all(len(asynchronous) - still, len(asynchronous), "asynchronous load")
        if still:
            yield CAUSE.not_observed(
                f"{finished} finished; {plural(still, 'load')} open for a short time at the end"
            )
        else:
            yield CAUSE.ruled_out(f"{finished} finished")
