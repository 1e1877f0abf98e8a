"""lookup-miss: asked, and nothing was there. A finding only where something could be expected."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS, Cause
from kvtrace.causes.evidence import loads
from kvtrace.causes.model import Results
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.load_model import LoadOf
from kvtrace.ledger.model import MISSED
from kvtrace.terms import NOTE
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="lookup-miss",
    stage=None,
    severity=NOTE,
    ledger=LOADS,
    meaning=(
        "Asked, and nothing was there, where a hit could be expected: the prompt begins like an earlier "
        "one of this run, or the engine is a kv_consumer. A prompt that is new is no finding."
    ),
    seen_as="A lookup that was answered with 0, and no earlier save of this run that surely covers it.",
    remedy=(
        "See the ledger of saves: what was not saved cannot be loaded. A prefix that two prompts share is "
        "found only in whole units of the connector, and not at all where it keys whole prompts "
        "(ExampleConnector)."
    ),
    load_ends=(LoadEnd.MISSED,),
)
_MISMATCH = MISSED + "key-mismatch"


def _role(case: Case, row: LoadOf) -> str:
    return case.engines[row.engine].role or ""


def _nothing(row: LoadOf) -> bool:
    return row.answer == 0 and row.local < row.prompt and not row.accounts.get(_MISMATCH)


def rule(case: Case) -> Results:
    asked = [
        row for row in case.run.load_rows if row.answer is not None and _role(case, row) != "kv_producer"
    ]
    if not asked:
        return
    missed = [row for row in asked if _nothing(row)]
    found = sum((row.answer or 0) > 0 for row in asked)
    # A consumer that finds some prompts is told of the others by their being new.
    consumers = [] if found else [row for row in missed if _role(case, row) == "kv_consumer"]
    expected = {row.request for row in consumers}
    again = [row for row in missed if row.shared > row.local and row.request not in expected]
    if not consumers and not again:
        deeper = sum((row.answer or 0) < 0 for row in asked)
        said = f"{plural(found, 'hit')} in {plural(len(asked), 'lookup')}"
        if len(missed) > 0:
            rest = "the other prompt begins" if len(missed) == 1 else f"{count(len(missed))} prompts begin"
            said += f"; {rest} like no earlier one of this run"
        if deeper:
            said += f"; {plural(deeper, 'lookup')}: the GPU's own prefix cache reaches deeper than the store"
        yield CAUSE.ruled_out(said)
        return
    evidence = []
    if consumers:
        evidence.append(
            f"this engine is a kv_consumer: {of_all(len(consumers), len(asked), 'lookup')} found nothing "
            "that another engine had stored"
        )
    kept = [row for row in again if row.saved_before > row.local]
    fresh = [row for row in again if row not in kept]
    if fresh:
        longest = max(fresh, key=lambda row: row.shared)
        evidence.append(
            f"{plural(len(fresh), 'prompt')} begin like an earlier one (up to {count(longest.shared)} "
            "tokens), and no save of this run is known to hold that beginning under a key of its own: see "
            "the ledger of saves, and the unit that the connector stores in"
        )
    if kept:
        evidence.append(
            f"{plural(len(kept), 'prompt')} saved by an earlier request of this run, and not found: "
            "dropped since, not written yet, or under another key"
        )
    mine = consumers + again
    tokens = float(sum(max(row.shared, row.saved_before) - row.local for row in again)) + sum(
        row.prompt - row.local for row in consumers
    )
    total = case.run.loads.total_tokens
    yield loads.finding(
        case, CAUSE, MISSED + CAUSE.id,
        f"Nothing was found by {of_all(len(mine), len(asked), 'lookup')} where a hit could be expected "
        f"({plural(tokens, 'token')}): no earlier save covers them.",
        tokens=tokens,
        share=min(1.0, tokens / total) if total else 0.0,
        requests=len(mine),
        evidence=evidence,
        events=loads.events(case, mine, MISSED + CAUSE.id),
        headline="nothing was there that the lookups could find",
    )  # fmt: skip
