"""What a report says, as plain rows and sentences; how they look is the renderers' business.

Strings here are made from a report of unknown origin: all of them are clean (one line, no
control characters), none is escaped for a markup language yet.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from kvtrace.render.wording import clean, names
from kvtrace.report.model import Engine, Event, Finding, GraphRow, Ledger, ModeRow, Report
from kvtrace.words import count, duration, percent, plural, size

MAX_REQUESTS = 5
MAX_TIMINGS = 6
MAX_LAYERS = 6

_FIRST = ("saved", "loaded", "local-hit", "pending", "not-observed")
_STAGE_NAMES = ("wiring", "schedule", "bind", "forward", "hook", "effect", "completion")
_PLATFORMS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU", "tpu": "TPU"}
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


def headline(report: Report) -> list[str]:
    """What ran: one line an engine kind, one line of counts, one where something is amiss."""
    run = report["run"]
    engines = run["engines"]
    version = f"vLLM {clean(run['vllm'])}" if run["vllm"] else "vLLM of unknown version"
    lines = []
    for line, alike in _grouped(engines, _engine_line):
        lines.append(f"{version}{line}" + (f" · {len(alike)} such engines" if len(alike) > 1 else ""))
    if not engines:
        lines.append(f"{version} · no engine was seen")
    traced = [process["name"] for process in run["processes"] if process["agent"]]
    counts = [
        plural(report["requests"]["total"], "request"),
        plural(sum(engine["real_steps"] for engine in engines), "step"),
        duration(run["seconds"]),
        f"traced: {names(traced) or 'nothing'}",
    ]
    lines.append(" · ".join(counts))
    amiss = []
    if run["signal"]:
        amiss.append(f"the command was ended by {clean(run['signal'])}")
    elif run["exit_code"]:
        amiss.append(f"the command ended with exit code {run['exit_code']}")
    untraced = [
        f"{process['name']} (pid {process['pid']})"
        for process in run["processes"]
        if not process["agent"] and process["role"] != "other"
    ]
    if untraced:
        amiss.append(f"not traced: {names(untraced)}")
    return [*lines, " · ".join(amiss)] if amiss else lines


def _engine_line(engine: Engine) -> str:
    connector = engine["connector"]
    platform = clean(engine["platform"])
    parts = [f" ({_PLATFORMS.get(platform, platform)})" if platform else ""]  # goes on after the version
    if connector is None:
        parts.append("no KV connector")
    else:
        name = connector["class"] or connector["name"]
        module = clean(connector["module"])
        where = "built into vLLM" if module.startswith("vllm.") else module
        if not connector["class"]:
            where = "not live"
        parts.append(f"{clean(name)} ({where})" if where else clean(name))
        if connector["role"]:
            parts.append(clean(connector["role"]))
    if engine["tp"]:
        parts.append(f"TP {engine['tp']}")
    if (engine["pp"] or 1) > 1:
        parts.append(f"PP {engine['pp']}")
    parts.append(plural(engine["kv_layers"], "KV layer"))
    if engine["block_size"]:
        parts.append(f"block {engine['block_size']}")
    if engine["prefix_caching"] is not None:
        parts.append(f"prefix caching {'on' if engine['prefix_caching'] else 'off'}")
    return " · ".join(parts)


@dataclass(frozen=True)
class Account:
    """One line of a book; tokens and share of all tokens (0..1)."""

    label: str
    tokens: float
    share: float
    good: bool


def accounts(book: Ledger) -> list[Account]:
    """The lines of a book that are not empty: what went well first, then the largest loss."""
    total = book["total_tokens"] or 0.0

    def of(name: str) -> Account:
        layers = book["accounts"][name]
        tokens = book["tokens"].get(name, layers / (book["pairs"] or 1))
        share = tokens / total if total else (layers / book["total"] if book["total"] else 0.0)
        return Account(account_label(name), tokens, min(share, 1.0), name in _FIRST[:3])

    def key(name: str) -> tuple[int, int, str]:
        return (_FIRST.index(name) if name in _FIRST else len(_FIRST), -book["accounts"][name], name)

    return [of(name) for name in sorted(book["accounts"], key=key) if book["accounts"][name]]


def account_label(name: str) -> str:
    """``not-saved:below-save-granularity`` -> ``not saved · below-save-granularity``."""
    kind, colon, cause = name.partition(":")
    return clean(f"{kind.replace('-', ' ')} · {cause}" if colon else name, 80)


def book_note(book: Ledger) -> str:
    """How the books are kept and what they rest on."""
    parts = [f"{count(book['total'])} token-layers, booked to the unit"]
    trust, note = book["trust"], clean(book["trust_note"])
    if trust != "none":
        parts.append(note if note.startswith(trust) else f"{trust}: {note}" if note else trust)
    return " · ".join(parts)


def no_loads(report: Report) -> str:
    """The line that stands for an empty loads ledger."""
    note = clean(report["ledger"]["loads"]["trust_note"])
    return "Loads: no load was offered or asked for in this run" + (f" ({note})" if note else "")


@dataclass(frozen=True)
class StageRow:
    """One stage of the save pipeline; tokens in and out."""

    name: str
    came: str
    went: str
    note: str
    loss: bool


def stages(report: Report) -> list[StageRow]:
    """The stages, with what was lost at each."""
    rows = []
    for stage in report["stages"]:
        lost = stage["in"] - stage["out"]
        note = clean(stage["note"])
        if lost > 0:
            left = f"◀ {count(lost)} lost at this stage"
            note = f"{left}; {note}" if note else left
        name = clean(stage["name"], 20) or _STAGE_NAMES[stage["stage"]]
        rows.append(
            StageRow(f"{stage['stage']} {name}", count(stage["in"]), count(stage["out"]), note, lost > 0)
        )
    return rows


@dataclass(frozen=True)
class FindingText:
    """A finding in words. `facts` follow the id on its first line."""

    id: str
    severity: str
    facts: list[str]
    title: str
    evidence: list[str]
    remedy: list[str]
    command: str
    rule: str


def findings(report: Report) -> list[FindingText]:
    """All findings in the report's order; what is no fault is told more briefly."""
    return [_finding(one, report["requests"]["total"]) for one in report["findings"]]


def _finding(one: Finding, requests: int) -> FindingText:
    fault = one["severity"] == "fault"
    facts = []
    if one["tokens"]:
        facts.append(f"{plural(one['tokens'], 'token')} ({percent(one['share'])})")
    if one["requests"] and fault:
        facts.append(f"{count(one['requests'])} of {plural(max(requests, one['requests']), 'request')}")
    evidence = [clean(line) for line in one["evidence"]]
    evidence += [_event(event) for event in one["events"]]
    versions = clean(one["versions"])
    return FindingText(
        id=clean(one["id"], 80),
        severity=one["severity"].upper(),
        facts=facts,
        title=clean(one["title"]),
        evidence=evidence if fault else evidence[:1],
        remedy=[clean(line) for line in one["remedy"]][: None if fault else 1],
        command=f"kvtrace docs {clean(one['id'], 80)}",
        rule=f"rule for vLLM {versions}" if versions else "",
    )


def _event(event: Event) -> str:
    where = [f"request {clean(event['request'], 120)}"] if event["request"] else []
    where.append(f"step {event['step']}")
    if event["rank"] is not None:
        where.append(f"rank {event['rank']}")
    if event["layer"]:
        where.append(clean(event["layer"], 120))
    return f"{', '.join(where)}: {clean(event['text'])}"


def ruled_out(report: Report) -> list[tuple[str, str]]:
    """(id, evidence) of what was checked and is not the cause."""
    return [(clean(one["id"], 80), clean(one["evidence"])) for one in report["ruled_out"]]


def not_observed(report: Report) -> list[tuple[str, str]]:
    """(id or topic, why nothing can be said)."""
    return [(clean(one["id"], 80), clean(one["why"])) for one in report["not_observed"]]


@dataclass(frozen=True)
class CoverageRow:
    """Calls of a hook or op over the layers and processes that saw the same; calls / eligible."""

    name: str
    calls: str
    where: str
    extra: str
    complete: bool


@dataclass(frozen=True)
class _Seen:
    process: str
    layer: str | None
    name: str
    eligible: int
    fired: int
    extra: tuple[tuple[int, str], ...]

    @property
    def numbers(self) -> tuple[object, ...]:
        return (self.eligible, self.fired, self.extra)


def coverage(report: Report) -> list[CoverageRow]:
    """One row a hook or op where all layers and ranks saw the same, else one a group of likes."""
    seen = [
        _Seen(
            row["process"],
            row["layer"],
            row["hook"],
            row["eligible"],
            row["fired"],
            ((row["with_work"], "with work"), (row["raised"], "raised")),
        )
        for row in report["coverage"]["hooks"]
    ]
    seen += [
        _Seen(
            op["process"],
            op["layer"],
            op["op"],
            op["eligible"],
            op["fired"],
            ((op["direct"], "called directly"),),
        )
        for op in report["coverage"]["ops"]
    ]
    rows: list[CoverageRow] = []
    for name, alike in _grouped(seen, lambda one: one.name):
        rows += _cover(clean(name, 60), alike)
    return rows


def _cover(name: str, rows: list[_Seen]) -> list[CoverageRow]:
    processes = _grouped(rows, lambda row: row.process)
    signatures: dict[tuple[object, ...], list[tuple[str, list[_Seen]]]] = {}
    for process, own in processes:
        signature = tuple(sorted((row.layer or "", row.numbers) for row in own))
        signatures.setdefault(signature, []).append((process, own))
    if len({row.numbers for row in rows}) == 1:
        return [_cover_row(name, rows, True)]
    out: list[CoverageRow] = []
    for same in signatures.values():
        own = [row for _, part in same for row in part]
        groups = sorted(_grouped(own, lambda row: row.numbers), key=lambda group: -len(group[1]))
        for number, (_, alike) in enumerate(groups):
            if number == MAX_LAYERS:
                rest = [row for _, more in groups[number:] for row in more]
                out.append(_cover_row(name, rest, False))
                break
            out.append(_cover_row(name, alike, len(groups) == 1))
    return out


def _cover_row(name: str, rows: list[_Seen], whole: bool) -> CoverageRow:
    """One row for `rows`; `whole` says that these are all the layers there are."""
    layers = list(dict.fromkeys(row.layer for row in rows if row.layer is not None))
    processes = names(dict.fromkeys(row.process for row in rows))
    where = f"{_layers(layers, whole)} · {processes}" if layers else processes
    eligible, fired = sum(row.eligible for row in rows), sum(row.fired for row in rows)
    extras: dict[str, int] = {}
    for row in rows:
        for number, word in row.extra:
            extras[word] = extras.get(word, 0) + number
    extra = ", ".join(f"{count(number)} {word}" for word, number in extras.items() if number)
    return CoverageRow(name, f"{count(fired)}/{count(eligible)}", where, extra, fired >= eligible)


def _layers(layers: list[str], whole: bool) -> str:
    """``4 layers`` for all of them; some: ``model.layers.{0-2,5}.self_attn.attn``."""
    if whole and len(layers) > 1:
        return plural(len(layers), "layer")
    parts = [re.fullmatch(r"(\D*)(\d{1,6})(.*)", clean(layer, 120)) for layer in layers]
    frames = {(part[1], part[3]) for part in parts if part}
    if len(layers) == 1 or None in parts or len(frames) != 1:
        return names(layers, 3)
    numbers = sorted({int(part[2]) for part in parts if part})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:MAX_LAYERS]]
    if len(runs) > MAX_LAYERS:
        shown.append("…")
    before, after = frames.pop()
    return f"{before}{{{','.join(shown)}}}{after}"


def requests(report: Report) -> list[tuple[str, str, str, str, str]]:
    """(id, prompt, saved, not saved, verdict) of the requests that lost most."""
    worst = [row for row in report["requests"]["rows"] if row["not_saved"] > 0][:MAX_REQUESTS]
    return [
        (
            clean(row["id"], 60),
            count(row["prompt"]),
            count(row["saved"]),
            count(row["not_saved"]),
            clean(row["verdict"], 60),
        )
        for row in worst
    ]


def timing(report: Report) -> list[tuple[str, str, str, str, str, str]]:
    """(hook, clock, calls, median, 99th percentile, share of the steps), dearest first."""
    rows = sorted(report["timing"], key=lambda row: -row["total_ns"])[:MAX_TIMINGS]
    return [
        (
            clean(row["hook"], 60),
            row["clock"],
            count(row["count"]),
            duration(row["p50_ns"] / 1e9),
            duration(row["p99_ns"] / 1e9),
            "" if row["share_of_steps"] is None else percent(row["share_of_steps"]),
        )
        for row in rows
    ]


def both_clocks(report: Report) -> list[tuple[str, str, str, str, str, str]]:
    """(hook or op, calls, host median, device median, host sum, device sum) of the calls timed on both."""
    rows = report["device"]["rows"] if "device" in report else []
    return [
        (
            clean(row["name"], 60),
            count(row["count"]),
            duration(row["host_p50_ns"] / 1e9),
            duration(row["device_p50_ns"] / 1e9),
            duration(row["host_total_ns"] / 1e9),
            duration(row["device_total_ns"] / 1e9),
        )
        for row in rows
        if row["count"]
    ]


def device_note(report: Report) -> str:
    """What the device times rest on, and what taking them cost."""
    if "device" not in report:
        return ""
    part = report["device"]
    said = [f"{plural(part['calls'], 'call')} in {plural(part['steps'], 'timed step')}"]
    if part["busy_ns"]:
        said.append(f"timing took {percent(part['own_ns'] / part['busy_ns'])} of the steps' host time")
    for number, what in ((part["untimed"], "had no event free"), (part["lost"], "could not be read")):
        if number:
            said.append(f"{plural(number, 'call')} {what}")
    crossed = sum(row["other_stream"] for row in part["rows"])
    if crossed:
        said.append(f"{plural(crossed, 'call')} ended on another stream than they began: no device time")
    said.append("device time is from event to event: it holds the device's waits for the host")
    return " · ".join(said)


@dataclass(frozen=True)
class GraphText:
    """CUDA graphs of the workers that fared alike: a sentence, reasons, and one row a mode."""

    summary: str
    why: list[str]
    rows: list[tuple[str, str, str, str, str]]  # mode, steps, padding, op bodies, save hooks


def graphs(report: Report) -> list[GraphText]:
    """What was asked, what was used and why; how many steps ran in each mode."""
    groups = _grouped(
        report.get("graphs", []),
        lambda row: (
            row["runner"], row["asked"], row["configured"], row["used"], tuple(row["why"]), row["breakable"],
            row["captured"], row["capturing_steps"],
            tuple(tuple(mode.values()) for mode in row["modes"]),
        ),
    )  # fmt: skip
    return [_graph_text(rows) for _, rows in groups]


def _graph_text(rows: list[GraphRow]) -> GraphText:
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
    total = sum(mode["steps"] for mode in row["modes"])
    return GraphText(
        " · ".join(parts),
        [clean(line) for line in row["why"]],
        [
            (
                clean(mode["mode"], 20),
                f"{count(mode['steps'])}/{count(total)}",
                _padding(mode),
                f"{count(mode['bodies'])}/{count(mode['layer_steps'])}",
                f"{count(mode['saves'])}/{count(mode['layer_steps'])}",
            )
            for mode in row["modes"]
        ],
    )


def _padding(mode: ModeRow) -> str:
    """Tokens that were run and not asked for, of those that were run."""
    if not mode["padded"]:
        return ""
    return f"{percent(1 - min(1.0, mode['tokens'] / mode['padded']))} of {count(mode['padded'])}"


def limits(report: Report) -> list[str]:
    """What this report cannot say, and what tracing took."""
    part = report["limits"]
    out = [clean(note) for note in part["notes"]]
    for status, words in (("missing", "not in this vLLM"), ("failed", "could not be hooked")):
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
        f"{size(tracer['spool_bytes'])}"
    )
    return out


def next_command(report: Report, source: str | None, traced: str | None = None) -> str:
    """The one command that helps most from here.

    Args:
        source: the path that the report came from.
        traced: the run directory, where it has the spools that ``kvtrace why`` reads.
    """
    faults = [one for one in report["findings"] if one["severity"] == "fault"]
    worst = next((event["request"] for one in faults for event in one["events"] if event["request"]), None)
    if traced and worst:
        where, request = clean(shlex.quote(traced)), clean(shlex.quote(worst), 200)
        return f"kvtrace why {where} --request {request}"
    if faults:
        return f"kvtrace docs {clean(faults[0]['id'], 80)}"
    where = clean(shlex.quote(source)) if source else "PATH"
    return f"kvtrace explain {where} --format markdown"


def _grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> list[tuple[_K, list[_T]]]:
    """Items by key, keys in order of first sight."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())
