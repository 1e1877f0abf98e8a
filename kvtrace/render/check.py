"""The page of ``kvtrace check``, and the words for a check that JUnit, SARIF and annotations share.

Strings of the report are cleaned here: one line, no control characters.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtrace.gate.outcome import Check, GateOutcome, QuotedFinding, Unit, Value
from kvtrace.grouped import grouped
from kvtrace.render.page import (
    Badge,
    Code,
    Column,
    Command,
    Heading,
    Labelled,
    Page,
    Paragraph,
    Row,
    Style,
    Table,
)
from kvtrace.render.report import SEVERITY_STYLES
from kvtrace.terms import SEVERITIES, severity_order, severity_word
from kvtrace.words import clean, count, percent, plural

MAX_ROWS = 12
_NOTHING = {"share": "not seen", "count": "none", "text": "none"}
_KINDS = ("finding", "target", "ledger")
COLUMNS = (
    Column("what"),
    Column("where"),
    Column("values"),
    Column(),
)


def check_page(outcome: GateOutcome) -> Page:
    """The outcome of a gate."""
    number, failed = len(outcome.checks), len(outcome.failed)
    checks = f"{failed} of {plural(number, 'check')}" if failed else plural(number, "check")
    page: Page = [
        Heading(f"{'❌' if failed else '✅'} kvtrace check", 2, quiet=True),
        Badge("FAILED" if failed else "PASSED", checks, "failed" if failed else "passed"),
        Paragraph(f"{clean(outcome.report)} against {'; '.join(map(clean, outcome.asked))}", "dim", True),
        *(Paragraph(clean(note), "dim", True) for note in outcome.notes),
    ]
    for group in groups(outcome):
        page += _group(group)
    page += _others("Better than required", outcome.of("better"), "good")
    page += _others("Changed, not a failure", _changed(outcome), "")
    command = _next_command(outcome)
    return [*page, Command(command)] if command else page


def _group(group: FailureGroup) -> Page:
    table = _table([one for one in group.checks if not (group.cause and one.kind == "finding")], group, "bad")
    if group.cause is None:
        return [Badge("No finding explains", style="failed"), table, Labelled("Remedy", group.remedies)]
    cause = Code(clean(group.cause.id, 80))
    return [
        Badge(severity_word(group.cause.severity), (cause,), SEVERITY_STYLES[group.cause.severity]),
        Paragraph(clean(group.cause.title), indent=True),
        table,
        Labelled("Evidence", [clean(line) for line in group.cause.evidence[:3]]),
        Labelled("Remedy", group.remedies),
        Labelled("More", [(Code(f"kvtrace docs {cause}"),)]),
    ]


def _table(checks: list[Check], group: FailureGroup | None, style: Style) -> Table:
    """The failures of a group; that the finding is there is a row only where nothing else failed."""
    title = clean(group.cause.title) if group and group.cause else None
    rows = []
    for check in checks or (group.checks if group else ()):
        name, where = subject(check)
        text = clean(check.text)
        rows.append(Row((Code(name), Code(where), values(check), "" if text == title else text), style))
    return Table(COLUMNS, rows, head=False, brief=MAX_ROWS)


def _others(title: str, checks: list[Check], style: Style) -> Page:
    return [Heading(title), _table(checks, None, style)] if checks else []


def _changed(outcome: GateOutcome) -> list[Check]:
    """What is otherwise, and no failure; but for findings that stand above already, as explanations."""
    return [
        check
        for check in outcome.of("changed")
        if not (check.kind == "finding" and check.subject in outcome.explanations)
    ]


def _next_command(outcome: GateOutcome) -> str:
    """The one command that helps most from here; "" after a pass with nothing to tell."""
    for group in groups(outcome):
        if group.cause is not None:
            return f"kvtrace docs {clean(group.cause.id, 80)}"
    if not outcome.passed:
        return f"kvtrace explain {clean(outcome.report)}"
    if outcome.baseline and outcome.of("better"):
        return f"kvtrace baseline {clean(outcome.report)} -o {clean(outcome.baseline)} --force"
    return ""


# ------------------------------------------------------------------- words for one check


def value(one: Value, unit: Unit) -> str:
    """A value of a check or a change."""
    if one is None:
        return _NOTHING[unit]
    if unit == "text" or isinstance(one, str):
        return clean(str(one), 120)
    return percent(float(one)) if unit == "share" else count(one)


def values(check: Check) -> str:
    """``100 % -> 75.0 %`` of two runs, ``required >= 99.0 %, got 94.4 %`` of a rule."""
    before, after = value(check.before, check.unit), value(check.after, check.unit)
    if not (check.required and isinstance(check.before, (int, float))):
        return f"{before} -> {after}"
    if before == after and isinstance(check.after, (int, float)) and check.after < check.before:
        before, after = (f"{share * 100:.6g} %" for share in (check.before, check.after))
    return f"required >= {before}, got {after}"


def subject(check: Check) -> tuple[str, str]:
    """What the check looks at, and where."""
    where = [clean(check.layers, 160)] if check.layers else []
    if check.rank is not None:
        where.append(f"rank {check.rank}")
    name = clean(check.subject, 80)
    if check.kind in _KINDS and not (check.kind == "ledger" and " " in name):
        name = f"{check.kind} {name}"
    return name, " · ".join(where)


def sentence(check: Check, title: str = "") -> str:
    """``save_kv_layer · model.layers.3.attn · rank 0: 100 % -> 0 %, called in 0 of 12 layer-steps``.

    Words of the check that are the `title` beside it are left out.
    """
    name = " · ".join(filter(None, subject(check)))
    words = clean(check.text) if check.text != title else ""
    return f"{name}: {values(check)}" + (f", {words}" if words else "")


@dataclass(frozen=True)
class FailureGroup:
    """Failures that one finding explains; None: no finding does."""

    cause: QuotedFinding | None
    checks: list[Check]

    @property
    def remedies(self) -> list[str]:
        if self.cause is not None:
            return [clean(line) for line in self.cause.remedy]
        return list(dict.fromkeys(clean(check.remedy) for check in self.checks if check.remedy))


def groups(outcome: GateOutcome) -> list[FailureGroup]:
    """Failures by the finding that explains them: faults first, what nothing explains last."""
    known = outcome.explanations
    by_cause = grouped(outcome.failed, lambda check: check.cause if check.cause in known else None)
    found = [FailureGroup(known[cause] if cause else None, checks) for cause, checks in by_cause]
    return sorted(found, key=lambda one: severity_order(one.cause.severity) if one.cause else len(SEVERITIES))
