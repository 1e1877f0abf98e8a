"""What became of each token, as people count them: one outcome a token, the worst of its layers and ranks.
The numbers are whole, and add up to all tokens."""

from __future__ import annotations

from collections import Counter, defaultdict

from kvtrace.causes.case import Case
from kvtrace.causes.diagnosis import OfRequest, Whole
from kvtrace.causes.outcomes import kept, not_saved
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.whole import swept
from kvtrace.terms import NOT_OBSERVED, SAVED, Grade


def whole_tokens(case: Case) -> Whole:
    """Of a case whose tokens are assigned."""
    tokens: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    saved: Counter[Grade] = Counter()
    sent: Counter[str] = Counter()
    of: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for one in case.run.whole:
        outcome = kept(one.outcome, one.ended)
        tokens[outcome] += one.amount
        prompts[outcome] += one.prompt
        of[one.request][outcome] += one.amount
        if one.ended == SaveEnd.CAUGHT:
            of[one.request]["caught"] += one.amount
        if outcome == SAVED:
            saved[one.grade] += one.prompt
            if one.sent_to:
                sent[one.sent_to] += one.prompt
                of[one.request]["sent"] += one.amount
    for row, start, end, outcome in _lost(case):
        tokens[outcome] += end - start
        prompts[outcome] += max(0, min(end, case.requests[row].prompt) - start)
        of[row]["lost" if outcome != NOT_OBSERVED else outcome] += end - start
    requests = {
        row: OfRequest(mine[SAVED], mine["sent"], mine["lost"], mine[NOT_OBSERVED], mine["caught"])
        for row, mine in of.items()
    }
    return Whole(tokens, prompts, saved, sent, requests)


_ORDER = {ident: at for at, ident in enumerate(CATALOGUE)}


def _lost(case: Case) -> list[tuple[int, int, int, str]]:
    """(request row, start, end, outcome) of positions that some pair lost: the cause of most of the pairs
    that did; not observed where that is all that is said of any."""
    parts: defaultdict[int, list[tuple[int, int, str, int]]] = defaultdict(list)
    named = {not_saved(ident): assigned for ident, assigned in case.assigned.items()}
    for outcome, assigned in (*named.items(), (NOT_OBSERVED, case.unheard)):
        for row, intervals in assigned.at.items():
            parts[row] += [(start, end, outcome, pairs) for start, end, pairs in intervals]
    found = []
    for row, here in parts.items():
        for start, end, outcomes in swept(here):
            first = max(outcomes, key=lambda one: (one != NOT_OBSERVED, outcomes[one], -_place(one)))
            found.append((row, start, end, first))
    return found


def _place(outcome: str) -> int:
    return _ORDER.get(outcome.partition(":")[2], len(_ORDER))
