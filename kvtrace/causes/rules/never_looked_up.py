"""never-looked-up: the scheduler let a request in and never asked the connector."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import LIMIT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="never-looked-up",
    severity=LIMIT,
    ledger=LOADS,
    meaning="The scheduler let a request in and computed its prompt without asking the connector.",
    seen_as="Prefill chunks of a request, and no get_num_new_matched_tokens for it.",
    remedy=(
        "vLLM's own scheduler asks for every new request, also for those that may not load "
        "(prompt_logprobs, skip_reading_prefix_cache): look at the scheduler class (--scheduler-cls) of "
        "this engine. A connector inside another one is asked by that one: look there too."
    ),
    load_ends=(LoadEnd.NEVER_ASKED,),
)


def rule(case: Case) -> Results:
    rows = case.run.load_rows
    if not rows:
        return
    lost = loads.affected(case, CAUSE)
    if lost:
        evidence = ["no call of get_num_new_matched_tokens for them, though their prompts were computed"]
        known = {case.engines[row.engine].facts.scheduler for row in lost} - {None}
        if known:
            evidence.append(f"scheduler: {', '.join(sorted(filter(None, known)))}")
        tokens = loads.tokens(case, lost, CAUSE)
        yield loads.finding(
            case,
            CAUSE,
            f"The scheduler never asked the connector for {of_all(len(lost), len(rows), 'request')}: "
            f"{plural(tokens, 'prompt token')} computed without a lookup.",
            evidence=evidence,
            headline=f"{plural(len(lost), 'request')} never looked up in the connector",
        )
        return
    if all(row.looked_up for row in rows):
        yield CAUSE.ruled_out(
            f"the connector was asked for {of_all(len(rows), len(rows), 'request')} "
            f"({count(sum(row.prompt for row in rows))} prompt tokens)"
        )
