"""The answers of ``kvtrace check`` and ``kvtrace diff`` as GitHub Markdown: a job summary, a comment."""

from __future__ import annotations

import re

from kvtrace.gate.outcome import Difference, Outcome
from kvtrace.render import gate
from kvtrace.render.markdown import code, text
from kvtrace.render.wording import clean

MAX_ROWS = 50


def check_markdown(outcome: Outcome) -> str:
    """The outcome of a gate."""
    mark = "✅" if outcome.passed else "❌"
    out = [f"## {mark} kvtrace check: {gate.headline(outcome).replace('  ', ', ').lower()}", ""]
    out += [text(gate.asked(outcome)), ""]
    out += [f"- {text(note)}" for note in outcome.notes]
    for group in gate.groups(outcome):
        if group.cause is None:
            out += ["", "### No finding explains", ""]
        else:
            out += [
                "",
                f"### {text(group.cause.severity)} {code(group.cause.id)}",
                "",
                text(group.cause.title),
                "",
            ]
        out += _table(group.rows)
        for label, lines in (
            ("Evidence", group.cause.evidence[:3] if group.cause else []),
            ("Remedy", group.remedies),
        ):
            if lines:
                out += ["", f"{label}:", "", *(f"- {text(line)}" for line in lines)]
        if group.cause is not None:
            out += ["", f"More: {code(f'kvtrace docs {clean(group.cause.id, 80)}')}"]
    for title, rows in (
        ("Better than asked", gate.better(outcome)),
        ("Changed, and no failure", gate.changed(outcome)),
    ):
        if rows:
            out += ["", f"### {title}", "", *_table(rows)]
    if command := gate.next_command(outcome):
        out += ["", f"Next: {code(command)}"]
    return _joined(out)


def _table(rows: list[gate.Row]) -> list[str]:
    lines = ["| what | where | from | to | |", "| --- | --- | ---: | ---: | --- |"]
    for one in rows[:MAX_ROWS]:
        where = _cell(one.where) if one.where else ""
        lines.append(
            f"| {_cell(one.name)} | {where} | {text(one.before)} | {text(one.after)} | {text(one.text)} |"
        )
    if len(rows) > MAX_ROWS:
        lines += ["", f"and {len(rows) - MAX_ROWS} more"]
    return lines


def diff_markdown(difference: Difference) -> str:
    """What differs between two runs."""
    out = ["## kvtrace diff", ""]
    for name, path, verdict in (
        ("A", difference.a, difference.verdicts[0]),
        ("B", difference.b, difference.verdicts[1]),
    ):
        out.append(f"- {name} {code(path)}: {text(clean(verdict))}")
    if difference.empty:
        out += ["", "No difference in settings, targets, coverage, ledgers or findings."]
    for title, rows in gate.sections(difference):
        out += ["", f"### {title}", "", "| what | where | A | B | |", "| --- | --- | ---: | ---: | --- |"]
        for one in rows:
            where = _cell(one.where) if one.where else ""
            words = " · ".join(filter(None, (one.verdict if one.verdict != "same" else "", text(one.text))))
            out.append(f"| {_cell(one.name)} | {where} | {text(one.before)} | {text(one.after)} | {words} |")
    return _joined(out)


def _cell(value: str) -> str:
    return code(value).replace("|", "\\|")


def _joined(out: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*out, ""]))
