"""The page of ``kvtrace why``: one request's story.

Strings of the trace are cleaned here: one line, no control characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvtrace.grouped import grouped
from kvtrace.render.layout import names as names_of
from kvtrace.render.listing import left_to_save, with_grade
from kvtrace.render.page import (
    Column,
    Facts,
    Heading,
    Page,
    Paragraph,
    Row,
    Table,
    Timeline,
    TimelineRow,
    bulleted,
)
from kvtrace.render.report import layers_named, outcome_label
from kvtrace.story.story import Entry, HookCalls, Moment, Pair, Range, RankStep, Story
from kvtrace.terms import KEPT, NOT_OBSERVED, PENDING, Stage
from kvtrace.trace import hooks
from kvtrace.words import clean, count, duration, peer, plural, size

if TYPE_CHECKING:  # the command line imports this file, and shall not load what reads reports
    from kvtrace.story.summary import Summary

_COPYING = {hook.name for hook in hooks.COPYING}
_QUIET = {
    hook.name for hook in (hooks.BIND_METADATA, hooks.CLEAR_METADATA, hooks.PREEMPTIONS, hooks.GET_FINISHED)
}
"""Hooks of every step that are worth a word only where they raised."""

_MOST = {"chunk": 24, "metadata": 6}
"""Moments of a kind that are shown."""
_UNFINISHED = "not finished when the trace ends"
_SKIPS = {
    "NO_CONNECTOR": "no connector in this process at the op",
    "NO_ATTN_METADATA": "the op had no attention metadata",
    "NO_CONNECTOR_METADATA": "no connector metadata was bound at the op",
    "UNKNOWN": "the connector's hooks did not run around it",
}


def story_page(story: Story) -> Page:
    """What happened to one request, in order, and where its tokens ended up."""
    return [
        Heading("kvtrace why", 2, quiet=True),
        Facts(_headline(story)),
        Paragraph(_verdict(story), "bold", gap=True),
        Paragraph("" if story.token is None else _position(story, story.token)),
        Timeline(_timeline(story)),
        _ranges(story),
        *bulleted("What its loads brought", [clean(line) for line in story.loaded]),
        *bulleted("Limits", [clean(note) for note in story.notes]),
    ]


def summary_page(summary: Summary) -> Page:
    """One request, as far as a report goes."""
    row = summary.row
    status = clean(row["status"], 60) or _UNFINISHED
    lines = [
        f"step {one['step']}: {clean(one['text'])} · {clean(one['finding'], 60)}: {clean(one['title'])}"
        for one in summary.events
    ]
    note = "its chunks, hooks and positions are not in a report: give the run directory for them"
    return [
        Heading("kvtrace why", 2, quiet=True),
        Facts(_facts(row["id"], row["client"], row["prompt"], row["output"], status)),
        Paragraph(_sums(summary), "bold", gap=True),
        *bulleted("Findings that name it", lines),
        *bulleted("What to do", [clean(line) for line in summary.remedy]),
        *bulleted("Limits", [note]),
    ]


def _sums(summary: Summary) -> str:
    row = summary.row
    chunks = f", computed in {plural(row['chunks'], 'chunk')}" if row["chunks"] else ""
    saved = with_grade(row["saved"], row.get("grade"), row.get("sent", 0))
    parts = [
        f"{saved} of {count(left_to_save(row))} tokens that were left to save were saved",
        *([f"{count(row['not_saved'])} not saved"] if row["not_saved"] else []),
        *([f"{count(row['not_observed'])} not observed"] if row.get("not_observed") else []),
        *([f"{count(row['local'])} prompt tokens reused"] if row["local"] else []),
        *([f"{count(row['external'])} accepted from the connector"] if row["external"] else []),
    ]
    return f"{clean(row['verdict'], 60)}{chunks}: {'; '.join(parts)}."


def _ranges(story: Story) -> Table:
    rows = []
    for part in story.ranges:
        if story.token is None or part.start <= story.token < part.end:
            rows.append(Row(_range_row(story, part), "good" if part.account in KEPT else "bad"))
    columns = (Column("positions"), Column("tokens", True), Column("(layer, rank)", True), Column("outcome"))
    return Table(columns, rows, "Where its tokens ended up")


def _headline(story: Story) -> list[str]:
    status = clean(story.status, 60) if story.finished else _UNFINISHED
    facts = _facts(story.id, story.client, story.prompt, story.output, status)
    return [*facts, *([f"preempted {plural(story.preemptions, 'time')}"] if story.preemptions else [])]


def _facts(ident: str, client: str | None, prompt: int, output: int, status: str) -> list[str]:
    who = [f"client {clean(client, 120)}"] if client and client != ident else []
    made = [f"prompt {plural(prompt, 'token')}", f"{count(output)} generated"]
    return [f"request {clean(ident, 120)}", *who, *made, status]


def _verdict(story: Story) -> str:
    pairs = max(1, len(story.pairs))
    ranks = {pair.rank for pair in story.pairs}
    layers = {pair.layer for pair in story.pairs}
    parts = []
    accounts = story.accounts
    for account in sorted(accounts, key=lambda name: (name not in KEPT, -accounts[name])):
        tokens = story.tokens(account)
        some = "" if accounts[account] == tokens * pairs else " in a part of the layers"
        parts.append(f"{count(tokens)} {outcome_label(account)}{some}")
    where = f"{plural(len(layers), 'KV layer')} x {plural(len(ranks), 'rank')}"
    if not parts:
        return f"No token of this request ever had KV here ({where})."
    return f"Of {plural(story.computed, 'token')} in KV blocks ({where}): {'; '.join(parts)}."


def _position(story: Story, token: int) -> str:
    kind = f"of the prompt ({count(story.prompt)} tokens)" if token < story.prompt else "computed in decode"
    chunk = next((m for m in story.moments if _holds(m, token)), None)
    if chunk is not None:
        how = f"computed in chunk {chunk.facts['number']} of {chunk.facts['of']}, step {chunk.step}"
    elif token >= story.prompt:
        how = "computed in a decode step (these are not recorded by request)"
    else:
        how = "not computed in this run's records: reused, or left to the connector to load"
    stores = [
        f"step {m.step}"
        for m in story.moments
        for e in m.entries
        if e.direction == "store" and _covers(e, token, story.prompt)
    ]
    if stores:
        how += f"; a store covers it in {', '.join(stores[:4])}"
    else:
        how += "; no store covers it"
    return f"Position {count(token)} {kind}: {how}."


def _holds(moment: Moment, token: int) -> bool:
    return moment.kind == "chunk" and moment.facts["start"] <= token < moment.facts["end"]


def _covers(entry: Entry, token: int, prompt: int) -> bool:
    return max(0, entry.start) <= token < entry.end(prompt)


def _timeline(story: Story) -> list[TimelineRow]:
    """What happened; long rows of chunks and of decode metadata are cut, and it says so."""
    rows: list[TimelineRow] = []
    shown = {"chunk": 0, "metadata": 0}
    for moment, alike in _each_once(story.moments):
        if moment.kind in shown:
            if story.token is not None and not _concerns(moment, story.token, story.prompt):
                continue
            shown[moment.kind] += 1
            if shown[moment.kind] > _MOST[moment.kind]:
                continue
        elif moment.kind == "finish":
            rows += _left_out(shown)
            rows += _decode(story, moment)
        step = f"step {moment.step}" if moment.step else ""
        again = f", {plural(len(alike), 'time')} up to step {alike[-1].step}" if len(alike) > 1 else ""
        rows.append(TimelineRow(_at(moment.at_ns), step, _sentence(moment) + again, _details(story, moment)))
    return rows + _left_out(shown)


def _each_once(moments: Iterable[Moment]) -> Iterator[tuple[Moment, list[Moment]]]:
    """The moments, with those that are alike and follow: a request that waits is looked up in every step."""
    for (kind, _), group in groupby(moments, key=lambda one: (one.kind, _sentence(one))):
        alike = list(group)
        yield from [(alike[0], alike)] if kind == "lookup" else ((one, [one]) for one in alike)


def _concerns(moment: Moment, token: int, prompt: int) -> bool:
    if moment.kind == "chunk":
        return _holds(moment, token)
    return any(_covers(entry, token, prompt) for entry in moment.entries)


def _left_out(shown: dict[str, int]) -> list[TimelineRow]:
    """Lines for what was cut; the counts begin anew."""
    rows = []
    for kind, noun, words in (
        ("chunk", "more chunk", ""),
        ("metadata", "more step", " with metadata for this request"),
    ):
        number = shown[kind] - _MOST[kind]
        if number > 0:
            what = plural(number, noun) + words
            rows.append(TimelineRow("", "", f"{what}: --format json has them all"))
        shown[kind] = 0
    return rows


def _decode(story: Story, finish: Moment) -> list[TimelineRow]:
    made = finish.facts["computed"] - story.prompt
    if made <= 0 or story.token is not None:
        return []
    entries = (entry for moment in story.moments for entry in moment.entries)
    past = sum(one.direction == "store" and one.end(story.prompt) > story.prompt for one in entries)
    stores = f"{count(past)} store {'entry reaches' if past == 1 else 'entries reach'} past the prompt"
    if not past:
        stores = "no store entry reaches past the prompt"
    return [TimelineRow("", "", f"decode: KV for {plural(made, 'more token')}; {stores}")]


def _at(ns: int) -> str:
    sign = "-" if ns < 0 else "+"
    return sign + (duration(abs(ns) / 1e9) if ns else "0 s")


def _sentence(moment: Moment) -> str:
    f = moment.facts
    if moment.kind == "arrival":
        limit = f", at most {count(f['max_tokens'])} to generate" if f["max_tokens"] > 0 else ""
        return f"arrived: {plural(f['prompt'], 'prompt token')}{limit}"
    if moment.kind == "grown":
        there = plural(f["start"], "token")
        return f"the next part came: {plural(f['prompt'], 'prompt token')} now, KV for {there} was there"
    if moment.kind == "lookup":
        here = f"{plural(f['local'], 'token')} in the GPU's prefix cache"
        if f["external"] is None:
            return f"lookup: {here}; the connector asked to wait"
        how = ", to be loaded asynchronously" if f["asynchronous"] and f["external"] > 0 else ""
        return f"lookup: {here}, {plural(f['external'], 'token')} offered by the connector{how}"
    if moment.kind == "allocation":
        return f"allocated: {plural(f['external'], 'token')} accepted from the connector"
    if moment.kind == "chunk":
        again = ", resumed after a preemption" if f["resumed"] else ""
        where = _positions(f["start"], f["end"])
        return f"chunk {f['number']} of {f['of']}: {plural(f['end'] - f['start'], 'token')}, {where}{again}"
    if moment.kind == "metadata":
        return "in the step's metadata, without a prefill chunk"
    if moment.kind == "preempted":
        return f"preempted, with KV for {plural(f['computed'], 'token')}"
    if moment.kind == "transfer-opened":
        return f"its blocks are kept for an asynchronous {f['direction']}"
    if moment.kind == "transfer-done":
        end = "failed" if f["failed"] else "finished"
        return f"asynchronous {f['direction']} {end} (reported by a {f['side']})"
    if moment.kind == "trouble":
        parts = [clean(f[key], 200) for key in ("hook", "layer") if f[key]]
        what = ": ".join(clean(f[key], 300) for key in ("type", "message") if f[key])
        where = f" ({clean(f['where'], 200)})" if f["where"] else ""
        return f"{f['how']} in {' of '.join(parts) or 'the connector'}: {what}{where}"
    status = clean(f["status"], 60) or "no status"
    made = plural(f["output"], "token")
    return f"finished: {status}, {made} generated, KV for {plural(f['computed'], 'position')}"


# ------------------------------------------------------------------------------ a step's details


def _details(story: Story, moment: Moment) -> list[tuple[str, str]]:
    if moment.kind not in ("chunk", "metadata"):
        return []
    found = [("metadata", text) for text in _entries(moment.entries, story)]
    if story.layer is not None:
        for rank in moment.ranks:
            found.extend(_layer_calls(rank, story.layer))
        return found
    for text, alike in grouped(moment.ranks, lambda rank: " · ".join(_rank_parts(rank, story.pairs))):
        spans = [rank.total_ns for rank in alike if rank.state != "not-recorded"]
        took = f" · {duration(max(spans) / 1e9)}" if spans else ""
        found.append((_ranks(rank.rank for rank in alike), text + took))
    return found


def _positions(start: int, end: int) -> str:
    return f"position {count(start)}" if end - start == 1 else f"positions {count(start)} to {count(end - 1)}"


def _entries(entries: Sequence[Entry], story: Story) -> list[str]:
    if not entries:
        return ["no entry known to be for this request"]
    found = []
    for entry in entries:
        slots = "an unknown number of slots" if entry.slots < 0 else plural(entry.slots, "slot")
        parts = [f"a {entry.direction} of {slots}"]
        if 0 <= entry.start < entry.end(story.prompt):
            parts.append(_positions(entry.start, entry.end(story.prompt)))
        if entry.asynchronous:
            parts.append("asynchronous")
        named = "" if entry.declared else "no slots known to be for this request; measured on the workers: "
        found.append(named + ", ".join(parts))
    return found


def _rank_parts(rank: RankStep, pairs: Sequence[Pair]) -> list[str]:
    if rank.state == "not-recorded":
        return ["no record of this step"]
    names = [pair.layer for pair in pairs if pair.rank == rank.rank]
    held = not any(c.skip == "NO_CONNECTOR_METADATA" or (c.no_metadata and c.layer) for c in rank.calls)
    parts = ["no metadata bound"]
    if rank.bound:
        parts = ["metadata bound" if held else "bind_connector_metadata ran, but no metadata was held"]
    if rank.mode and rank.mode != "NONE":
        parts.append(f"CUDA graph {rank.mode}")
    if rank.state == "no-forward":
        parts.append("no forward")
    bodies = 0
    for (kind, name), calls in grouped(rank.calls, lambda call: (call.kind, call.name)):
        if kind == "op" and all(call.skip == "NOT_A_HOOK_SITE" for call in calls):
            continue  # the KV-cache update: vLLM never calls the connector there
        if kind == "op":
            bodies += 1
        elif name not in _COPYING and not (name in _QUIET and any(call.raised for call in calls)):
            continue
        parts.append(_group(name, calls, names))
    if not bodies and rank.state == "ran":
        parts.append("no attention op ran in Python")
    return parts


def _group(name: str, calls: Sequence[HookCalls], names: Sequence[str]) -> str:
    layered = [call for call in calls if call.layer]
    text = name
    if layered:
        seen = {call.layer for call in layered}
        text += f" {len(seen)}/{len(names)} layers" if names else f" {plural(len(seen), 'layer')}"
        missing = [layer for layer in names if layer not in seen]
        if missing and len(missing) <= 2:
            text += f" (not {names_of(missing)})"
    notes = _notes(calls)
    return f"{text} ({'; '.join(notes)})" if notes else text


def _notes(calls: Sequence[HookCalls]) -> list[str]:
    """What there is to say of calls beside their number."""
    skips = {call.skip for call in calls if call.kind == "op"} - {"HOOKED", "NOT_A_HOOK_SITE"}
    notes = [_SKIPS.get(skip, clean(skip, 40)) for skip in sorted(skips)]
    if any(call.direct for call in calls):
        notes.append("called directly")
    slots = max(call.slots for call in calls)
    if slots > 0:
        notes.append(f"{plural(slots, 'slot')} in the whole step's metadata")
    notes += _measured(calls)
    raised = sum(call.raised for call in calls)
    if raised:
        notes.append(f"raised in {raised}" if len(calls) > 1 else "raised")
    if any(call.no_metadata for call in calls):
        notes.append("while no metadata was bound")
    return notes


def _measured(calls: Sequence[HookCalls]) -> list[str]:
    parts = []
    slots = [call.measured_slots for call in calls if call.measured_slots >= 0]
    if slots:
        low, high = min(slots), max(slots)
        parts.append(f"{count(low)} to {count(high)} slots" if low != high else plural(high, "slot"))
    files = sum(call.measured_files for call in calls if call.measured_files > 0)
    written = sum(call.measured_bytes for call in calls if call.measured_bytes > 0)
    if files:
        parts.append(f"{plural(files, 'file')}, {size(written)}")
    return [f"measured: {', '.join(parts)}"] if parts else []


def _layer_calls(rank: RankStep, layer: str) -> list[tuple[str, str]]:
    """One line a call of this layer."""
    label = _ranks([rank.rank])
    if rank.state == "not-recorded":
        return [(label, "no record of this step")]
    found = []
    for call in rank.calls:
        if call.layer != layer:
            continue
        parts = [_at(call.at_ns), call.name]
        if call.summed:
            parts.append("kept as a sum: the spool had reached its size limit")
        else:
            parts.append(duration(call.total_ns / 1e9))
        if call.calls > 1 and not call.summed:
            parts.append(f"{count(call.calls)} times")
        parts += _notes([call])
        found.append((label, " · ".join(parts)))
    return found or [(label, "no op and no hook of this layer ran")]


def _ranks(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(str(rank) for rank in dict.fromkeys(ranks))


def _range_row(story: Story, part: Range) -> tuple[str, str, str, str]:
    last = part.end - 1
    where = count(part.start) if last == part.start else f"{count(part.start)} to {count(last)}"
    account = outcome_label(part.account)
    if part.stage is not None:
        account += f" (stage {part.stage} {Stage(part.stage).label})"
    if part.account == PENDING:
        account += " (in flight when the trace ends)"
    elif part.account == NOT_OBSERVED:
        account += " (not seen)"
    elif part.grade:
        account += f" · {clean(part.grade, 20)}"
        if part.sent_to:
            account += f", sent to {clean(peer(part.sent_to), 80)}, what it keeps was not seen"
    if len(part.pairs) < len(story.pairs):
        account += f" · {_pairs(story, part.pairs)}"
    return (where, count(part.end - part.start), f"{len(part.pairs)}/{len(story.pairs)}", account)


def _pairs(story: Story, members: Sequence[int]) -> str:
    """Which pairs: whole ranks by number, else layers by rank."""
    whole = Counter(pair.rank for pair in story.pairs)
    of_rank = {
        rank: () if len(pairs) == whole[rank] else tuple(pair.layer for pair in pairs)
        for rank, pairs in grouped((story.pairs[index] for index in members), lambda pair: pair.rank)
    }
    parts = []
    for layers, ranks in grouped(of_rank, lambda rank: of_rank[rank]):
        text = _ranks(ranks)
        if layers:
            text += f": {layers_named(list(layers), False)}"
        parts.append(text)
    return "; ".join(parts)
