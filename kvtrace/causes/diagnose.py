"""All rules over one run: books with their causes, findings in order, what is ruled out."""

from __future__ import annotations

from collections import Counter, defaultdict

import pandas as pd

from kvtrace.causes import trust
from kvtrace.causes.case import Case, Piece, add, make_case
from kvtrace.causes.catalogue import CATALOGUE
from kvtrace.causes.model import SEVERITIES, Diagnosis, Finding, NotObserved, RuledOut
from kvtrace.causes.registry import RULES, SCHEDULE, UNREAD, WIRING, Claim
from kvtrace.causes.rules import stored_nothing
from kvtrace.causes.stages import stages
from kvtrace.causes.tables import rows
from kvtrace.causes.verdict import verdict
from kvtrace.ledger.intervals import Interval, subtract
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.ledger.model import NOT_OBSERVED, NOT_SAVED, Ledger, Run


def diagnose(run: Run) -> Diagnosis:
    """Name the cause of every lost position, and say what was checked and is none.

    Raises AssertionError where the books do not balance: a bug, never the user's input.
    """
    case = make_case(run)
    book_pieces(case)
    saves = _book(case)
    findings: list[Finding] = []
    ruled_out: list[RuledOut] = []
    not_observed: list[NotObserved] = []
    for rule in RULES:
        for said in rule(case):
            if isinstance(said, Finding):
                findings.append(said)
            elif isinstance(said, RuledOut):
                ruled_out.append(said)
            else:
                not_observed.append(said)
    unexplained = set(case.booked) - {finding.id for finding in findings}
    assert not unexplained, f"tokens without a finding: {sorted(unexplained)}"
    found = {finding.id for finding in findings}
    said_of = found | {item.id for item in ruled_out} | {item.id for item in not_observed}
    not_observed.extend(_blind_spots(case, saves, said_of))
    findings.sort(key=_order)
    return Diagnosis(
        verdict=verdict(case, findings),
        findings=findings,
        ruled_out=[item for item in ruled_out if item.id not in found],
        not_observed=not_observed,
        saves=saves,
        loads=run.loads,
        stages=stages(case),
        requests=_requests(case),
    )


def _order(finding: Finding) -> tuple[int, bool, float, int, str]:
    """Severity first, then the tokens explained, then the stage."""
    stage = finding.stage if finding.stage is not None else 9
    return SEVERITIES.index(finding.severity), finding.tokens <= 0, -finding.tokens, stage, finding.id


def book_pieces(case: Case) -> None:
    """Give each lost position its cause: the first stage that it failed."""
    for row in rows(case.run.pieces):
        piece = Piece(*row)
        left: list[Interval] = [(piece.start, piece.end)]
        left = _claimed(case, piece, left, WIRING)
        if left and piece.stage == stored_nothing.ID:
            left = _claimed(case, piece, left, UNREAD)
        if left and piece.stage:
            add(case, piece.stage, piece, left)
            continue
        left = _claimed(case, piece, left, SCHEDULE)
        assert not left, f"positions {left} of request {piece.request} without a cause"


def _claimed(
    case: Case, piece: Piece, left: list[Interval], claims: tuple[tuple[str, Claim], ...]
) -> list[Interval]:
    for ident, claim in claims:
        if not left:
            break
        taken = claim(case, piece, left)
        if taken:
            add(case, ident, piece, taken)
            left = subtract(left, taken)
    return left


def _book(case: Case) -> Ledger:
    run = case.run
    accounts: Counter[str] = Counter()
    tokens: defaultdict[str, float] = defaultdict(float)
    for row in rows(run.base.groupby(["account", "engine"], as_index=False)[["amount"]].sum()):
        accounts[row.account] += int(row.amount)
        tokens[row.account] += int(row.amount) / max(1, case.engines[row.engine].pairs)
    for ident, booked in case.booked.items():
        accounts[NOT_SAVED + ident] += sum(booked.amounts.values())
        tokens[NOT_SAVED + ident] += case.tokens(ident)
    pairs = {engine.pairs for engine in run.engines if engine.requests}
    connected = any(engine.connector or engine.configured for engine in run.engines)
    book = Ledger(
        total=run.total,
        accounts={name: amount for name, amount in accounts.items() if amount},
        pairs=pairs.pop() if len(pairs) == 1 else None,
        tokens={name: tokens[name] for name, amount in accounts.items() if amount},
        total_tokens=case.total_tokens,
        trust=trust.level(run.trust) if connected and run.total else "none",
        trust_note=trust.note(run.trust) if connected and run.total else "",
    )
    book.check()
    return book


def _blind_spots(case: Case, saves: Ledger, said_of: set[str]) -> list[NotObserved]:
    found = []
    cuda = any(engine.facts.platform == "cuda" for engine in case.run.engines)
    if case.run.engines and not cuda:
        found.append(NotObserved("device-time", "no device clock on this platform: all times are the host's"))
    elif cuda and not case.run.device.any_calls():
        why = next(
            (worker.device_off for worker in case.run.workers() if worker.device_off),
            "none were taken (--device-timing off, or no step with a call of Python's)",
        )
        found.append(NotObserved("device-time", f"{why}: all times are the host's"))
    unreadable = sum(engine.unreadable_steps for engine in case.run.engines)
    if unreadable:
        found.append(
            NotObserved(
                "connector-metadata", f"the metadata of {unreadable} steps has a shape that is not understood"
            )
        )
    if saves.accounts.get(NOT_OBSERVED) and not unreadable:
        found.append(
            NotObserved(
                "some-tokens", "steps or workers that left no record: their tokens are booked not-observed"
            )
        )
    if saves.trust == "declared" and run_has_stores(case):
        found.append(NotObserved("slots-read", trust.unseen(case.run.trust)))
    missing = [
        cause.id
        for cause in CATALOGUE.values()
        if cause.ledger == "saves" and not cause.implemented and cause.id not in said_of
    ]
    if missing:
        found.append(NotObserved("other-causes", f"no rule yet for {', '.join(missing)}"))
    return found


def run_has_stores(case: Case) -> bool:
    return case.run.trust.calls > 0


def _requests(case: Case) -> pd.DataFrame:
    """Run.requests with a verdict each, worst first."""
    run = case.run
    best: dict[int, tuple[int, str]] = {}
    for row in rows(run.base):
        if row.amount > best.get(row.request, (0, ""))[0]:
            best[row.request] = (int(row.amount), str(row.account).removeprefix(NOT_LOADED))
    for ident, booked in case.booked.items():
        for request, amount in booked.requests.items():
            if amount > best.get(request, (0, ""))[0]:
                best[request] = (amount, ident)
    table = run.requests.copy()
    pairs = [max(1, case.engines[r.engine].pairs) if r.engine in case.engines else 1 for r in case.requests]
    table["verdict"] = [best.get(i, (0, "no tokens"))[1] for i in range(len(table))]
    table["saved_tokens"] = [saved / n for saved, n in zip(table["saved"], pairs, strict=True)]
    table["not_saved_tokens"] = [lost / n for lost, n in zip(table["unsaved"], pairs, strict=True)]
    ordered: pd.DataFrame = table.sort_values("not_saved_tokens", ascending=False, kind="stable").reset_index(
        drop=True
    )
    return ordered
