"""All rules over one run: the ledger with its causes, findings in order, what is ruled out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from kvtrace.causes.assign import assign_spans
from kvtrace.causes.case import Case, make_case, why_unheard
from kvtrace.causes.diagnosis import (
    Diagnosis,
    Finding,
    JudgedRequest,
    NotObserved,
    OfRequest,
    Result,
    RuledOut,
)
from kvtrace.causes.evidence import measured
from kvtrace.causes.evidence.pattern import pattern
from kvtrace.causes.outcomes import kept, named, not_saved
from kvtrace.causes.pipeline import stage_rows
from kvtrace.causes.registry import CATALOGUE, RULES
from kvtrace.causes.several import joined, of_engines, own
from kvtrace.causes.verdict import verdict
from kvtrace.ledger.ends import NOT_ARRIVED
from kvtrace.ledger.intervals import length, union
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.ledger.run import Ledger, Run
from kvtrace.ledger.values import without_collector
from kvtrace.terms import (
    FAULT,
    KEPT,
    LIMIT,
    NOT_OBSERVED,
    NOTE,
    PENDING,
    SAVED,
    Grade,
    Stage,
    cause_of,
    severity_order,
)
from kvtrace.words import listed, plural


@without_collector()
def diagnose(run: Run) -> Diagnosis:
    """Name the cause of every lost position, and say what was checked and is none.

    Raises AssertionError where the ledger does not balance: a bug, never the user's input.
    """
    cases = [make_case(part.run) for part in run.parts]
    for one in cases:
        assign_spans(one)
    parts = [
        (part.name, own(_conclude(one, _results(one)))) for part, one in zip(run.parts, cases, strict=True)
    ]
    case = make_case(run)
    assign_spans(case, cases)
    results = _results(case)
    if parts:
        tags = {tag for one in cases for tag in one.engines}
        others = [engine for engine in run.engines if engine.tag not in tags]
        alone = [("", diagnose(of_engines(run, others)))] if others else []
        results = joined(case, results, [*parts, *alone])
    return replace(_conclude(case, results), parts=parts)


def _results(case: Case) -> list[Result]:
    """What the rules say of a case whose tokens are assigned."""
    results = (result for rule in RULES for result in rule(case))
    return [
        replace(one, pattern=pattern(case, CATALOGUE[one.id])) if isinstance(one, Finding) else one
        for one in results
    ]


def _conclude(case: Case, results: Sequence[Result]) -> Diagnosis:
    """The results in order, with the ledgers and what could not be seen."""
    run, saves = case.run, _ledger(case)
    findings = [one for one in results if isinstance(one, Finding)]
    ruled_out = [one for one in results if isinstance(one, RuledOut)]
    not_observed = [one for one in results if isinstance(one, NotObserved)]
    found = {finding.id for finding in findings}
    assert found >= set(case.assigned), f"tokens without a finding: {sorted(set(case.assigned) - found)}"
    not_observed.extend(_blind_spots(case, saves))
    behind = {ident for group in _BEHIND for ident in group.hidden(findings)}
    findings.sort(key=lambda finding: _order(finding, behind))
    return Diagnosis(
        verdict=verdict(case, findings),
        findings=findings,
        ruled_out=[item for item in ruled_out if item.id not in found],
        not_observed=not_observed,
        saves=saves,
        loads=named(run.loads),
        stages=stage_rows(case),
        requests=_requests(case, {one.id for one in findings if one.severity == FAULT}),
    )


class _Behind(NamedTuple):
    """Symptoms, which show where nothing more is known, and what stands before them where it was seen."""

    symptoms: frozenset[str]
    roots: Mapping[str, float]
    """What was seen to go wrong in the connector's own work, and how many tokens of the greatest symptom it
    must concern to stand before that."""

    severity: str = FAULT
    """Of both."""

    def hidden(self, findings: Sequence[Finding]) -> frozenset[str]:
        """The symptoms, where one of the roots was found, with tokens."""
        alike = [one for one in findings if one.severity == self.severity]
        most = max((one.tokens for one in alike if one.id in self.symptoms), default=0.0)
        found = (one for one in alike if one.id in self.roots and _weighs(one))
        return self.symptoms if any(one.tokens >= self.roots[one.id] * most for one in found) else frozenset()


_BEHIND = (
    _Behind(
        frozenset({"stored-nothing", "slots-short", "metadata-has-no-store", "save-lost"}),
        {
            "hook-raised": 0.0,
            "exception-swallowed": 0.0,
            "store-failed": 0.0,
            "kv-stale": 0.25,
            "kv-misplaced": 0.25,
            "store-lost-later": 0.25,
            "config-key-unused": 0.0,  # where nothing was saved: a key that the connector never reads
        },
    ),
    # A consumer is there to load.
    _Behind(frozenset({"role-does-not-save"}), {"lookup-miss": 0.0, "key-mismatch": 0.0}, LIMIT),
    # A layer that no hook waits for has its KV too late as well; and who takes the blocks of others may write
    # into them, in whatever step.
    _Behind(frozenset({"load-after-use"}), {"layer-not-hooked": 0.1, "kv-misplaced": 0.25}),
    # That a load came too late is seen of some blocks alone: of others that nothing came, or other KV.
    _Behind(frozenset({"load-not-injected", "kv-load-wrong"}), {"load-after-use": 0.1}),
    # What was not taken, or from other slots, cannot come back as it was.
    _Behind(frozenset({"kv-load-wrong"}), {"stored-nothing": 0.25, "kv-misplaced": 0.25}),
    # What was not taken, never came to rest, or is gone, cannot be given back.
    _Behind(
        frozenset({"load-not-injected", "loaded-partly"}),
        {
            "slots-short": 0.25,
            "stored-nothing": 0.25,
            "kv-misplaced": 0.25,
            "store-incomplete": 0.25,
            "store-failed": 0.25,
            "store-lost-later": 0.25,
            "exception-swallowed": 0.25,
        },
    ),
    # What the connector holds, rounds off or never offers is no loss: what nothing explains may be one.
    _Behind(
        frozenset({"already-stored", "below-save-granularity", "decode-not-offered"}),
        {"metadata-has-no-store": 0.25, "preempted-before-save": 0.25},
        LIMIT,
    ),
)


def _weighs(finding: Finding) -> bool:
    """Whether tokens were lost by it, or it needs none."""
    return finding.tokens > 0 or finding.in_files > 0 or CATALOGUE[finding.id].weighs


def _order(finding: Finding, behind: Set[str]) -> tuple[int, bool, bool, bool, bool, float, int, str]:
    """Severity first, then wrong data that was used, a cause that was seen before its symptoms, then the
    tokens explained, then the stage.

    Args:
        behind: the symptoms of what was found.
    """
    stage = len(Stage) if finding.stage is None else int(finding.stage)
    cause, symptom, weighs = CATALOGUE[finding.id], finding.id in behind, _weighs(finding)
    harmless = not cause.wrong_data or symptom or finding.severity == NOTE or not weighs
    first = severity_order(finding.severity), not cause.asks, harmless, not weighs, symptom
    return (*first, -max(finding.tokens, finding.in_files), stage, finding.id)


def _ledger(case: Case) -> Ledger[str]:
    """The ledger of saves, with a cause on each lost token-layer."""
    run = case.run
    accounts: Counter[str] = Counter()
    grades: defaultdict[str, Counter[Grade]] = defaultdict(Counter)
    sent: Counter[str] = Counter()
    for row in sorted(run.base, key=lambda row: (row.outcome, row.ended)):
        outcome = kept(row.outcome, row.ended)
        accounts[outcome] += row.amount
        grades[outcome][row.grade] += row.amount
        sent.update({row.sent_to: row.amount} if row.sent_to else {})
    for ident, assigned in case.assigned.items():
        accounts[not_saved(ident)] += sum(assigned.requests.values())
        grades[not_saved(ident)].update(assigned.grades)
    unheard = sum(case.unheard.requests.values())
    accounts[NOT_OBSERVED] += unheard
    grades[NOT_OBSERVED][Grade.NOT_OBSERVED] += unheard
    pairs = {engine.pairs for engine in run.engines if engine.requests}
    tokens = case.whole.tokens
    seen = measured.added(grades.values())
    connected = any(engine.connector or engine.configured for engine in run.engines)
    ledger = Ledger(
        total=run.total,
        accounts={name: amount for name, amount in accounts.items() if amount},
        pairs=pairs.pop() if len(pairs) == 1 else None,
        # of what the GPU's prefix cache gave and a save read again, the layers are saved, and no token is
        tokens={name: n for name in {**accounts, **tokens} if (n := tokens.get(name, 0)) or accounts[name]},
        total_tokens=case.total_tokens,
        trust=measured.level(seen, run.trust) if connected and run.total else "none",
        trust_note=_trust_note(run, grades.values(), sent) if connected and run.total else "",
        grades={name: dict(grades[name]) for name, amount in accounts.items() if amount},
        sent=dict(sent),
        prompts=_prompts(case),
    )
    ledger.check()
    return ledger


def _prompts(case: Case) -> dict[str, dict[Grade, int]]:
    """The prompt tokens that were computed here, by outcome; of a loss the least grade counts for all."""
    whole = case.whole
    found = {SAVED: dict(whole.saved)}
    for ident, assigned in case.assigned.items():
        grade = min(assigned.grades, default=Grade.NOT_OBSERVED)
        found[not_saved(ident)] = {grade: whole.prompts.get(not_saved(ident), 0)}
    for name in (PENDING, NOT_OBSERVED):
        found[name] = {Grade.NOT_OBSERVED: whole.prompts.get(name, 0)}
    return {name: of for name, of in found.items() if any(of.values())}


def _trust_note(run: Run, grades: Iterable[Mapping[Grade, int]], sent: Mapping[str, int]) -> str:
    """What the grades of the ledger of saves mean, and how much of what is read was seen to be sent."""
    note = measured.note(measured.shown(grades))
    if any(group.window for engine in run.engines for group in engine.token_groups):
        note += "; of layers with a window only what lies in it comes back"
    if not sent:
        return note
    amount = plural(sum(sent.values()), "token-layer")
    return f"{note}; {amount} of what is read: sent to {measured.peers(sent)}, {measured.kept_unseen(sent)}"


def _blind_spots(case: Case, saves: Ledger[str]) -> list[NotObserved]:
    """What no rule could look at in this run."""
    found = []
    if case.run.engines and not case.run.device.rows:
        cuda = any(engine.facts.platform == "cuda" for engine in case.run.engines)
        why = next(
            (worker.device_off for worker in case.run.workers() if worker.device_off),
            "none were taken (--device-timing off, or no step that ran Python)",
        )
        why = why if cuda else "no device clock on this platform"
        found.append(NotObserved("device-time", f"{why}: all times are the host's"))
    late = [worker.process for worker in case.run.workers() if worker.ops_late]
    if late:
        found.append(
            NotObserved(
                "attention-ops",
                f"vLLM's attention was imported before kvtrace came into {', '.join(late[:4])}: "
                "whether its op bodies ran is not observed there",
            )
        )
    unreadable = sum(engine.unreadable_steps for engine in case.run.engines)
    if unreadable:
        found.append(NotObserved("connector-metadata", _unreadable(case.run, unreadable)))
    if why := _unheard(case):
        found.append(NotObserved("store-entries", why))
    if saves.accounts.get(NOT_OBSERVED) and not unreadable and not why:
        found.append(NotObserved("some-tokens", "steps left no record, or may store what no metadata names"))
    declared = saves.grades.get(SAVED, {}).get(Grade.DECLARED, 0)
    if declared and saves.trust == "declared":
        found.append(NotObserved("slots-read", measured.unseen(case.run.trust)))
    return found


def _unheard(case: Case) -> str:
    """Why tokens that no metadata names count as not observed, "" where there are none."""
    whose = [case.requests[row] for row in case.unheard.requests]
    other = "a part of what was read of them was not found in what left"
    reasons = list(dict.fromkeys(why_unheard(case, request) or other for request in whose))
    if not reasons:
        return ""
    return (
        f"no metadata names a store of {plural(len(whose), 'request')}, and that says nothing: "
        + "; ".join(reasons)
    )


def _unreadable(run: Run, steps: int) -> str:
    """How many steps' metadata, and which class and field of it."""
    where = [
        f"{one.cls}{'.' if one.field else ''}{one.field}: {one.shape}"
        for one in run.unreadable_metadata
        if not one.load
    ]
    names = f" ({listed(where)})" if where else ""
    return f"the metadata of {steps} steps has a shape that is not understood{names}"


_NO_TOKENS = False, 0, "no tokens"


def _requests(case: Case, faults: Set[str]) -> list[JudgedRequest]:
    """The requests with a verdict each, worst first. ``faults``: what was found to be one."""
    run = case.run
    best: dict[int, tuple[bool, int, str]] = {}
    unseen: Counter[int] = Counter(case.unheard.requests)
    lost: Counter[int] = Counter()
    partly: set[int] = set()  # requests of which prompt tokens are not kept

    def take(request: int, amount: int, name: str) -> None:
        one = name in faults, amount, name
        if amount and one[:2] > best.get(request, _NO_TOKENS)[:2]:
            best[request] = one

    for row in run.base:
        if row.outcome == NOT_OBSERVED:
            unseen[row.request] += row.amount
            continue
        if row.outcome not in KEPT and row.amount:
            partly.add(row.request)
        outcome = kept(row.outcome, row.ended)
        take(row.request, row.amount, cause_of(outcome) or outcome)
    for request, amount in unseen.items():
        partly |= {request} if amount else set()
        take(request, amount, NOT_OBSERVED)
    for ident, assigned in case.assigned.items():
        for request, amount in assigned.requests.items():
            lost[request] += amount
            partly |= {request} if assigned.of_prompts[request] else set()
            take(request, amount, ident)
    judged = [
        JudgedRequest(
            request,
            _verdict(best.get(row, _NO_TOKENS)[2], row in partly, lost[row] > 0),
            known.grade.label if known.grade else "",
            case.whole.requests.get(row, OfRequest()),
        )
        for row, (request, known) in enumerate(zip(run.requests, case.requests, strict=True))
    ]
    not_loaded = {load.request: _not_loaded(load) for load in run.load_rows}
    order = sorted(range(len(judged)), key=lambda row: (-not_loaded.get(row, 0), -judged[row].tokens.lost))
    return [judged[row] for row in order]


def _not_loaded(load: LoadOf) -> int:
    """Tokens that were accepted and did not come, or came as other KV, in any layer."""
    parts = {part for parts in load.lost for part in parts}
    return length(union((a, b) for a, b, end in parts if end in NOT_ARRIVED))


def _verdict(most: str, partly: bool, any_lost: bool) -> str:
    """What became of a request's tokens: a fault, or what became of most and whether that holds for others.

    ``saved``: of all tokens; ``prompt-saved``: of all prompt tokens; ``partly-saved``: not of these either.
    """
    if most not in KEPT:
        return most
    return f"partly-{most}" if partly else f"prompt-{most}" if any_lost else most
