"""The first screen of ``kvtrace explain``, for a reader who knows vLLM and not kvtrace: what ran, what share
was saved and where, the reason that matters most with what to change, which requests show it, what is next.

The least important words go first where a screen has no room for all. What is left out is named, with the
option that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrace.labels import OUTCOMES, label
from kvtrace.render import answers
from kvtrace.render.page import (
    Badge,
    Code,
    Column,
    Command,
    Facts,
    Labelled,
    Page,
    Paragraph,
    Row,
    Screen,
    Table,
)
from kvtrace.render.report import (
    SEVERITY_STYLES,
    headline,
    logged_words,
    next_command,
    report_page,
    state_lines,
)
from kvtrace.render.terminal import height, terminal
from kvtrace.terms import FAULT, KEPT, NOTE, SAVED, Stage, outcome_order, severity_word
from kvtrace.words import clean, count, percent, plural

if TYPE_CHECKING:
    from kvtrace.report.model import FindingRow, Report

_SLOW = ("hook-slow", "load-late", "save-blocks-step")
"""Notes of what makes every request wait."""
ROWS = 23
"""Of a terminal of 24: the prompt has the last one."""
MAX_FINDINGS = 3
MAX_OUTCOMES = 6
_MOST_OF_COMMAND = 150
"""Characters: two rows."""


class _Room(NamedTuple):
    """How much is said.

    Attributes:
        most: characters of a sentence of a finding; a longer text is shown up to the end of a sentence.
        seen: the first evidence of the finding that stands first.
        titles: what the findings behind the first one say; else what and how much alone.
        requests: which requests show the first one.
        vllm: what vLLM itself did: attention, the hooks.
        gaps: empty lines.
        logged: what the connector logged, where nothing above quotes it.
    """

    findings: int = MAX_FINDINGS
    outcomes: int = MAX_OUTCOMES
    most: int = 220
    seen: bool = True
    titles: bool = True
    requests: bool = True
    vllm: bool = True
    gaps: bool = True
    logged: bool = True


_CUTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"gaps": False},
    {"seen": False},
    {"most": 1},
    {"outcomes": 4},
    {"titles": False},
    {"logged": False},
    {"outcomes": 3},
    {"findings": 2},
    {"findings": 1},
    {"requests": False},
    {"requests": True},
    {"vllm": False},
    {"requests": False, "outcomes": 2},
)
"""What a screen does without where it has not room for all, one after the other; where a longer part goes, a
short one comes back."""


def explained_text(report: Report, screen: Screen, source: str, traced: str | None, detail: int) -> str:
    """One screen (`detail` 0); with the evidence (1); all that the report holds (2)."""
    if not detail:
        return brief_text(report, screen, source, traced)
    return terminal(report_page(report, source, traced, whole=detail > 1), screen)


def brief_text(report: Report, screen: Screen, source: str | None = None, traced: str | None = None) -> str:
    """The short page as text: the fullest that fits the rows of a screen, at its width."""
    text, room = "", _Room()
    for cut in _CUTS:
        room = room._replace(**cut)
        text = terminal(_page(report, room, source, traced), screen)
        if height(text, screen) <= ROWS:
            break
    return text


def _page(report: Report, room: _Room, source: str | None, traced: str | None) -> Page:
    ran = any(one["real_steps"] for one in report["run"]["engines"])
    return [
        *(Facts(facts) for facts in headline(report, brief=True)),
        Paragraph(clean(report["verdict"]), "bold", gap=True),
        Paragraph(answers.where(report)),
        Paragraph(answers.watched(report)),
        Paragraph(answers.uneven(report)),
        Paragraph(_vllm(report) if room.vllm else ""),
        *_saves(report, room),
        Paragraph(answers.loaded(report) if ran else ""),
        *(Paragraph(f"States: {line}") for line in state_lines(report)[1:2]),
        *_findings(report, room),
        Paragraph(_left_out(report, room), "dim", gap=room.gaps),
        Command(next_command(report, source, traced, "-v", _MOST_OF_COMMAND), gap=False),
    ]


def _vllm(report: Report) -> str:
    """Whether attention ran in Python, and the save hooks with it; "" where nothing ran."""
    said = "; ".join(filter(None, (answers.attention(report), answers.saving(report))))
    return f"{said}." if said else ""


# ------------------------------------------------------------------------------ the ledger

_SEEN = {"proved": "came back the same", "written": "seen stored", "read": "", "declared": ""}
"""How well it is seen that tokens were stored or loaded."""


class _Line(NamedTuple):
    words: str
    tokens: int
    note: str
    good: bool
    fault: bool = False


def _saves(report: Report, room: _Room) -> Page:
    """What became of the prompt tokens that were computed here, as the verdict counts them; where there are
    many outcomes, the smallest that are no fault summed."""
    amounts = report["ledger"]["saves"]["prompts"]
    total = sum(sum(of.values()) for of in amounts.values())
    if not total:
        return []
    present = sorted(amounts, key=lambda name: (outcome_order(name), -sum(amounts[name].values()), name))
    lines = [line for name in present for line in _lines(report, name, amounts[name])]
    if len(lines) > room.outcomes:
        best, *others = lines
        others.sort(key=lambda one: (not one.fault, -one.tokens))
        rest = others[room.outcomes - 2 :]
        words = f"{len(rest)} more (-v)"
        lines = [best, *others[: room.outcomes - 2], _Line(words, sum(one.tokens for one in rest), "", False)]
    rows = [
        Row((one.words, count(one.tokens), percent(min(one.tokens / total, 1.0)), one.note),
            "good" if one.good else "bad")
        for one in lines
    ]  # fmt: skip
    columns = (Column("outcome"), Column("tokens", right=True), Column("share", right=True), Column(""))
    title = f"Of {plural(total, 'prompt token')} computed here"
    return [Table(columns, rows, title, gap=room.gaps), Paragraph(answers.generated(report))]


def _lines(report: Report, name: str, grades: dict[str, int]) -> Iterator[_Line]:
    """The lines of one outcome: several for what is saved, by how well that is seen."""
    if name == SAVED:
        for of, words in answers.SAVED_WORDS:
            part = {grade: grades[grade] for grade in of if grade in grades}
            if part:
                yield _Line(words, sum(part.values()), _SEEN.get(list(part)[-1], ""), True)
    elif name in OUTCOMES:
        yield _Line(label(name), sum(grades.values()), "", name in KEPT)
    else:
        of_it = [one for one in report["findings"] if f"not-saved:{one['id']}" == name]
        notes = [severity_word(one["severity"]).lower() for one in of_it[:1] if one["severity"] != NOTE]
        if list(grades)[-1:] == ["declared"] and any(one["stage"] == Stage.SCHEDULE for one in of_it):
            notes.append("by its metadata")
        fault = any(one["severity"] == FAULT for one in of_it)
        yield _Line(f"not stored: {label(name)}", sum(grades.values()), ", ".join(notes), False, fault)


# ------------------------------------------------------------------------------ findings


def _findings(report: Report, room: _Room) -> Page:
    if not report["findings"]:
        kept = report["ledger"]["saves"].get("prompts", {}).get(SAVED, {})
        verify = " kvtrace verify tells whether it comes back." if kept.keys() - {"proved"} else ""
        return [Paragraph(f"Nothing is wrong as far as it was seen.{verify}", gap=room.gaps)]
    page: Page = []
    for at, one in enumerate(_shown(report, room)):
        page += _first(report, one, room) if at == 0 else _further(report, one, room)
    return [*page, *(_logged(report) if room.logged else [])]


def _logged(report: Report) -> Page:
    """The worst of what the connector logged, where the first finding does not quote it."""
    quoted = " ".join([*report["findings"][0]["remedy"][:1], *report["findings"][0]["evidence"][:1]])
    left = [one for one in report.get("logged", []) if one["message"] not in quoted]
    return [Labelled("Logged", [logged_words(left[0], logger=False)], 9)] if left else []


def _shown(report: Report, room: _Room) -> list[FindingRow]:
    """The first one; and those of the others that say more than the outcomes, or have room for a sentence."""
    if not report["findings"]:
        return []
    first, *others = report["findings"]
    saves = report["ledger"]["saves"]
    prompts = saves.get("prompts", saves["accounts"])
    said = saves["accounts"].keys() - (prompts if room.titles else ())
    others = [one for one in others if f"not-saved:{one['id']}" not in said]
    if not room.titles:
        others = [one for one in others if one["severity"] != NOTE or one["id"] in _SLOW]
    return [first, *others][: room.findings]


def _amount(report: Report, one: FindingRow) -> str:
    """How much: the prompt tokens that stand above, with their share, or what it explains else."""
    parts = [f"in {clean(one.get('connector', ''), 80)}"] if one.get("connector") else []
    above = report["ledger"]["saves"].get("prompts", {}).get(f"not-saved:{one['id']}", {})
    tokens = sum(above.values()) if above and not one.get("connector") else round(one["tokens"])
    if tokens:
        parts.append(plural(tokens, "token"))
    return "".join(f", {part}" for part in parts)


def _badge(report: Report, one: FindingRow, text: str, gap: bool) -> Badge:
    style = SEVERITY_STYLES[one["severity"]]
    words = (Code(clean(one["id"], 80)), _amount(report, one), f": {text}" if text else "")
    return Badge(severity_word(one["severity"]), words, style, whole=False, gap=gap)


def _first(report: Report, one: FindingRow, room: _Room) -> Page:
    """The reason that matters most: what was seen, what to change, which requests show it."""
    headline = clean(one.get("headline", ""))
    told = headline and headline.lower() in clean(report["verdict"]).lower()  # the verdict says why
    asks = one["severity"] == FAULT or one["title"].endswith("?")
    pattern = clean(one.get("pattern", "")) if asks else ""
    said, alike = (pattern, "") if told else (_sentences(clean(one["title"]), room.most), f": {pattern}")
    page: Page = [_badge(report, one, said, room.gaps)]
    if room.seen and one["evidence"] and len(one["evidence"][0]) <= room.most:
        page.append(Labelled("Seen", [clean(one["evidence"][0])], 9))
    if one["remedy"]:
        page.append(Labelled("Remedy", [_sentences(clean(one["remedy"][0]), room.most)], 9))
    shown = list(dict.fromkeys(clean(event["request"], 44) for event in one["events"] if event["request"]))
    if room.requests and shown:
        of = f" ({count(one['requests'])} of {count(report['requests']['total'])})" if one["requests"] else ""
        page.append(Labelled("Requests", [", ".join(shown[:2]) + of + (alike if pattern else "")], 9))
    return page


def _further(report: Report, one: FindingRow, room: _Room) -> Page:
    """What and how much."""
    whole = room.titles or one["id"] in _SLOW
    title = _sentences(clean(one["title"]), 1) if whole else label(one["id"])
    return [_badge(report, one, title, False)]


_SENTENCE = re.compile(r"(?<=[a-z0-9_)'\"]\.) (?=[A-Z])")


def _sentences(text: str, most: int) -> str:
    """The sentences of `text` that fit `most` characters; one at least, and each of them whole."""
    shown, *rest = _SENTENCE.split(text)
    for sentence in rest:
        quoting = shown.count('"') % 2  # the end of a sentence that is quoted is no end
        if len(shown) + 1 + len(sentence) > most and not quoting:
            break
        shown += f" {sentence}"
    return shown


# -------------------------------------------------------------------------------- the end


def _left_out(report: Report, room: _Room) -> str:
    """What ``-v`` shows."""
    limits, unseen = report["limits"], report["not_observed"]
    parts = []
    shown = _shown(report, room)
    if more := [one for one in report["findings"] if one not in shown]:
        faults = sum(one["severity"] == FAULT for one in more)
        what = plural(faults, "fault") if faults else clean(more[0]["id"], 80) if len(more) == 1 else ""
        parts.append(plural(len(more), "more finding") + (f" ({what})" if what else ""))
    parts += [f"{plural(len(report['ruled_out']), 'cause')} ruled out"]
    if unseen:
        parts.append(f"{count(len(unseen))} could not be checked")
    if inside := report.get("connectors", []):
        parts.append(f"ledgers of {plural(len(inside), 'connector')} inside")
    if limits["lost_records"]:
        parts.append(f"{plural(limits['lost_records'], 'record')} lost")
    if limits["damaged"]:
        parts.append(f"{plural(len(limits['damaged']), 'recording')} damaged")
    return ", ".join(parts) + " (-v)"
