"""A story, and a list of requests, for people: in a terminal, or plain in a pipe.

As with reports, every string of the trace is cleaned and never taken for markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvtrace.ledger.model import LOADED, LOCAL_HIT, NOT_OBSERVED, PENDING, SAVED
from kvtrace.render.content import account_label
from kvtrace.render.wording import clean, pad, wrap
from kvtrace.story.listing import Listing
from kvtrace.story.model import Call, Entry, Moment, Pair, Range, RankStep, Story
from kvtrace.terms import Stage
from kvtrace.words import count, duration, percent, plural, size

MAX_CHUNKS = 24
MAX_METADATA = 6
_MIN_WIDTH = 60
_TIME = 12
_WHEN = _TIME + 2 + 11
_GOOD = (SAVED, LOADED, LOCAL_HIT)
_SKIPS = {
    "NO_CONNECTOR": "no connector in this process at the op",
    "NO_ATTN_METADATA": "the op had no attention metadata",
    "NO_CONNECTOR_METADATA": "no connector metadata was bound at the op",
    "UNKNOWN": "the connector's hooks did not run around it",
}


def render_story(story: Story, console: Console) -> None:
    """Prints `story`."""
    for line in _Page(story, max(console.width, _MIN_WIDTH)).lines():
        console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


class _Page:
    def __init__(self, story: Story, width: int) -> None:
        self.story, self.width = story, width
        self.out: list[Text] = []

    def lines(self) -> list[Text]:
        story = self.story
        self.words(" · ".join(_headline(story)), style="dim", rest="  ")
        self.out.append(Text())
        self.words(_verdict(story), style="bold")
        if story.token is not None:
            self.words(_position(story))
        self.out.append(Text())
        for moment in _told(story):
            if isinstance(moment, str):
                self.moment("", "", moment, [])
            else:
                step = f"step {moment.step}" if moment.step else ""
                self.moment(_at(moment.at_ns), step, _sentence(moment), _details(story, moment))
        self.ranges()
        for note in story.notes:
            self.words(clean(note), first="Note  ")
        return self.out

    def words(self, text: str, first: str = "", rest: str | None = None, style: str = "") -> None:
        for line in wrap(text, self.width, first, rest):
            self.out.append(Text(line, style=style))

    def moment(self, at: str, step: str, sentence: str, details: Iterable[tuple[str, str]]) -> None:
        when = f"{pad(at, _TIME, True)}  {pad(step, _WHEN - _TIME - 2)}  "
        self.words(sentence, first=when, rest=" " * len(when))
        for label, text in details:
            first = " " * len(when) + "  " + (f"{label}  " if label else "")
            self.words(text, first=first, rest=" " * (len(when) + 4))

    def ranges(self) -> None:
        story = self.story
        parts = [p for p in story.ranges if story.token is None or p.start <= story.token < p.end]
        rows = [_range_row(story, part) for part in parts]
        if not rows:
            return
        self.out.append(Text())
        head = ("Where its tokens ended up", "tokens", "(layer, rank)", "outcome")
        wide = [max(cell_len(row[at]) for row in (head, *rows)) for at in range(3)]
        titles = [pad(head[0], wide[0] + 2), pad(head[1], wide[1], True), pad(head[2], wide[2], True)]
        self.out.append(Text("  ".join([*titles, head[3]]), style="bold"))
        for part, row in zip(parts, rows, strict=True):
            cells = [f"  {pad(row[0], wide[0])}", pad(row[1], wide[1], True), pad(row[2], wide[2], True)]
            first = "  ".join(cells) + "  "
            self.words(row[3], first=first, style="green" if part.account in _GOOD else "red")


def _headline(story: Story) -> list[str]:
    parts = [f"request {clean(story.id, 120)}"]
    if story.client and story.client != story.id:
        parts.append(f"client {clean(story.client, 120)}")
    parts += [f"prompt {plural(story.prompt, 'token')}", f"{count(story.output)} generated"]
    parts.append(clean(story.status, 60) if story.finished else "not finished when the trace ends")
    if story.preemptions:
        parts.append(f"preempted {plural(story.preemptions, 'time')}")
    return parts


def _verdict(story: Story) -> str:
    pairs = max(1, len(story.pairs))
    ranks = {pair.rank for pair in story.pairs}
    layers = {pair.layer for pair in story.pairs}
    parts = []
    accounts = story.accounts
    for account in sorted(accounts, key=lambda name: (name not in _GOOD, -accounts[name])):
        parts.append(f"{count(accounts[account] / pairs)} {account_label(account)}")
    where = f"{plural(len(layers), 'KV layer')} x {plural(len(ranks), 'rank')}"
    if not parts:
        return f"No token of this request ever had KV here ({where})."
    return f"Of {plural(story.computed, 'token')} in KV blocks ({where}): {'; '.join(parts)}."


def _position(story: Story) -> str:
    token = story.token or 0
    kind = f"of the prompt ({count(story.prompt)} tokens)" if token < story.prompt else "made in decode"
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
        if e.direction == "store" and _covers(e, token)
    ]
    if stores:
        how += f"; a store covers it in {', '.join(stores[:4])}"
    else:
        how += "; no store covers it"
    return f"Position {count(token)} {kind}: {how}."


def _holds(moment: Moment, token: int) -> bool:
    return moment.kind == "chunk" and moment.facts["start"] <= token < moment.facts["end"]


def _covers(entry: Entry, token: int) -> bool:
    return entry.slots > 0 and max(0, entry.start) <= token < max(0, entry.start) + entry.slots


def _told(story: Story) -> list[Moment | str]:
    """The moments to print; long rows of chunks and of decode metadata are cut, and it is said."""
    found: list[Moment | str] = []
    chunks = metadata = 0
    for moment in story.moments:
        if moment.kind == "chunk":
            if story.token is not None and not _holds(moment, story.token):
                continue
            chunks += 1
            if chunks > MAX_CHUNKS:
                continue
        elif moment.kind == "metadata":
            if story.token is not None and not any(_covers(entry, story.token) for entry in moment.entries):
                continue
            metadata += 1
            if metadata > MAX_METADATA:
                continue
        elif moment.kind == "finish":
            found += _left_out(chunks - MAX_CHUNKS, "chunk") + _left_out(metadata - MAX_METADATA, "step")
            chunks = metadata = 0
            found += _decode(story, moment)
        found.append(moment)
    return found + _left_out(chunks - MAX_CHUNKS, "chunk") + _left_out(metadata - MAX_METADATA, "step")


def _left_out(number: int, noun: str) -> list[Moment | str]:
    what = "more " + (f"{noun}s" if number != 1 else noun)
    why = " with metadata for this request" if noun == "step" else ""
    return [f"{count(number)} {what}{why}: --format json tells them all"] if number > 0 else []


def _decode(story: Story, finish: Moment) -> list[Moment | str]:
    made = finish.facts["computed"] - story.prompt
    if made <= 0 or story.token is not None:
        return []
    past = [
        e
        for m in story.moments
        for e in m.entries
        if e.direction == "store" and e.start + e.slots > story.prompt
    ]
    stores = (
        f"{plural(len(past), 'store entry')} reach past the prompt"
        if past
        else "no store entry reaches past the prompt"
    )
    return [f"decode: KV for {plural(made, 'more token')}; {stores.replace('entrys', 'entries')}"]


def _at(ns: int) -> str:
    sign = "-" if ns < 0 else "+"
    return sign + (duration(abs(ns) / 1e9) if ns else "0 s")


def _sentence(moment: Moment) -> str:
    f = moment.facts
    if moment.kind == "arrival":
        limit = f", at most {count(f['max_tokens'])} to generate" if f["max_tokens"] > 0 else ""
        return f"arrived: {plural(f['prompt'], 'prompt token')}{limit}"
    if moment.kind == "lookup":
        here = f"{plural(f['local'], 'token')} in the GPU's prefix cache"
        if f["external"] is None:
            return f"lookup: {here}; the connector asked to wait"
        how = ", to be loaded asynchronously" if f["asynchronous"] and f["external"] > 0 else ""
        return f"lookup: {here}, {plural(f['external'], 'token')} offered by the connector{how}"
    if moment.kind == "allocation":
        blocks = f", {plural(f['blocks'], 'block')}" if f["blocks"] >= 0 else ""
        return f"allocated: {plural(f['external'], 'token')} accepted from the connector{blocks}"
    if moment.kind == "chunk":
        again = ", resumed after a preemption" if f["resumed"] else ""
        where = _positions(f["start"], f["end"])
        return f"chunk {f['number']} of {f['of']}: {plural(f['end'] - f['start'], 'token')}, {where}{again}"
    if moment.kind == "metadata":
        return "in the step's metadata, without a prefill chunk"
    if moment.kind == "preempted":
        return f"preempted, with KV for {plural(f['computed'], 'token')}"
    if moment.kind == "transfer-opened":
        return f"an asynchronous {f['direction']} began: its blocks are kept"
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
    found = [("metadata", text) for text in _entries(moment.entries)]
    if story.layer is not None:
        for rank in moment.ranks:
            found.extend(_layer_calls(rank, story.layer))
        return found
    groups: dict[str, list[RankStep]] = {}
    for rank in moment.ranks:
        groups.setdefault(" · ".join(_rank_parts(rank, story.pairs)), []).append(rank)
    for text, alike in groups.items():
        spans = [rank.total_ns for rank in alike if rank.state != "not-recorded"]
        took = f" · {duration(max(spans) / 1e9)}" if spans else ""
        found.append((_ranks(rank.rank for rank in alike), text + took))
    return found


def _positions(start: int, end: int) -> str:
    return f"position {count(start)}" if end - start == 1 else f"positions {count(start)} to {count(end - 1)}"


def _entries(entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return ["no entry for this request"]
    found = []
    for entry in entries:
        slots = "a number of slots that it does not say" if entry.slots < 0 else plural(entry.slots, "slot")
        parts = [f"a {entry.direction} of {slots}"]
        if entry.slots > 0 and entry.start >= 0:
            parts.append(_positions(entry.start, entry.start + entry.slots))
        if entry.asynchronous:
            parts.append("asynchronous")
        named = "" if entry.declared else "no entry for this request; measured on the workers: "
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
    grouped: dict[tuple[str, str], list[Call]] = {}
    for call in rank.calls:
        grouped.setdefault((call.kind, call.name), []).append(call)
    bodies = 0
    for (kind, name), calls in grouped.items():
        if kind == "op" and all(call.skip == "NOT_A_HOOK_SITE" for call in calls):
            continue  # the KV-cache update: vLLM never calls the connector there
        if kind == "op":
            bodies += 1
        elif name in (
            "bind_connector_metadata",
            "clear_connector_metadata",
            "handle_preemptions",
            "get_finished",
        ):
            if not any(call.raised for call in calls):
                continue
        elif not name.startswith(("start_load", "wait_for", "save_kv")):
            continue
        parts.append(_group(name, calls, names))
    if not bodies and rank.state == "ran":
        parts.append("no attention op body ran")
    return parts


def _group(name: str, calls: Sequence[Call], names: Sequence[str]) -> str:
    layered = [call for call in calls if call.layer]
    text = name
    if layered:
        seen = {call.layer for call in layered}
        text += f" {len(seen)}/{len(names)} layers" if names else f" {plural(len(seen), 'layer')}"
        missing = [layer for layer in names if layer not in seen]
        if missing and len(missing) <= 2:
            text += f" (not {', '.join(clean(layer, 80) for layer in missing)})"
    notes = []
    skips = {call.skip for call in calls if call.kind == "op"} - {"HOOKED"}
    notes += [_SKIPS.get(skip, clean(skip, 40)) for skip in sorted(skips)]
    if any(call.direct for call in calls):
        notes.append("called directly")
    slots = max(call.slots for call in calls)
    if slots > 0:
        notes.append(f"{plural(slots, 'slot')} in the whole step's metadata")
    notes += _measured(calls)
    raised = sum(1 for call in calls if call.raised)
    if raised:
        notes.append(f"raised in {raised}" if layered else "raised")
    if any(call.no_metadata for call in calls):
        notes.append("while no metadata was bound")
    return f"{text} ({'; '.join(notes)})" if notes else text


def _measured(calls: Sequence[Call]) -> list[str]:
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
            parts.append("collapsed past the spool's size limit")
        else:
            parts.append(duration(call.total_ns / 1e9))
        if call.calls > 1 and not call.summed:
            parts.append(f"{count(call.calls)} times")
        if call.tokens >= 0:
            parts.append(plural(call.tokens, "row"))
        if call.kind == "op" and call.skip in _SKIPS:
            parts.append(_SKIPS[call.skip])
        if call.direct:
            parts.append("called directly")
        if call.slots >= 0:
            parts.append(f"{plural(call.slots, 'slot')} in the whole step's metadata")
        parts += _measured([call])
        if call.raised:
            parts.append("raised")
        if call.no_metadata:
            parts.append("no metadata bound")
        found.append((label, " · ".join(parts)))
    return found or [(label, "no op body and no hook of this layer")]


def _ranks(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(str(rank) for rank in dict.fromkeys(ranks))


def _range_row(story: Story, part: Range) -> tuple[str, str, str, str]:
    last = part.end - 1
    where = count(part.start) if last == part.start else f"{count(part.start)} to {count(last)}"
    account = account_label(part.account)
    if part.stage is not None:
        account += f" (stage {part.stage} {Stage(part.stage).label})"
    if part.account == PENDING:
        account += " (in flight when the trace ends)"
    elif part.account == NOT_OBSERVED:
        account += " (nothing recorded says)"
    if len(part.pairs) < len(story.pairs):
        account += f" · {_pairs(story, part.pairs)}"
    return (where, count(part.end - part.start), f"{len(part.pairs)}/{len(story.pairs)}", account)


def _pairs(story: Story, members: Sequence[int]) -> str:
    """Which pairs: whole ranks by number, else layers by rank."""
    by_rank: dict[int, list[str]] = {}
    for index in members:
        by_rank.setdefault(story.pairs[index].rank, []).append(story.pairs[index].layer)
    whole = {rank: sum(1 for pair in story.pairs if pair.rank == rank) for rank in by_rank}
    parts = []
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, layers in by_rank.items():
        groups.setdefault(() if len(layers) == whole[rank] else tuple(layers), []).append(rank)
    for layers_of, ranks in groups.items():
        text = _ranks(ranks)
        if layers_of:
            shown = ", ".join(clean(layer, 80) for layer in layers_of[:3])
            text += f": {shown}" + (f" and {len(layers_of) - 3} more layers" if len(layers_of) > 3 else "")
        parts.append(text)
    return "; ".join(parts)


# ------------------------------------------------------------------------------ the list


def render_listing(listing: Listing, console: Console) -> None:
    """Prints the requests, one a line."""
    for line in _listing_lines(listing, max(console.width, _MIN_WIDTH)):
        console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _listing_lines(listing: Listing, width: int) -> list[Text]:
    out = [Text(line, style="dim") for line in wrap(_summary(listing), width, "", "  ")]
    head = (
        "request",
        "client",
        "prompt",
        "made",
        "chunks",
        "reused",
        "accepted",
        "saved",
        "not saved",
        "verdict",
    )
    table = [head]
    for row in listing.rows:
        lost = row["not_saved"]
        whole = lost + row["saved"]
        share = f" {percent(lost / whole)}" if whole else ""
        client = row["client"] or ""
        table.append(
            (
                clean(row["id"], 60), "" if client == row["id"] else clean(client, 40), count(row["prompt"]),
                count(row["output"]), count(row["chunks"]), count(row["local"]), count(row["external"]),
                count(row["saved"]), f"{count(lost)}{pad(share, 8, True)}", clean(row["verdict"], 60),
            )
        )  # fmt: skip
    keep = [
        at for at in range(len(head)) if len(table) == 1 or any(row[at] not in ("", "0") for row in table[1:])
    ]
    wide = {at: max(cell_len(row[at]) for row in table) for at in keep}
    if listing.rows:
        out.append(Text())
        for number, line in enumerate(table):
            cells = [pad(line[at], wide[at], 2 <= at <= 8) for at in keep]
            out.append(Text("  ".join(cells).rstrip(), style="bold" if number == 0 else ""))
    return out


def _summary(listing: Listing) -> str:
    shown, fit, total = len(listing.rows), listing.fit, listing.total
    parts = [f"{count(shown)} of {plural(fit, 'request')}" if shown < fit else plural(fit, "request")]
    if listing.verdict is not None:
        parts[0] += f" with verdict {clean(listing.verdict, 80)}, of {count(total)}"
    if listing.known < total:
        parts.append(
            f"the report lists {count(listing.known)} of {count(total)}: give the run directory for all"
        )
    if fit == 0 and listing.verdicts:
        there = ", ".join(f"{clean(name, 80)} ({count(n)})" for name, n in listing.verdicts.items())
        parts.append(f"there are: {there}")
    return " · ".join(parts)
