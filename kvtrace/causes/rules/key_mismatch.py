"""key-mismatch: saved a moment ago, asked for with the same tokens, and not found."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import FAULT, LOADS, Case, Cause, Event, LoadEnd, Results
from kvtrace.ledger.loads.model import LoadOf
from kvtrace.trace.format import STEP_MASK
from kvtrace.words import count, listed, of_all, plural

CAUSE = Cause(
    id="key-mismatch",
    severity=FAULT,
    ledger=LOADS,
    meaning=(
        "The tokens were saved, under another key than the lookup computes (alignment, hash seed per "
        "process, salt, LoRA, multimodal)."
    ),
    seen_as=(
        "A prompt was saved in every layer, all but its last token or tokens; the save was written; "
        "nothing else was saved since; a request with the same tokens is looked up and gets the answer 0."
    ),
    remedy=(
        "Use one function for both keys. Up to vLLM 0.28, or with a hash other than sha256, set "
        "PYTHONHASHSEED where keys build on vLLM's block hashes."
    ),
    load_ends=(LoadEnd.MISSED_SAVED,),
)


def rule(case: Case) -> Results:
    again = [row for row in case.run.load_rows if row.saved_before > row.local and row.answer is not None]
    lost = loads.affected(case, CAUSE)
    if not lost:
        hits = [row for row in again if (row.answer or 0) > 0]
        if hits:
            whose = of_all(len(hits), len(again), "prompt")
            yield CAUSE.ruled_out(f"{whose} that this run had saved before, found again by the lookup")
        return
    tokens = loads.tokens(case, lost, CAUSE)
    at_once = [row for row in lost if row.others_between == 0]
    first = (at_once or lost)[0]
    evidence = [
        f"step {first.step & STEP_MASK}: {first.saved_by} had saved {count(first.saved_before)} of these "
        f"{count(first.prompt)} tokens in every layer, nothing else was saved in between, and the lookup "
        "answered 0",
        *_alignment(case, lost),
    ]
    if len(at_once) < len(lost):
        rest = f"in {count(len(lost) - len(at_once))} of {plural(len(lost), 'lookup')}"
        evidence.append(f"{rest} other prompts were saved in between; none of these prompts was ever found")
    names = listed(c.cls for row in lost if (c := case.engines[row.engine].connector))
    yield loads.finding(
        case,
        CAUSE,
        f"{names} does not find what it saved: {of_all(len(lost), len(again), 'lookup')} of prompts with "
        f"the same tokens as an earlier save answered 0 ({plural(tokens, 'token')} computed again).",
        evidence=evidence,
        events=[
            Event(row.id, row.step, f"{count(row.saved_before)} tokens saved by {row.saved_by}; lookup 0")
            for row in (at_once or lost)[:3]
        ],
        remedy=_remedy(case, lost),
        headline="what was saved is looked up under another key",
    )


def _remainder(case: Case, rows: list[LoadOf]) -> tuple[int, int] | None:
    """(block, remainder) where all prompts have the same length within a block."""
    requests = [case.requests[row.request] for row in rows]
    found = {(request.block, request.prompt % request.block) for request in requests if request.block > 0}
    return found.pop() if len(found) == 1 else None


def _alignment(case: Case, rows: list[LoadOf]) -> list[str]:
    same = _remainder(case, rows)
    if same is None:
        return []
    block, rest = same
    if rest == 1 and all(row.saved_before == row.prompt - 1 for row in rows):
        row = rows[0]
        return [
            f"all these prompts are one token longer than whole blocks of {block}: the store rounds "
            f"{count(row.prompt)} tokens to {count(row.saved_before)}, floor((n - 1) / {block}) x {block}; "
            f"a lookup that subtracts one more token first, as floor((n - 2) / {block}) x {block}, asks "
            f"for {count((row.prompt - 2) // block * block)} tokens"
        ]
    return [f"all these prompts leave {plural(rest, 'token')} in their last block of {block}"]


def _remedy(case: Case, rows: list[LoadOf]) -> list[str]:
    same = _remainder(case, rows)
    first = []
    if same is not None and same[1] == 1:
        tokens = count(sum(row.saved_before - row.local for row in rows))
        first = [f"Round the lookup as the store does: it would have found {tokens} tokens of this run."]
    return [*first, CAUSE.remedy]
