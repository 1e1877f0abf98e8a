"""What a synthetic run is found to have: the findings, the books in tokens, what is ruled out or not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from synth import HEALTHY, Fate, Policy, Prompt, Rounding, Sim

from kvtrace.causes import Diagnosis, diagnose
from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger import read_run
from kvtrace.ledger.run import LostSpan, OutcomeAmount
from kvtrace.terms import NOTE, Grade

Row = TypeVar("Row", LostSpan, OutcomeAmount)


def prompts(lengths: Sequence[int], output: int = 1, start: int = 1) -> list[Prompt]:
    return [Prompt(f"req-{start + i}", n, digest=start + i, output=output) for i, n in enumerate(lengths)]


def served(
    folder: Path, lengths: Sequence[int], policy: Policy | None = None, *, output: int = 1,
    fate: Callable[[int], Fate] = lambda n: HEALTHY, **settings: Any,
) -> Sim:  # fmt: skip
    """Prompts of these lengths, one after the other. Without a ``policy`` the connector stores whole units of
    32 tokens, and has that number. ``settings``: of the Sim."""
    if policy is None:
        policy = Rounding(32).policy()
        settings = {"ints": {"unit": 32}, **settings}
    sim = Sim(folder, **settings)
    sim.serve(prompts(lengths, output), policy, fate=fate)
    return sim


def analyse(sim: Sim, *others: Sim) -> Diagnosis:
    """The diagnosis of a run of one or several engines; its books balance, its findings have their words."""
    for one in (sim, *others):
        one.write()
    diagnosis = diagnose(read_run(sim.dir))
    diagnosis.saves.check()
    diagnosis.loads.check()
    for finding in diagnosis.findings:
        assert finding.title.endswith((".", "!", "?")) and "\n" not in finding.title, finding
        assert finding.evidence or finding.severity == NOTE, finding
        assert finding.remedy and finding.versions, finding
        assert 0 <= finding.share <= 1 and len(finding.events) <= 3, finding
    return diagnosis


def graded(table: Sequence[Row], grade: Grade) -> list[Row]:
    """Rows of Run.base or Run.lost, seen as well as that."""
    return [one._replace(grade=grade) for one in table]


def ids(diagnosis: Diagnosis) -> list[str]:
    """Findings about saves, and notes."""
    return [finding.id for finding in diagnosis.findings if CATALOGUE[finding.id].ledger != "loads"]


def the(diagnosis: Diagnosis, ident: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.id == ident)


def words(finding: Finding) -> str:
    return " | ".join([finding.severity, finding.title, *finding.evidence, *finding.remedy])


def said(diagnosis: Diagnosis, ident: str) -> str:
    return words(the(diagnosis, ident))


def ruled_out(diagnosis: Diagnosis) -> dict[str, str]:
    """Id -> evidence."""
    return {item.id: item.evidence for item in diagnosis.ruled_out}


def not_observed(diagnosis: Diagnosis) -> dict[str, str]:
    """Id -> why."""
    return {item.id: item.why for item in diagnosis.not_observed}


def tokens(diagnosis: Diagnosis) -> dict[str, float]:
    """Accounts of the saves in tokens."""
    book = diagnosis.saves
    assert book.pairs
    return {name: amount / book.pairs for name, amount in book.accounts.items()}
