"""What a gate and a comparison say, as plain rows; how they look is the renderers' business.

Strings here are clean (one line, no control characters), none is escaped for a markup language yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvtrace.gate.outcome import Change, Check, Difference, Explanation, Outcome, Unit, Value
from kvtrace.render.wording import clean
from kvtrace.words import count, percent, plural

_NOTHING = {"share": "not seen", "count": "none", "text": "none"}
_KINDS = {"finding": "finding", "target": "target", "ledger": "ledger"}


def value(one: Value, unit: Unit) -> str:
    """A value of a check or a change."""
    if one is None:
        return _NOTHING[unit]
    if unit == "text" or isinstance(one, str):
        return clean(str(one), 120)
    return percent(float(one)) if unit == "share" else count(one)


@dataclass(frozen=True)
class Row:
    """One check: what, where, from, to, and more words."""

    name: str
    where: str
    before: str
    after: str
    text: str


def row(check: Check) -> Row:
    where = [clean(check.layers, 160)] if check.layers else []
    if check.rank is not None:
        where.append(f"rank {check.rank}")
    name = clean(check.subject, 80)
    if check.kind in _KINDS and not (check.kind == "ledger" and " " in name):
        name = f"{_KINDS[check.kind]} {name}"
    return Row(
        name,
        " · ".join(where),
        value(check.before, check.unit),
        value(check.after, check.unit),
        clean(check.text),
    )


def sentence(check: Check, told: str = "") -> str:
    """``save_kv_layer · model.layers.3.attn · rank 0: 100.0 % -> 0.0 %, called in 0 of 12 layer-steps``.

    Words of the check that are `told` beside it are left out.
    """
    one = row(check)
    name = " · ".join(filter(None, (one.name, one.where)))
    words = one.text if check.text != told else ""
    return f"{name}: {one.before} -> {one.after}" + (f", {words}" if words else "")


def headline(outcome: Outcome) -> str:
    """The verdict and its size."""
    number, failed = len(outcome.checks), len(outcome.failed)
    if failed:
        return f"FAILED  {failed} of {plural(number, 'check')}"
    return f"PASSED  {plural(number, 'check')}"


def asked(outcome: Outcome) -> str:
    """What was held against what."""
    return f"{clean(outcome.report)} against {'; '.join(clean(one) for one in outcome.asked)}"


@dataclass(frozen=True)
class Group:
    """Failures that one finding explains; None: no finding does."""

    cause: Explanation | None
    checks: list[Check]

    @property
    def title(self) -> str:
        if self.cause is None:
            return "No finding explains"
        return f"{self.cause.severity.upper()}  {clean(self.cause.id, 80)}"

    @property
    def rows(self) -> list[Row]:
        """The failures; that a finding is there is said by its own lines, where there is another failure."""
        told = [check for check in self.checks if not (check.kind == "finding" and self.cause)]
        title = clean(self.cause.title) if self.cause else None
        rows = [row(check) for check in told or self.checks]
        return [replace(one, text="") if one.text == title else one for one in rows]

    @property
    def remedies(self) -> list[str]:
        if self.cause is not None:
            return [clean(line) for line in self.cause.remedy]
        return list(dict.fromkeys(clean(check.remedy) for check in self.checks if check.remedy))


def groups(outcome: Outcome) -> list[Group]:
    """Failures by the finding that explains them: faults first, what nothing explains last."""
    by_cause: dict[str, list[Check]] = {}
    for check in outcome.failed:
        cause = check.cause if check.cause in outcome.explanations else None
        by_cause.setdefault(cause or "", []).append(check)
    severities = ("fault", "limit", "note")

    def order(cause: str) -> tuple[bool, int]:
        return (not cause, severities.index(outcome.explanations[cause].severity) if cause else 0)

    return [Group(outcome.explanations.get(cause), by_cause[cause]) for cause in sorted(by_cause, key=order)]


def better(outcome: Outcome) -> list[Row]:
    return [row(check) for check in outcome.of("better")]


def changed(outcome: Outcome) -> list[Row]:
    """What is otherwise, and no failure; but for findings that are told already, as explanations."""
    return [
        row(check)
        for check in outcome.of("changed")
        if not (check.kind == "finding" and check.subject in outcome.explanations)
    ]


def next_command(outcome: Outcome) -> str:
    """The one command that helps most from here; "" after a pass with nothing to tell."""
    for group in groups(outcome):
        if group.cause is not None:
            return f"kvtrace docs {clean(group.cause.id, 80)}"
    if not outcome.passed:
        return f"kvtrace explain {clean(outcome.report)}"
    if outcome.baseline and outcome.of("better"):
        return f"kvtrace baseline {clean(outcome.report)} -o {clean(outcome.baseline)} --force"
    return ""


# ---------------------------------------------------------------------------------- diff

SECTIONS = (
    ("settings", "Settings that differ"),
    ("targets", "Targets that appeared or vanished"),
    ("coverage", "Coverage"),
    ("saves", "Where the tokens went"),
    ("loads", "What the connector loaded"),
    ("findings", "Findings gained and lost"),
)


@dataclass(frozen=True)
class ChangeRow:
    name: str
    where: str
    before: str
    after: str
    text: str
    verdict: str


def sections(difference: Difference) -> list[tuple[str, list[ChangeRow]]]:
    """(title, rows) of the parts in which the runs differ."""
    out = []
    for name, title in SECTIONS:
        changes: list[Change] = getattr(difference, name)
        if changes:
            out.append((title, [_change(change) for change in changes]))
    return out


def _change(change: Change) -> ChangeRow:
    return ChangeRow(
        clean(change.name, 80),
        clean(change.layers, 160),
        value(change.before, change.unit),
        value(change.after, change.unit),
        clean(change.text),
        change.verdict,
    )


def widths(rows: Iterable[tuple[str, ...]]) -> list[int]:
    """How wide each column has to be."""
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
