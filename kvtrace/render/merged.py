"""The pages of merged runs: what was joined, the requests, and one request across its engines.

Strings of the traces are cleaned here: one line, no control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvtrace.render.listing import shortest, with_grade
from kvtrace.render.page import (
    Bullets,
    Code,
    Column,
    Command,
    Facts,
    Heading,
    Labelled,
    Page,
    Paragraph,
    Row,
    Screen,
    Table,
    bulleted,
)
from kvtrace.render.story import story_page
from kvtrace.words import clean, count, duration, plural

if TYPE_CHECKING:  # the command line imports this file, and shall not load the analysis
    from kvtrace.merge.merged import Alone, End, EngineOf, Joined, Merged, Sums
    from kvtrace.merge.tell import List, Tale

_LAST = "the last token of a prompt, which vLLM always computes"
_SAME_ID = (
    "requests that hand over no id are joined where the client sends both engines the same X-Request-Id "
    "header (not a mere number)"
)
_MOST_ROWS = 200
Ids: TypeAlias = "Mapping[int, Mapping[str, str]]"
"""Engine -> id of a request there -> its beginning that tells it apart."""


def merged_page(merged: Merged, where: str) -> Page:
    """What was merged, what was joined, and what came of it. `where`: the merged directory, as typed."""
    page: Page = [
        Heading("kvtrace merge", 2, quiet=True),
        Facts(_facts(merged)),
        Paragraph(_headline(merged), "bold", gap=True),
        *([_way(merged.sums, "Prompt tokens")] if merged.sums.joined else []),
        _engines(merged),
    ]
    how = [f"{plural(times, 'request')}: {_how(name)}" for name, times in merged.joins.items()]
    alone = [f"{plural(times, 'request')}: {clean(why)}" for why, times in merged.alone.items()]
    verdicts = [f"{number}: {clean(run.verdict)}" for number, run in enumerate(merged.runs, 1) if run.verdict]
    notes = [clean(note) for note in merged.notes]
    notes += [clean(f"{run.name}: {note}") for run in merged.runs for note in run.notes[:4]]
    page += [
        Labelled("Joined", how),
        Labelled("Not joined", alone),
        Labelled("Hint", [_SAME_ID] if alone and len(merged.engines) > 1 else []),
        Labelled("Clocks", _clocks(merged)),
        Labelled("Each run", verdicts),
        *bulleted("Limits", notes),
    ]
    if merged.sums.joined:
        return [*page, Command(f"kvtrace requests {where}")]
    return [*page, Command(f"kvtrace explain {where}/joined-1")] if len(merged.engines) == 1 else page


def _facts(merged: Merged) -> list[str]:
    facts = [plural(len(merged.runs), "run"), plural(len(merged.engines), "engine")]
    asked = sum(run.requests for run in merged.runs)
    inside = f" ({count(merged.sums.joined)} of them in two engines)" if merged.sums.joined else ""
    facts.append(plural(asked - merged.sums.joined, "request") + inside)
    facts += ["still running"] if any(run.running for run in merged.runs) else []
    return facts


def _headline(merged: Merged) -> str:
    sums = merged.sums
    if len(merged.engines) == 1:
        return "One engine, of which several runs hold parts: its report is that of the run made of them."
    if not sums.joined:
        return "No request of one engine could be joined with one of another."
    joined = plural(sums.joined, "joined request")
    return f"Of {plural(sums.prompt, 'prompt token')} of {joined}: {_short(sums)}."


def _short(way: Sums | Joined) -> str:
    sent = f"{count(way.sent)} sent there" + (f" ({_grades(way.sent_by)})" if way.sent else "")
    got = f"{count(way.received)} received here" + (f" ({_grades(way.received_by)})" if way.received else "")
    return f"{sent}, {got}; {count(way.again - way.last)} were sent and yet computed again"


def _way(way: Sums | Joined, title: str) -> Table:
    """The tokens' way from one engine to the other, a line a station."""
    lines = (
        ("computed there", way.computed, ""),
        ("in the prefix cache there", way.reused, "whether these were sent is not in the ledger"),
        ("sent there", way.sent, _grades(way.sent_by)),
        ("sent in part", way.partly, "by some layers or ranks only"),
        ("not observed there", way.unseen, ""),
        ("received and used here", way.received, _grades(way.received_by)),
        ("of these, not seen sent", way.unsent, "the run there does not show how"),
        ("accepted and not received", way.lost, ""),
        ("in the prefix cache here", way.local, ""),
        ("computed here", way.computed_here, ""),
        ("of these, sent there", way.again, _again(way)),
    )
    bad = {"accepted and not received"} | ({"of these, sent there"} if way.again > way.last else set())
    always = ("computed there", "sent there", "received and used here", "of these, sent there")
    rows = [
        Row((name, count(number), note), "bad" if name in bad and number else "")
        for name, number, note in lines
        if number or name in always
    ]
    return Table((Column("tokens"), Column("", True), Column()), rows, title, head=False)


def _again(way: Sums | Joined) -> str:
    """Why tokens that had been sent were computed again."""
    parts = [f"{count(number)}: {clean(why, 60)}" for why, number in way.again_by.items()]
    return "; ".join([*parts, f"{count(way.last)}: {_LAST}"] if way.last else parts)


def _grades(by: Mapping[str, int]) -> str:
    if len(by) == 1:
        return f"grade: {clean(next(iter(by)), 20)}"
    return "; ".join(f"{count(number)} {clean(grade, 20)}" for grade, number in by.items())


def _engines(merged: Merged) -> Table:
    rows = []
    for one in merged.engines:
        saved = with_grade(one.saved, one.grade)
        numbers = (count(one.requests), count(one.prompt), count(one.reused), count(one.accepted), saved)
        rows.append(Row((_engine(merged, one), clean(one.role, 20), _ranks(one), *numbers)))
    heads = ("requests", "prompt", "reused", "accepted", "saved")
    columns = (Column("engine"), Column("role"), Column("ranks"), *(Column(head, True) for head in heads))
    return Table(columns, rows, "Engines")


def _engine(merged: Merged, one: EngineOf) -> str:
    """``1 prefill``: the run's number and name; with the engine's where the run has several."""
    run = merged.runs[one.run]
    several = sum(other.run == one.run for other in merged.engines) > 1
    more = f" engine {one.tag}" if several else ""
    return f"{one.run + 1} {clean(run.name, 30)}{more}"


def _ranks(one: EngineOf) -> str:
    shown = ", ".join(map(str, one.ranks[:8])) + (", ..." if len(one.ranks) > 8 else "")
    return f"{shown} ({one.missing} missing)" if one.missing else shown


def _how(name: str) -> str:
    from kvtrace.merge.merged import HOW

    return HOW.get(name, clean(name, 40))


def _clocks(merged: Merged) -> list[str]:
    hosts = [", ".join(clean(host, 40) for host in one.hosts) or "a host" for one in merged.clocks]
    if len(hosts) < 2:
        return [f"one, of {hosts[0]}: times need no anchor" if hosts else "none"]
    off = merged.uncertainty_ns + max(one.spread_ns for one in merged.clocks)
    return [
        f"{len(hosts)}, of {'; '.join(hosts)}: put together by wall clock, ± {duration(off / 1e9)}; "
        "order between them is claimed beyond that only"
    ]


# ------------------------------------------------------------------------------- the requests


def list_text(found: List, screen: Screen) -> str:
    """The requests for a terminal: ids as far as they tell requests apart."""
    from kvtrace.render.terminal import terminal

    ids = {engine: shortest(of_engine) for engine, of_engine in found.ids.items()}
    return terminal(list_page(found, ids), screen)


def list_page(found: List, ids: Ids | None = None) -> Page:
    """The requests of a merge, one a line. `ids`: how ids are shown, whole by default."""
    from kvtrace.merge.merged import Joined

    joined = [row for row in found.rows if isinstance(row, Joined)]
    alone = [row for row in found.rows if not isinstance(row, Joined)]
    shown = f"{count(len(found.rows))} of " if len(found.rows) < found.fit else ""
    return [
        Heading("kvtrace requests", 2, quiet=True),
        Facts(
            [f"{shown}{plural(found.fit, 'request')}", f"{plural(found.merged.sums.joined, 'pair')} joined"]
        ),
        _joined_table(found.merged, joined, ids),
        _alone_table(found.merged, alone, ids),
    ]


def _joined_table(merged: Merged, joined: Sequence[Joined], ids: Ids | None) -> Table:
    rows = []
    for one in joined:
        numbers = (one.prompt, one.sent, one.received, one.computed_here, one.again - one.last)
        cells = (
            Code(_id(merged, one.there, ids)),
            Code(_id(merged, one.here, ids)),
            *map(count, numbers),
            one.how,
        )
        rows.append(Row(cells, "bad" if one.again > one.last or one.lost else ""))
    heads = ("prompt", "sent", "received", "computed", "again")
    columns = (Column("there"), Column("here"), *(Column(head, True) for head in heads), Column("by"))
    return Table(columns, rows, "Joined", brief=_MOST_ROWS)


def _alone_table(merged: Merged, alone: Sequence[Alone], ids: Ids | None) -> Table:
    rows = [
        Row((Code(_id(merged, one.alone, ids)), count(one.alone.prompt), clean(one.why))) for one in alone
    ]
    columns = (Column("request"), Column("prompt", True), Column("why"))
    return Table(columns, rows, "Not joined", brief=_MOST_ROWS)


def _id(merged: Merged, end: End, ids: Ids | None = None) -> str:
    """As ``why`` takes it."""
    return clean(merged.named(end, ids[end.engine][end.id] if ids is not None else ""), 60)


# ------------------------------------------------------------------------------ one request


def tale_page(tale: Tale) -> Page:
    """One request across its engines: what became of its tokens between them, then each engine's story."""
    page: Page = [Heading("kvtrace why", 2, quiet=True)]
    page.append(Facts([f"request {_id(tale.merged, end)}" for end in tale.ends]))
    for one in tale.joins:
        page += _join(tale.merged, one)
    if tale.alone is not None:
        page.append(
            Paragraph(f"Not joined with a request of another engine: {clean(tale.alone.why)}.", "bold")
        )
    for end, story in zip(tale.ends, tale.stories, strict=True):
        if story is not None:
            page.append(Heading(f"In {_where(tale.merged, end)}"))
            page += [part for part in story_page(story) if not isinstance(part, Heading)]
    notes = [clean(note) for note in tale.notes]
    notes += [f"{plural(tale.left_out, 'more engine')} not told"] if tale.left_out else []
    return [*page, *bulleted("Limits", notes)]


def _where(merged: Merged, end: End) -> str:
    if end.engine < 0:
        return "a run without its scheduler"
    one = merged.engines[end.engine]
    run = merged.runs[one.run]
    hosts = ", ".join(clean(host, 40) for host in run.hosts)
    role = f", {clean(one.role, 20)}" if one.role else ""
    return f"run {_engine(merged, one)}{role}" + (f", on {hosts}" if hosts else "")


def _join(merged: Merged, one: Joined) -> Page:
    """How two requests were joined, what became of the tokens, and when."""
    there, here = _where(merged, one.there), _where(merged, one.here)
    lines = [f"computed there: {there}", f"loaded here: {here}"]
    lines.append(f"joined, as {_how(one.how)} ({clean(one.key, 60)} {clean(one.value, 120)})")
    lines.append(_when(merged, one))
    if one.there.prompt != one.here.prompt:
        lines.append(
            f"the prompts differ: {plural(one.there.prompt, 'token')} there, {count(one.here.prompt)} here; "
            f"the first {count(one.prompt)} positions are compared"
        )
    sent = f"Of {plural(one.prompt, 'prompt token')}: {_short(one)}."
    if one.offered >= 0:
        lines.append(f"the connector here offered {count(one.offered)}, {count(one.accepted)} were accepted")
    return [Paragraph(sent, "bold", gap=True), Bullets(lines), _way(one, "Its tokens between the engines")]


def _when(merged: Merged, one: Joined) -> str:
    apart = duration(abs(one.after_ns) / 1e9)
    if not one.sure:
        return f"which arrived first cannot be told: {apart} apart, less than the hosts' clocks may be off"
    clocks = [merged.engines[end.engine].clock for end in (one.there, one.here)]
    order = "after" if one.after_ns >= 0 else "before"
    if clocks[0] == clocks[1]:
        return f"arrived here {apart} {order} it arrived there, on the same clock"
    off = duration((merged.uncertainty_ns + sum(merged.clocks[at].spread_ns for at in clocks)) / 1e9)
    return f"arrived here {apart} {order} it arrived there, by wall clocks that may be off by {off}"
