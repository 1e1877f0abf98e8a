"""Several connectors inside one: what is said of each, and of all of them together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Protocol, TypeVar

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS
from kvtrace.causes.diagnosis import Diagnosis, Finding, NotObserved, Result, RuledOut
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger.run import Engine, Run
from kvtrace.terms import FAULT
from kvtrace.words import listed

Parts = Sequence[tuple[str, Diagnosis]]
"""Name of a connector, "" of those that stand alone in their engines, and what is said of it."""
T = TypeVar("T", Finding, RuledOut, NotObserved)


class _OfEngine(Protocol):
    @property
    def engine(self) -> int: ...


Row = TypeVar("Row", bound=_OfEngine)


def of_engines(run: Run, engines: Sequence[Engine]) -> Run:
    """A run with some of its engines alone; the rows of its requests stay."""
    pairs = {engine.tag: engine.pairs for engine in engines}
    here = {row for row, one in enumerate(run.requests) if one.engine in pairs}

    def mine(table: Sequence[Row]) -> list[Row]:
        return [row for row in table if row.engine in pairs]

    return replace(
        run,
        engines=engines,
        parts=(),
        hooks=mine(run.hooks), ops=mine(run.ops), skips=mine(run.skips), entries=mine(run.entries),
        lost=mine(run.lost), base=mine(run.base), whole=mine(run.whole), kept=mine(run.kept),
        total=sum(one.computed * pairs[one.engine] for one in run.requests if one.engine in pairs),
        load_rows=mine(run.load_rows),
        lost_resumed=mine(run.lost_resumed),
        async_saves=[save for save in run.async_saves if save.request in here],
    )  # fmt: skip


def joined(case: Case, results: Sequence[Result], parts: Parts) -> list[Result]:
    """What is said of the run as a whole.

    Of tokens each connector speaks for itself: what is found in one of them is found, and says in which;
    what each of them rules out is ruled out. The rest (processes, settings, times) is the run's.
    """
    whole = {one.id: one for one in results if isinstance(one, Finding)}
    found = of_the_run(_findings(parts), whole, set(case.assigned))
    ids = {one.id for one in found}
    # Lost by all, and for a reason that none of them gives for its own loss as a whole.
    missing = set(case.assigned) - ids
    own = [one for one in results if not _of_tokens(one.id) or one.id in missing]
    unseen = _each(parts, lambda one: one.not_observed, lambda one: (one.id, one.why))
    topics = {one.id for one in own if isinstance(one, NotObserved)}
    return [
        *own,
        *found,
        *_ruled_out(parts, ids),
        *(
            replace(one, why=_in(name, one.why))
            for name, one in unseen
            if _of_tokens(one.id) and one.id not in topics
        ),
    ]


def own(diagnosis: Diagnosis) -> Diagnosis:
    """What is said of one of several connectors: of its tokens. The rest is the run's."""
    return replace(
        diagnosis,
        findings=[one for one in diagnosis.findings if _of_tokens(one.id)],
        ruled_out=[one for one in diagnosis.ruled_out if _of_tokens(one.id)],
        not_observed=[one for one in diagnosis.not_observed if _of_tokens(one.id)],
    )


def _of_tokens(ident: str) -> bool:
    return ident in CATALOGUE and CATALOGUE[ident].ledger is not None


def _in(name: str, text: str) -> str:
    return f"in {name}: {text}" if name else text


def _titled(name: str, title: str) -> str:
    if not name or title.startswith(name):
        return title
    first = title.partition(" ")[0]
    return f"{name}: {title[:1].lower() + title[1:] if first in ('The', 'This', 'What') else title}"


def _findings(parts: Parts) -> list[Finding]:
    """The findings about tokens, with the connector's name; what all of them say alike is said once."""
    said = _each(
        parts, lambda one: one.findings, lambda one: (one.id, one.title, one.tokens, tuple(one.evidence))
    )
    return [
        replace(
            one,
            connector=name,
            title=_titled(name, one.title),
            headline=f"in {name}, {one.headline}" if name and one.headline else one.headline,
        )
        for name, one in said
        if _of_tokens(one.id)
    ]


def of_the_run(found: Sequence[Finding], whole: Mapping[str, Finding], lost: Set[str]) -> list[Finding]:
    """Faults; and what is none of one of them only where the ``whole`` run has it too, or ``lost`` tokens by
    it: else another has the tokens, or gave them. Of several that say the same one that lost no more than the
    run did speaks for those that lost more. What was not loaded was given by none."""
    kept: list[Finding] = []
    least = {ident: min((one.tokens for one in found if one.id == ident), default=0) for ident in whole}
    for one in found:
        if one.severity != FAULT:
            run = whole.get(one.id)
            if (run and run.tokens <= least[one.id] < one.tokens) or (not run and one.id not in lost):
                continue
            one = run if run and CATALOGUE[one.id].ledger == LOADS else one
        kept += [] if one in kept else [one]
    return kept


def _ruled_out(parts: Parts, found: set[str]) -> list[RuledOut]:
    """What every one of them rules out."""
    ruled: dict[str, list[tuple[str, str]]] = {}
    for name, one in parts:
        for out in one.ruled_out:
            ruled.setdefault(out.id, []).append((name, out.evidence))
    result = []
    for ident, said in ruled.items():
        if len(said) == len(parts) and ident not in found and _of_tokens(ident):
            alike = len({evidence for _, evidence in said}) == 1
            evidence = said[0][1] if alike else "; ".join(_in(name, text) for name, text in said)
            result.append(RuledOut(ident, evidence))
    return result


def _each(
    parts: Parts, of: Callable[[Diagnosis], Sequence[T]], key: Callable[[T], Hashable]
) -> list[tuple[str, T]]:
    """What the connectors say, with the name; once and without a name what several say in the same words."""
    alike: dict[Hashable, list[tuple[str, T]]] = {}
    for name, diagnosis in parts:
        for one in of(diagnosis):
            alike.setdefault(key(one), []).append((name, one))
    # What all of them say is nobody's in particular.
    names = {key: [name for name, _ in said] for key, said in alike.items()}
    return [
        (listed(names[key]) if len(said) == 1 or len(said) < len(parts) else "", said[0][1])
        for key, said in alike.items()
    ]
