"""The page of ``kvtrace explain``: what a report says, in rows and sentences.

Strings of the report, which may be of unknown origin, are cleaned here: one line, no control characters.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvtrace.gate.layers import together
from kvtrace.grouped import grouped
from kvtrace.render.answers import engine_facts, outcomes
from kvtrace.render.layout import names
from kvtrace.render.listing import SPARE, requests_table
from kvtrace.render.page import (
    Badge,
    Bullets,
    Code,
    Column,
    Command,
    Facts,
    Heading,
    Labelled,
    Line,
    Page,
    Paragraph,
    Row,
    Style,
    Table,
    Terms,
    bulleted,
)
from kvtrace.terms import (
    FAULT,
    KEPT,
    LIMIT,
    LOCAL_HIT,
    NOT_OBSERVED,
    NOTE,
    SAVED,
    Grade,
    Stage,
    severity_word,
)
from kvtrace.words import clean, count, duration, of_all, percent, plural, size

if TYPE_CHECKING:
    from kvtrace.report.model import (
        EngineRow,
        EventRow,
        FindingRow,
        GraphRow,
        LedgerRow,
        LoggedRow,
        ModeRow,
        Report,
    )

MAX_KINDS = 2
"""Of engines, in a brief headline."""
MAX_REQUESTS = 5
MAX_TIMINGS = 6
MAX_LAYERS = 6

SEVERITY_STYLES: dict[str, Style] = {FAULT: "failed", LIMIT: "limit", NOTE: "note"}
_PLATFORMS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU", "tpu": "TPU"}


def report_page(
    report: Report, source: str | None = None, traced: str | None = None, whole: bool = False
) -> Page:
    """The explanation of a run, with the evidence. :mod:`kvtrace.render.brief` has the short one.

    `source` is the path that the report came from and `traced` its run directory, where that has the spools
    that ``kvtrace why`` reads: for the next command. `whole`: all that the report holds, however long.
    """
    return [
        Heading(("kvtrace: ", clean(report["run"]["name"] or "run")), 2, quiet=True),
        *(Facts(facts) for facts in headline(report)),
        Paragraph(clean(report["verdict"]), "bold", gap=True),
        *saves(report),
        *loads(report),
        *bulleted("States", state_lines(report)),
        _stages(report),
        *_findings(report, whole),
        *logged(report),
        *connectors(report),
        *_terms("Checked, and not the cause", ((one["id"], one["evidence"]) for one in report["ruled_out"])),
        *_terms("Not observed", ((one["id"], one["why"]) for one in report["not_observed"])),
        coverage(report, whole),
        *graphs(report),
        _requests(report, whole),
        *timing(report, whole),
        *device(report),
        *(hooked(report) if whole else []),
        Heading("Limits"),
        Bullets(limits(report)),
        Command(next_command(report, source, traced)),
    ]


# ------------------------------------------------------------------------------ what ran


def headline(report: Report, brief: bool = False) -> list[list[str]]:
    """What ran: two lines for engines that are alike, one of counts, one where something is amiss; a `brief`
    one says less of engines, and is of the first kinds of them."""
    engines = report["run"]["engines"]
    kinds = grouped(
        engines, lambda one: (tuple(_engine_facts(report, one, brief)), tuple(_way_facts(one, brief)))
    )
    lines: list[list[str]] = []
    for (what, way), alike in kinds[: MAX_KINDS if brief else None]:
        lines.append([*what, *([f"{len(alike)} such engines"] if len(alike) > 1 else [])])
        lines += [list(way)] if way else []
    if brief and len(kinds) > MAX_KINDS:
        lines.append([f"and {plural(len(kinds) - MAX_KINDS, 'other kind')} of engine (-v)"])
    if not engines:
        lines.append([_version(report), "no engine was seen"])
    return [*lines, *_counts(report)]


def _counts(report: Report) -> list[list[str]]:
    """How much ran and was traced; a second line where something is amiss."""
    run = report["run"]
    of_vllm = [one for one in run["processes"] if one["agent"] or one["role"] != "other"]
    line = [
        *(["still running"] if run.get("running") else []),
        plural(report["requests"]["total"], "request"),
        plural(sum(engine["real_steps"] for engine in run["engines"]), "step"),
        duration(run["seconds"]),
        f"{sum(one['agent'] for one in of_vllm)} of {plural(len(of_vllm), 'vLLM process')} traced",
    ]
    amiss = []
    if run["signal"]:
        amiss.append(f"the command was ended by {clean(run['signal'])}")
    elif run["exit_code"]:
        amiss.append(f"the command ended with exit code {run['exit_code']}")
    if unended := report["requests"].get("unended"):
        amiss.append(f"{of_all(unended, report['requests']['total'], 'request')} had not ended")
    untraced = [f"{one['name']} (pid {one['pid']})" for one in of_vllm if not one["agent"]]
    if untraced:
        amiss.append(f"not traced: {names(untraced)}")
    return [line, amiss] if amiss else [line]


def _version(report: Report) -> str:
    known = report["run"]["vllm"]
    return f"vLLM {clean(known)}" if known else "vLLM of unknown version"


def _engine_facts(report: Report, engine: EngineRow, brief: bool) -> list[str]:
    """vLLM, the connector and its role, how it is parallel; if not `brief`, its KV cache."""
    facts = [*_connector_facts(report, engine), *_parallel_facts(engine)]
    if brief:
        return facts
    facts.append(plural(engine["kv_layers"], "KV layer"))
    if groups := _groups(engine):
        facts.append(groups)
    elif engine["block_size"]:
        facts.append(f"block {engine['block_size']}")
    return facts


def _connector_facts(report: Report, engine: EngineRow) -> list[str]:
    ran, connector = _version(report), engine["connector"]
    platform = clean(engine["platform"])
    facts = [f"{ran} ({_PLATFORMS.get(platform, platform)})" if platform else ran]
    if connector is None:
        return [*facts, "no KV connector"]
    name = connector["class"] or connector["name"]
    module = clean(connector["module"])
    where = "in vLLM" if module.startswith("vllm.") else module
    if not connector["class"]:
        where = "not live"
    facts.append(f"{clean(name)} ({where})" if where else clean(name))
    return [*facts, *([clean(connector["role"])] if connector["role"] else [])]


def _parallel_facts(engine: EngineRow) -> list[str]:
    """``TP 2``; of the others those above 1."""
    sizes = (("TP", engine["tp"]), ("PP", engine["pp"]), ("DP", engine.get("dp")))
    return [f"{name} {number}" for name, number in sizes if number and (number > 1 or name == "TP")]


def _way_facts(engine: EngineRow, brief: bool) -> list[str]:
    """How attention and the connector's hooks are reached; if not `brief`, which model runner runs them."""
    runner = "" if brief else clean(engine.get("runner", ""), 20)
    return [*engine_facts(engine), *([f"runner {runner}"] if runner else [])]


_KEPT = {
    "tokens": "",
    "state": "a state a request",
    "encoder": "KV of the encoder's output",
    "none": "no KV",
}


def _groups(engine: EngineRow) -> str:
    """The KV cache groups where they are not all alike, "" where they are."""
    groups = engine.get("kv_groups", [])
    if len(groups) < 2 and all(group["keeps"] == "tokens" for group in groups):
        return ""
    said = []
    for group in groups:
        size = f"block {group['block_size']}" if group["block_size"] and group["keeps"] == "tokens" else ""
        kept = ", ".join(filter(None, (size, _KEPT[group["keeps"]])))
        said.append(f"{plural(group['layers'], 'layer')} {clean(group['kind'], 40)} ({kept})")
    return "KV cache groups: " + ", ".join(said)


# ------------------------------------------------------------------- ledgers and stages


def saves(report: Report) -> Page:
    return _ledger("Where the tokens went", report["ledger"]["saves"], "every token, each layer and rank")


def _ledger(title: str, ledger: LedgerRow, everything: str) -> Page:
    """The outcomes that any token had: what went well first, then the largest loss."""
    width = 4 if ledger.get("grades") else 3  # reports of before have no grades
    rows = []
    for name, tokens, share, grade in outcomes(ledger):
        cells = (outcome_label(name), count(tokens), percent(share), "" if name == NOT_OBSERVED else grade)
        rows.append(Row(cells[:width], "good" if name in KEPT else "bad", bar=share))
    whole = percent(1.0) if ledger["total"] else ""
    rows.append(Row((everything, count(ledger["total_tokens"]), whole, "")[:width], total=True))
    numbers = (Column("tokens", right=True), Column("share", right=True))
    columns = (Column("outcome"), *numbers, Column("grade"))[:width]
    notes = [f"{count(ledger['total'])} token-layers, totals match exactly"]
    trust, note = ledger["trust"], clean(ledger["trust_note"])
    if trust != "none":
        notes.append(note)
    said = Paragraph(" · ".join(filter(None, notes)), "dim", indent=True)
    return [Table(columns, rows, title), said]


def outcome_label(name: str) -> str:
    """``not-saved:below-save-granularity`` -> ``not saved · below-save-granularity``."""
    kind, colon, cause = name.partition(":")
    return clean(f"{kind.replace('-', ' ')} · {cause}" if colon else name, 80)


def loads(report: Report) -> Page:
    loads = report["ledger"]["loads"]
    if loads["total"] > 0:
        return _ledger("What the connector loaded", loads, "every prompt token")
    note = clean(loads["trust_note"])
    words = "Loads: no load was offered or asked for in this run" + (f" ({note})" if note else "")
    return [Paragraph(words, gap=True)]


_OF_STATES = {
    "taken": "read by the connector at the end of the prompt",
    "taken-elsewhere": "read at another position, or at one that is not known",
    "partly-taken": "read in part",
    "not-taken": "not read at the end of the prompt",
    "given": "written by the connector",
    "partly-given": "written in part",
    "not-given": "not written",
    NOT_OBSERVED: "not observed",
}


def state_lines(report: Report) -> list[str]:
    """What became of the states of Mamba and linear attention; [] of a model without any."""
    states = report["ledger"].get("states")
    if states is None:
        return []
    keep = "keeps" if states["layers"] == 1 else "keep"
    lines = [
        f"{plural(states['layers'], 'layer')} {keep} a state a request: no KV of tokens, a ledger of its own"
    ]
    for what, book in (("saves", states["saves"]), ("loads", states["loads"])):
        known = [(_OF_STATES.get(name, clean(name, 40)), n) for name, n in book["accounts"].items() if n]
        if known:
            told = ", ".join(f"{count(n)} {words}" for words, n in sorted(known, key=lambda one: -one[1]))
            lines.append(f"{what}: of {plural(book['total'], 'state')} {told}")
    if states["saves"]["accounts"].get("taken") or states["saves"]["accounts"].get("taken-elsewhere"):
        lines.append("read is not stored: where the states went was not followed")
    if states["loads"]["accounts"].get("not-given"):
        lines.append("a request that goes on from loaded KV without its state gives wrong answers")
    return lines


def _stages(report: Report) -> Table:
    """The save pipeline: tokens in and out, and what was lost at each stage."""
    rows = []
    for stage in report["stages"]:
        lost = stage["in"] - stage["out"]
        notes = [f"◀ {count(lost)} lost at this stage"] if lost > 0 else []
        notes += filter(None, [clean(stage["note"])])
        name = clean(stage["name"], 20) or Stage(stage["stage"]).label
        cells = (f"{stage['stage']} {name}", count(stage["in"]), count(stage["out"]), "; ".join(notes))
        rows.append(Row(cells, "bad" if lost > 0 else ""))
    columns = (Column("stage"), Column("in", right=True), Column("out", right=True), Column())
    return Table(columns, rows, "Save pipeline")


# ------------------------------------------------------------------------------ findings


def _findings(report: Report, whole: bool) -> Page:
    page: Page = [Heading("Findings", quiet=True)]
    for one in report["findings"]:
        page += finding(one, report["requests"]["total"], whole)
    return page if report["findings"] else [*page, Paragraph("No findings.", gap=True)]


def finding_facts(one: FindingRow, requests: int | None) -> list[str]:
    """How many tokens, and of a fault how many of the `requests` (None: not said), it concerns."""
    facts = []
    if connector := clean(one.get("connector", ""), 80):
        facts.append(f"in {connector}")
    if one["tokens"]:
        facts.append(f"{plural(one['tokens'], 'token')} ({percent(one['share'])})")
    if one["tokens"] and (grade := clean(one.get("grade") or "", 20)):
        facts.append(f"grade {grade}")
    if requests is not None and one["requests"] and one["severity"] == FAULT:
        facts.append(f"{count(one['requests'])} of {plural(max(requests, one['requests']), 'request')}")
    return facts


def finding(one: FindingRow, requests: int, whole: bool) -> Page:
    """A finding; what is no fault more briefly, unless it is `whole`."""
    cause, facts = Code(clean(one["id"], 80)), "".join(f" · {fact}" for fact in finding_facts(one, requests))
    badge, style = severity_word(one["severity"]), SEVERITY_STYLES[one["severity"]]
    evidence: list[Line] = [clean(line) for line in one["evidence"]]
    evidence += [event_words(event) for event in one["events"]]
    remedy = [clean(line) for line in one["remedy"]]
    if one["severity"] != FAULT and not whole:
        return [
            Badge(badge, (cause, facts, f": {clean(one['title'])}"), style, whole=False),
            Labelled("Evidence", evidence[:1]),
            Labelled("Remedy", remedy[:1]),
        ]
    rule = f" · rule for vLLM {clean(one['versions'])}" if one["versions"] else ""
    return [
        Badge(badge, (cause, facts), style),
        Paragraph(clean(one["title"]), indent=True),
        Labelled("Evidence", evidence),
        Labelled("Remedy", remedy),
        Labelled("More", [(Code(f"kvtrace docs {cause}"), rule)]),
    ]


def event_words(event: EventRow) -> str:
    where = [f"request {clean(event['request'], 120)}"] if event["request"] else []
    where.append(f"step {event['step']}")
    if event["rank"] is not None:
        where.append(f"rank {event['rank']}")
    if event["layer"]:
        where.append(clean(event["layer"], 120))
    return f"{', '.join(where)}: {clean(event['text'])}"


def logged_words(one: LoggedRow, logger: bool = True) -> str:
    """``wait_for_save: "the pool is full" (warning, my.store, 8 times)``."""
    times = [plural(one["count"], "time")] if one["count"] > 1 else []
    what = ", ".join([one["level"].lower(), *([clean(one["logger"])] if logger else []), *times])
    return f'{clean(one["where"])}: "{clean(one["message"])}" ({what})'


def logged(report: Report) -> Page:
    return bulleted("Logged by the connector", [*map(logged_words, report.get("logged", []))])


def connectors(report: Report) -> Page:
    """Connectors inside another one: what became of the tokens with each of them alone."""
    page: Page = []
    for one in report.get("connectors", []):
        ledger, name = one["ledger"]["saves"], clean(one["name"], 80)
        reused = f" ({LOCAL_HIT}: or loaded by another)" if ledger["tokens"].get(LOCAL_HIT) else ""
        page += _ledger(f"With {name} alone{reused}", ledger, "every token, each layer and rank")[:1]
        calls = [
            f"{clean(row['hook'], 60)} {count(row['fired'])}/{count(row['eligible'])}"
            + (f" ({count(row['with_work'])} with work)" if row["with_work"] else "")
            for row in one["coverage"]
            if row["hook"] in _SHOWN_HOOKS
        ]
        ruled = [f"{plural(len(one['ruled_out']), 'cause')} ruled out"] if one["ruled_out"] else []
        page += [
            Paragraph(clean(one["verdict"]), indent=True),
            Labelled("Hooks", [", ".join(calls)] if calls else []),
            Labelled("Findings", ["; ".join([names(one["findings"], 6) or "none", *ruled])]),
        ]
    return page


_SHOWN_HOOKS = ("start_load_kv", "save_kv_layer", "wait_for_save")
"""Those that do a connector's work."""


def _terms(title: str, rows: Iterable[tuple[str, str]]) -> Page:
    cleaned = [(clean(name, 80), clean(words)) for name, words in rows]
    return [Heading(title), Terms(cleaned)] if cleaned else []


# ------------------------------------------------------------------------------ coverage


class _CallsSeen(NamedTuple):
    """Calls of one hook or op, in one layer of one process."""

    process: str
    layer: str | None
    name: str
    eligible: int
    fired: int
    extra: tuple[tuple[int, str], ...]

    @property
    def numbers(self) -> tuple[object, ...]:
        return (self.eligible, self.fired, self.extra)


def coverage(report: Report, whole: bool) -> Table:
    """One row a hook or op where all layers and ranks saw the same, else one a group of likes."""
    seen = []
    for row in report["coverage"]["hooks"]:
        extra = ((row["with_work"], "with work"), (row["raised"], "raised"))
        seen.append(
            _CallsSeen(row["process"], row["layer"], row["hook"], row["eligible"], row["fired"], extra)
        )
    for op in report["coverage"]["ops"]:
        direct = ((op["direct"], "called directly"),)
        seen.append(_CallsSeen(op["process"], op["layer"], op["op"], op["eligible"], op["fired"], direct))
    rows: list[Row] = []
    for name, alike in grouped(seen, lambda one: one.name):
        rows += _covered(Code(clean(name, 60)), alike, len(alike) if whole else MAX_LAYERS)
    columns = (Column("hook or op"), Column("calls/due", right=True), Column(), Column("seen in"))
    return Table(columns, rows, "Coverage")


def _covered(name: Code, seen: list[_CallsSeen], most: int) -> list[Row]:
    if len({one.numbers for one in seen}) == 1:
        return [_covered_row(name, seen, True)]
    kinds: dict[tuple[object, ...], list[_CallsSeen]] = {}  # processes that saw the same in all their layers
    for _, of_process in grouped(seen, lambda one: one.process):
        kind = tuple(sorted((one.layer or "", one.numbers) for one in of_process))
        kinds.setdefault(kind, []).extend(of_process)
    rows: list[Row] = []
    for same in kinds.values():
        groups = sorted(grouped(same, lambda one: one.numbers), key=lambda group: -len(group[1]))
        rows += [_covered_row(name, alike, len(groups) == 1) for _, alike in groups[:most]]
        if rest := [one for _, alike in groups[most:] for one in alike]:
            rows.append(_covered_row(name, rest, False))
    return rows


def _covered_row(name: Code, seen: list[_CallsSeen], whole: bool) -> Row:
    """One row for `seen`; `whole` says that these are all the layers there are."""
    layers = list(dict.fromkeys(one.layer for one in seen if one.layer is not None))
    processes = names(dict.fromkeys(one.process for one in seen))
    where = f"{layers_named(layers, whole)} · {processes}" if layers else processes
    eligible, fired = sum(one.eligible for one in seen), sum(one.fired for one in seen)
    extras: dict[str, int] = {}
    for number, word in (extra for one in seen for extra in one.extra):
        extras[word] = extras.get(word, 0) + number
    words = ", ".join(f"{count(number)} {word}" for word, number in extras.items() if number)
    style: Style = "" if fired >= eligible else "bad"
    return Row((name, f"{count(fired)}/{count(eligible)}", words, where), style)


def layers_named(layers: list[str], whole: bool) -> str:
    """``4 layers`` for all of them; some: ``model.layers.{0-2,5}.self_attn.attn``."""
    if whole and len(layers) > 1:
        return plural(len(layers), "layer")
    several = together(layers) if len(layers) > 1 else ""
    return clean(several, 160) if several else names(layers, 3)


# ------------------------------------------------------------------- graphs, requests, times


def graphs(report: Report) -> Page:
    """What was asked of CUDA graphs, what was used and why; how many steps ran in each mode."""
    groups = grouped(report.get("graphs", []), lambda row: repr({**row, "process": "", "rank": 0}))
    page: Page = []
    heads = ("mode", "steps", "padding", "attention in Python", "save hooks")
    columns = [Column(head, right=at > 0) for at, head in enumerate(heads)]
    for _, rows in groups:
        page += [Heading("CUDA graphs"), Paragraph(_graph_words(rows), indent=True)]
        page += [Paragraph(clean(line), indent=True) for line in rows[0]["why"]]
        page.append(Table(columns, _mode_rows(rows[0]["modes"])))
    return page


def _graph_words(rows: list[GraphRow]) -> str:
    row = rows[0]
    parts = [names([one["process"] for one in rows])]
    if row["asked"]:
        parts.append(f"asked: {clean(row['asked'], 40)}")
    parts.append(f"used: {clean(row['used'], 40) or 'unknown'}")
    if row["runner"]:
        parts.append(f"{clean(row['runner'], 8)} model runner")
    if row["breakable"]:
        parts.append("breakable graphs: attention runs in Python between the parts")
    if row["captured"]:
        parts.append(f"{plural(row['captured'], 'graph')} captured before the first step")
    if row["capturing_steps"]:
        parts.append(f"graphs were captured in {plural(row['capturing_steps'], 'step')}")
    return " · ".join(parts)


def _mode_rows(modes: list[ModeRow]) -> list[Row]:
    total = sum(mode["steps"] for mode in modes)
    rows = []
    for mode in modes:
        padding = ""  # tokens that were run and not asked for, of those that were run
        if mode["padded"]:
            share = 1 - min(1.0, mode["tokens"] / mode["padded"])
            padding = f"{percent(share)} of {count(mode['padded'])}"
        of_layers = [f"{count(mode[key])}/{count(mode['layer_steps'])}" for key in ("bodies", "saves")]
        steps = f"{count(mode['steps'])}/{count(total)}"
        rows.append(Row((clean(mode["mode"], 20), steps, padding, *of_layers)))
    return rows


def _requests(report: Report, whole: bool) -> Table:
    """The requests that lost most; all that are listed where it is `whole`."""
    listed = report["requests"]["rows"]
    worst = listed if whole else [row for row in listed if row["not_saved"] > 0][:MAX_REQUESTS]
    return requests_table(worst, "Requests, worst first", spare=SPARE)


def timing(report: Report, whole: bool) -> Page:
    """The hooks that took most of the steps' time; all of them, with their sums, where it is `whole`."""
    rows = []
    most = len(report["timing"]) if whole else MAX_TIMINGS
    for row in sorted(report["timing"], key=lambda row: -row["total_ns"])[:most]:
        share = "" if row["share_of_steps"] is None else percent(row["share_of_steps"])
        times = _times(row["p50_ns"], row["p99_ns"], *([row["total_ns"]] * whole))
        rows.append(Row((Code(clean(row["hook"], 60)), row["clock"], count(row["count"]), *times, share)))
    heads = ("calls", "median", "p99", *(["sum"] * whole), "of the steps")
    columns = [Column("hook"), Column("clock"), *(Column(head, right=True) for head in heads)]
    files = [clean(one, 200) for one in report["run"].get("profiles", [])]
    profiles = f"py-spy profiles, for speedscope.app: {names(files)}" if files else ""
    return [Table(columns, rows, "Time in the connector"), Paragraph(profiles, indent=True)]


def _times(*nanoseconds: int) -> list[str]:
    return [duration(ns / 1e9) for ns in nanoseconds]


def device(report: Report) -> Page:
    """The calls timed on both clocks, what the device times rest on, and what taking them cost."""
    if "device" not in report:
        return []
    part = report["device"]
    notes = [f"{plural(part['calls'], 'call')} in {plural(part['steps'], 'timed step')}"]
    if part["busy_ns"]:
        notes.append(f"timing took {percent(part['own_ns'] / part['busy_ns'])} of the steps' host time")
    for number, what in ((part["untimed"], "had no event free"), (part["lost"], "could not be read")):
        if number:
            notes.append(f"{plural(number, 'call')} {what}")
    crossed = sum(row["other_stream"] for row in part["rows"])
    if crossed:
        notes.append(f"{plural(crossed, 'call')} ended on another stream than they began: no device time")
    notes.append("device time is from event to event: it includes the device's waits for the host")
    rows = []
    for row in part["rows"]:
        if row["count"]:
            medians = _times(row["host_p50_ns"], row["device_p50_ns"])
            sums = _times(row["host_total_ns"], row["device_total_ns"])
            rows.append(Row((Code(clean(row["name"], 60)), count(row["count"]), *medians, *sums)))
    heads = ("hook or op", "calls", "host median", "device median", "host sum", "device sum")
    columns = [Column(head, right=at > 0) for at, head in enumerate(heads)]
    return [Table(columns, rows, "Host and device"), Paragraph(" · ".join(notes), "dim", indent=True)]


# -------------------------------------------------------------------------------- the end


_NOT_HOOKED = (
    ("missing", "not in this vLLM"),
    ("failed", "could not be hooked"),
    ("late", "hooked too late: vLLM's attention was imported before kvtrace came"),
)


def limits(report: Report) -> list[str]:
    """What this report cannot say, and what tracing took."""
    part = report["limits"]
    out = [clean(note) for note in part["notes"]]
    for status, words in _NOT_HOOKED:
        ids = [target["id"] for target in report["instrumentation"]["targets"] if target["status"] == status]
        if ids:
            out.append(f"{plural(len(set(ids)), 'target')} {words}: {names(ids)}")
    if part["lost_records"]:
        out.append(f"{plural(part['lost_records'], 'record')} lost: what they held is missing above")
    for damage in part["damaged"][:MAX_LAYERS]:
        out.append(f"{clean(damage['spool'], 120)}: {clean(damage['detail'])}")
    if len(part["damaged"]) > MAX_LAYERS:
        out.append(f"and {len(part['damaged']) - MAX_LAYERS} more damaged spools")
    tracer = part["tracer"]
    found = report["instrumentation"]["found"]
    out.append(
        f"tracing hooked {plural(found, 'target')} and wrote {plural(tracer['records'], 'record')}, "
        f"{size(tracer['spool_bytes'])}{_recorders(report)}"
    )
    return out


def _recorders(report: Report) -> str:
    """Which recorder wrote: a call of a hook costs twice as much in Python."""
    tracer, processes = report["limits"]["tracer"], report["run"]["processes"]
    written = sum(process["records"] > 0 for process in processes)
    left = written - tracer["in_c"]
    return f"; {left} of {written} processes recorded in Python" if left > 0 else "; recorded in C"


def hooked(report: Report) -> tuple[Table, Table]:
    """The processes, and the places in vLLM that kvtrace hooks."""
    processes = [
        Row((clean(one["name"], 60), str(one["pid"]), count(one["records"]), one["end"] or "not traced"))
        for one in report["run"]["processes"]
    ]
    targets = [
        Row((Code(clean(one["id"], 60)), one["status"], count(one["processes"]), clean(one["detail"])))
        for one in report["instrumentation"]["targets"]
    ]
    of_process = (Column("process"), Column("pid", True), Column("records", True), Column("recording ends"))
    of_target = (Column("target"), Column("status"), Column("processes", True), Column())
    return Table(of_process, processes, "Processes"), Table(of_target, targets, "Hooked in vLLM")


_SIDES = ("kv_producer", "kv_consumer")
"""Roles of which one alone gives nothing back."""


def _verify(report: Report, most: int) -> str:
    """Tells whether that comes back of which no more was seen than that it was read; "" there is none."""
    kept = report["ledger"]["saves"].get("prompts", {}).get(SAVED, {})
    connector = next((one["connector"] for one in report["run"]["engines"] if one["connector"]), None)
    command = report["run"]["command"]
    if connector is None or Grade.READ.label not in kept:
        return ""
    if connector["role"] in _SIDES:
        return "kvtrace verify --prefill 'vllm serve MODEL ...' --decode 'vllm serve MODEL ...'"
    if "serve" in command:
        whole = clean(shlex.join(command), 2000)
        return f"kvtrace verify -- {whole if len(whole) <= most else 'COMMAND, as it was run here'}"
    place = f"{connector['module']}:{connector['class']}"
    return f"kvtrace verify --connector {clean(shlex.quote(place), 200)} --config '{{...}}'"


def next_command(
    report: Report, source: str | None, traced: str | None, more: str = "--format markdown", most: int = 2000
) -> str:
    """The one command that helps most from here; `more`: the option that shows more of a healthy run; `most`:
    characters of the run's own command, where it is named."""
    found = [one for one in report["findings"] if one["severity"] != NOTE]
    worst = next((event["request"] for one in found for event in one["events"] if event["request"]), None)
    if not any(one["severity"] == FAULT for one in found) and (verify := _verify(report, most)):
        return verify
    if traced and worst:
        where, request = clean(shlex.quote(traced)), clean(shlex.quote(worst), 200)
        return f"kvtrace why {where} --request {request}"
    if found:
        return f"kvtrace docs {clean(found[0]['id'], 80)}"
    where = clean(shlex.quote(source)) if source else "PATH"
    return f"kvtrace explain {where} {more}"
