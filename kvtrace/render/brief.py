"""The short page of ``kvtrace explain``: what an engineer in a hurry needs, on one screen of a terminal.

Of findings the first ones stand there, each with its share and its first remedy; the least important words go
first where a screen has no room for all. What is left out is named, with the option that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvtrace.render.layout import clean
from kvtrace.render.page import Badge, Code, Command, Facts, Labelled, Page, Paragraph, Row, Screen, Table
from kvtrace.render.report import (
    SEVERITY_STYLES,
    connector_facts,
    counts,
    finding_facts,
    grade_of,
    grouped,
    ledger_table,
    next_command,
    outcome_label,
    parallel_facts,
    state_lines,
    way_facts,
)
from kvtrace.render.terminal import height, terminal
from kvtrace.terms import FAULT, LOADED, LOCAL_HIT, NOT_OBSERVED, outcome_order
from kvtrace.words import count, percent, plural

if TYPE_CHECKING:
    from kvtrace.report.model import Finding, Ledger, Report

ROWS = 23
"""Of a terminal of 24: the prompt has the last one."""
MAX_FINDINGS = 3
MAX_OUTCOMES = 6
_MAX_ENGINES = 2


class _Room(NamedTuple):
    """How much is said.

    Attributes:
        remedies: of which findings: "all", "faults", only the "first", "none".
        most: characters of a title or a remedy; a longer one is shown up to the end of a sentence.
        titles: of all findings; else only of the first.
        gaps: empty lines between findings; ``ledger_gap``: before the ledger.
        seen: the first evidence of a fault that stands first.
    """

    findings: int = MAX_FINDINGS
    outcomes: int = MAX_OUTCOMES
    remedies: str = "all"
    most: int = 200
    titles: bool = True
    gaps: bool = True
    ledger_gap: bool = True
    seen: bool = False


_TIGHT = _Room(gaps=False, ledger_gap=False, most=1, remedies="first", titles=False)
_ROOMS = (
    _Room(seen=True),
    _Room(seen=True, gaps=False),
    _Room(),
    _Room(gaps=False),
    _Room(gaps=False, ledger_gap=False),
    _Room(gaps=False, ledger_gap=False, most=1),
    _Room(gaps=False, ledger_gap=False, most=1, remedies="faults"),
    _Room(gaps=False, ledger_gap=False, most=1, remedies="first"),
    _TIGHT,
    _TIGHT._replace(outcomes=4),
    _TIGHT._replace(outcomes=3),
    _TIGHT._replace(outcomes=3, findings=2),
    _TIGHT._replace(outcomes=3, findings=1),
    _TIGHT._replace(outcomes=3, findings=1, remedies="none"),
)
"""From the most that is said to the least."""


def brief_text(report: Report, screen: Screen, source: str | None = None, traced: str | None = None) -> str:
    """The short page as text: the fullest that fits the rows of a screen, at its width."""
    text = ""
    for room in _ROOMS:
        text = terminal(_page(report, room, source, traced), screen)
        if height(text, screen) <= ROWS:
            break
    return text


def _page(report: Report, room: _Room, source: str | None, traced: str | None) -> Page:
    return [
        *(Facts(facts) for facts in _head(report)),
        Paragraph(_verdict(report), "bold", gap=True),
        *_saves(report["ledger"]["saves"], room),
        Paragraph(_loads(report["ledger"]["loads"])),
        *(Paragraph(f"States: {line}") for line in state_lines(report)[1:2]),
        *_findings(report, room),
        Paragraph(_left_out(report, room.findings), "dim", gap=room.gaps),
        Command(next_command(report, source, traced, "-v"), gap=False),
    ]


# ------------------------------------------------------------------------------ what ran


def _head(report: Report) -> Iterator[list[str]]:
    """What ran: engines that are alike once."""
    engines = report["run"]["engines"]
    kinds = grouped(
        engines,
        lambda engine: (
            (*connector_facts(report, engine, "in vLLM"), " ".join(parallel_facts(engine, every=True))),
            tuple(way_facts(engine)),
        ),
    )
    for (what, way), alike in kinds[:_MAX_ENGINES]:
        yield [*what, *([f"{len(alike)} such engines"] if len(alike) > 1 else [])]
        if way:
            yield list(way)
    if len(kinds) > _MAX_ENGINES:
        yield [f"and {plural(len(kinds) - _MAX_ENGINES, 'other kind')} of engine (-v)"]
    if not engines:
        version = clean(report["run"]["vllm"] or "")
        yield [f"vLLM {version}" if version else "vLLM of unknown version", "no engine was seen"]
    yield from counts(report)


def _verdict(report: Report) -> str:
    """The answer, with the least grade of what it speaks of: prompt tokens that were computed here."""
    said = clean(report["verdict"])
    grades = [
        grade
        for name, of in report["ledger"]["saves"].get("grades", {}).items()
        if name not in (LOADED, LOCAL_HIT, NOT_OBSERVED) and name != "not-saved:decode-not-offered"
        for grade in [grade_of(of)]
        if grade
    ]
    least = max(grades, key=_order, default="")
    return f"{said} (grade: {least})" if least else said


_GRADES = ("proved", "written", "read", "declared", "not observed")


def _order(grade: str) -> int:
    return _GRADES.index(grade) if grade in _GRADES else len(_GRADES)


# ------------------------------------------------------------------------------ the ledgers


def _saves(ledger: Ledger, room: _Room) -> Page:
    """Every outcome, the smallest ones summed where there are many."""
    if ledger["total"] <= 0:
        return []
    table = ledger_table(f"Where {plural(ledger['total_tokens'], 'token')} went", ledger, "")
    rows = [row for row in table.rows if not row.total]
    most = room.outcomes
    if len(rows) > most:
        rest = rows[most - 1 :]
        tokens = sum(_tokens(ledger, name) for name in _ordered(ledger)[most - 1 :])
        share = percent(min(tokens / ledger["total_tokens"], 1.0)) if ledger["total_tokens"] else ""
        blank = [""] * (len(table.columns) - 3)
        words = f"{len(rest)} more outcomes (-v)"
        rows = [*rows[: most - 1], Row((words, count(tokens), share, *blank), "bad")]
    return [Table(table.columns, rows, table.title, gap=room.ledger_gap)]


def _ordered(ledger: Ledger) -> list[str]:
    accounts = ledger["accounts"]
    present = [name for name in accounts if accounts[name]]
    return sorted(present, key=lambda name: (outcome_order(name), -accounts[name], name))


def _tokens(ledger: Ledger, name: str) -> float:
    return ledger["tokens"].get(name, ledger["accounts"][name] / (ledger["pairs"] or 1))


def _loads(ledger: Ledger) -> str:
    """The ledger of loads in a line: ``Loads: 512 loaded (proved), 13 504 missed (lookup-miss, read)``."""
    if ledger["total"] <= 0:
        note = clean(ledger["trust_note"])
        return "Loads: none was offered or asked for" + (f" ({note})" if note else "")
    parts = []
    for name in _ordered(ledger):
        what, _, cause = outcome_label(name).partition(" · ")
        grade = "" if name == NOT_OBSERVED else grade_of(ledger.get("grades", {}).get(name, {}))
        why = ", ".join(filter(None, (cause, grade)))
        parts.append(f"{count(_tokens(ledger, name))} {what}" + (f" ({why})" if why else ""))
    return f"Loads: {', '.join(parts)}"


# ------------------------------------------------------------------------------ findings


def _findings(report: Report, room: _Room) -> Page:
    found = report["findings"]
    if not found:
        return [Paragraph("No findings.", gap=room.gaps)]
    page: Page = []
    for at, one in enumerate(found[: room.findings]):
        page += _finding(one, at, room)
    return page


def _finding(one: Finding, at: int, room: _Room) -> Page:
    facts = "".join(f" · {fact}" for fact in finding_facts(one, None))
    fault = one["severity"] == FAULT
    badge, style = one["severity"].upper(), SEVERITY_STYLES[one["severity"]]
    page: Page = [
        Badge(badge, (Code(clean(one["id"], 80)), facts), style, whole=fault, gap=room.gaps or at == 0)
    ]
    if room.titles or at == 0:
        page.append(Paragraph(_sentences(clean(one["title"]), room.most), indent=True))
    if room.seen and fault and at == 0 and one["evidence"] and len(one["evidence"][0]) <= room.most:
        page.append(Labelled("Seen", [clean(one["evidence"][0])], 8))
    wanted = {"all": True, "faults": fault or at == 0, "first": at == 0}
    if one["remedy"] and wanted.get(room.remedies):
        shown = _sentences(clean(one["remedy"][0]), room.most)
        more = len(one["remedy"]) > 1 or shown != clean(one["remedy"][0])
        page.append(Labelled("Remedy", [f"{shown} (more: -v)" if more else shown], 8))
    return page


_SENTENCE = re.compile(r"(?<=[a-z0-9_)'\"]\.) (?=[A-Z])")


def _sentences(text: str, most: int) -> str:
    """The sentences of `text` that fit `most` characters; one at least, and each of them whole."""
    shown, *rest = _SENTENCE.split(text)
    for sentence in rest:
        if len(shown) + 1 + len(sentence) > most:
            break
        shown += f" {sentence}"
    return shown


# -------------------------------------------------------------------------------- the end


def _left_out(report: Report, shown: int) -> str:
    """What ``-v`` shows; `shown`: findings that stand above."""
    limits, unseen = report["limits"], report["not_observed"]
    parts = []
    if more := report["findings"][shown:]:
        faults = sum(one["severity"] == FAULT for one in more)
        what = plural(faults, "fault") if faults else clean(more[0]["id"], 80) if len(more) == 1 else ""
        parts.append(plural(len(more), "more finding") + (f" ({what})" if what else ""))
    parts += [f"{plural(len(report['ruled_out']), 'cause')} ruled out"]
    if unseen:
        parts.append(f"{count(len(unseen))} not observed")
    if inside := report.get("connectors", []):
        parts.append(f"ledgers of {plural(len(inside), 'connector')} inside")
    if limits["lost_records"]:
        parts.append(f"{plural(limits['lost_records'], 'record')} lost")
    if limits["damaged"]:
        parts.append(f"{plural(len(limits['damaged']), 'spool')} damaged")
    return ", ".join(parts) + " (-v)"
