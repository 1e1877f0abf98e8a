"""A report against a baseline: one check for each line of the contract."""

from __future__ import annotations

from dataclasses import replace

from kvtrace.gate.cells import Cell, cells
from kvtrace.gate.contract import shapes
from kvtrace.gate.covered import matching, shortfalls
from kvtrace.gate.explain import Findings
from kvtrace.gate.model import CoverageRow, EngineShape
from kvtrace.gate.outcome import Check, State
from kvtrace.gate.read import BaselineFile
from kvtrace.gate.rules import Rules
from kvtrace.gate.shares import DECODE, kept, shares, without_decode
from kvtrace.report.model import Report
from kvtrace.terms import FAULT, KEPT, LOADED, NOTE, cause_of
from kvtrace.words import percent, plural

_EPSILON = 1e-6

_LOST = (
    "no finding of this kvtrace explains it: compare with the run of the baseline (kvtrace diff), and look "
    "at the connector's and vLLM's changes between them"
)
_RENAMED = (
    "this vLLM has another op in its place, or does not call it: if all hooks are complete, renew the "
    "baseline; else upgrade kvtrace"
)
_MOVED = (
    "vLLM has moved or renamed this place, or no longer uses it: upgrade kvtrace; if all hooks are complete "
    "without it, renew the baseline"
)
_LEDGER = "see the ledger: kvtrace explain PATH"


def compare(report: Report, file: BaselineFile, rules: Rules) -> list[Check]:
    """Every line of the baseline, and what it has come to in this report.

    Step counts, times and the traffic's size are not looked at. Where the baseline's share of a hook is
    1, the run's has to be 1; other shares may be worse by the tolerance of `rules`.
    """
    findings = Findings(report, {one["id"]: one["severity"] for one in file.baseline["findings"]})
    checks = [
        *_engines(report, file, findings),
        *_coverage(report, file, findings, rules.slack),
        *_saves(report, file, findings, rules),
        *_loads(report, file, findings, rules),
        *_found(report, file, findings, rules),
        *_targets(report, file),
    ]
    return [replace(check, source=file.path) for check in checks]


# ------------------------------------------------------------------------------- engines

_FIELDS = {
    "connector": "connector",
    "class": "connector class",
    "module": "connector module",
    "role": "kv_role",
}
_CAUSES = {
    "connector": ("no-connector-configured", "connector-failed-to-start", "connector-not-created"),
    "class": ("wrong-connector-class", "connector-failed-to-start", "connector-not-created"),
    "module": ("wrong-connector-class", "connector-failed-to-start", "connector-not-created"),
    "role": ("role-does-not-save",),
}


def _engines(report: Report, file: BaselineFile, findings: Findings) -> list[Check]:
    wanted, seen = list(file.baseline["engines"]), shapes(report)
    checks = []
    for shape in list(wanted):
        if shape in seen:
            wanted.remove(shape)
            seen.remove(shape)
            checks.append(
                Check(
                    "engine",
                    "engine",
                    "passed",
                    _engine_words(shape),
                    _engine_words(shape),
                    "text",
                    line=file.line(shape),
                )
            )
    for number, shape in enumerate(wanted):
        if number < len(seen):
            checks += _engine(shape, seen[number], findings, file.line(shape))
        else:
            checks.append(
                Check(
                    "engine",
                    "engine",
                    "failed",
                    _engine_words(shape),
                    None,
                    "text",
                    text="this engine was not seen in the run",
                    cause=findings.for_wiring(),
                    remedy="look at the start of the run: did the engine come up?",
                    line=file.line(shape),
                )
            )
    for shape in seen[len(wanted) :]:
        checks.append(
            Check("engine", "engine", "changed", None, _engine_words(shape), "text", text="one engine more")
        )
    return checks


def _engine_words(shape: EngineShape) -> str:
    ranks = len(shape["ranks"])
    who = shape["connector"] or "no connector"
    return f"{who}, {plural(ranks, 'rank')}, {plural(shape['kv_layers'], 'KV layer')}"


def _engine(want: EngineShape, have: EngineShape, findings: Findings, line: int) -> list[Check]:
    checks = []
    before, after = _wiring(want), _wiring(have)
    for key, words in _FIELDS.items():
        same = before[key] == after[key]
        if not same and key != "connector" and after["connector"] is None:
            continue  # said once: there is none
        checks.append(
            Check(
                "engine",
                words,
                "passed" if same else "failed",
                before[key],
                after[key] or None,
                "text",
                cause=None if same else findings.for_wiring(_CAUSES[key]),
                remedy="" if same else "set the engine's --kv-transfer-config as in the run of the baseline",
                line=line,
            )
        )
    lost = [rank for rank in want["ranks"] if rank not in have["ranks"]]
    more = [rank for rank in have["ranks"] if rank not in want["ranks"]]
    for rank in lost:
        checks.append(
            Check(
                "engine",
                "worker",
                "failed",
                "seen",
                None,
                "text",
                rank=rank,
                text=f"rank {rank} was not seen in this run",
                cause=findings.for_wiring(("agent-not-loaded",)),
                remedy="look at the start of the run: did this worker come up, and under kvtrace run?",
                line=line,
            )
        )
    if more:
        checks.append(
            Check("engine", "workers", "changed", len(want["ranks"]), len(have["ranks"]), "count", line=line)
        )
    if want["kv_layers"] != have["kv_layers"]:
        fewer = have["kv_layers"] < want["kv_layers"]
        checks.append(
            Check(
                "engine",
                "KV layers",
                "failed" if fewer else "changed",
                want["kv_layers"],
                have["kv_layers"],
                "count",
                cause=findings.for_wiring() if fewer else None,
                line=line,
                remedy="is it the same model? layers that are no KV layers for vLLM get no hook",
            )
        )
    return checks


def _wiring(shape: EngineShape) -> dict[str, str | None]:
    return {
        "connector": shape["connector"],
        "class": shape["class"],
        "module": shape["module"],
        "role": shape["role"],
    }


# ------------------------------------------------------------------------------ coverage


def _coverage(report: Report, file: BaselineFile, findings: Findings, slack: float) -> list[Check]:
    seen = cells(report)
    rows: list[CoverageRow] = [*file.baseline["coverage"]["hooks"], *file.baseline["coverage"]["ops"]]
    known: set[tuple[str, str | None]] = set()
    checks = []
    for row in rows:
        name = row.get("hook") or row.get("op", "")
        known.add((name, row.get("layers")))
        checks += [replace(one, line=file.line(row)) for one in _row(row, name, seen, rows, findings, slack)]
    fresh: dict[tuple[str, str | None], list[Cell]] = {}
    for cell in seen:
        if cell.fired and (cell.name, cell.group) not in known:
            fresh.setdefault((cell.name, cell.group), []).append(cell)
    for (name, group), own in fresh.items():
        if own[0].what == "op" or all(cell.share >= 1.0 for cell in own):
            share = min(cell.share for cell in own)
            checks.append(
                Check(
                    "coverage", name, "changed", None, share, layers=group or "", text="not in the baseline"
                )
            )
    return checks


def _row(
    row: CoverageRow, name: str, seen: list[Cell], rows: list[CoverageRow], findings: Findings, slack: float
) -> list[Check]:
    own = matching(row, seen)
    share, layers = row["share"], row.get("layers", "")
    if not own:
        if share <= 0:
            return []
        known = {one.get("op") for one in rows}
        other = sorted(
            {cell.name for cell in seen if cell.what == "op" and cell.fired and cell.name not in known}
        )
        instead = f"; seen instead: {', '.join(other)}" if "op" in row and other else ""
        return [
            Check(
                "coverage",
                name,
                "failed",
                share,
                None,
                layers=layers,
                cause=findings.for_calls(),
                text="never seen in this run" + instead,
                remedy=_RENAMED if "op" in row else _LOST,
            )
        ]

    def falls_short(cell: Cell) -> bool:
        return cell.share < 1.0 if share >= 1.0 else cell.share + _EPSILON < share - slack

    checks = [
        Check(
            "coverage",
            name,
            "failed",
            share,
            short.share,
            layers=short.layers,
            rank=short.rank,
            text=f"called in {short.fired} of {short.eligible} {'layer-steps' if layers else 'steps'}",
            cause=findings.for_calls(),
            remedy=_RENAMED if "op" in row else _LOST,
        )
        for short in shortfalls(own, falls_short)
    ]
    if not checks:
        least = min(cell.share for cell in own)
        better = least > share + (_EPSILON if least >= 1.0 else slack)
        checks.append(Check("coverage", name, "better" if better else "passed", share, least, layers=layers))
    if row["work"]:
        idle = shortfalls(own, lambda cell: cell.fired > 0 and cell.work == 0)
        checks += [
            Check(
                "work",
                name,
                "failed",
                "with work",
                "without",
                "text",
                layers=short.layers,
                rank=short.rank,
                text=f"called {short.fired} times, and never with anything to store or load",
                cause=findings.for_accounts(_losses(findings)),
                remedy=_LEDGER,
            )
            for short in idle
        ]
    return checks


def _losses(findings: Findings) -> dict[str, float]:
    """New findings of the saves as accounts, by the tokens that they explain."""
    return {
        f"not-saved:{one['id']}": one["tokens"] + (1e12 if findings.is_new(one) else 0)
        for one in findings.order
        if one["tokens"] > 0 and one["stage"] is not None
    }


# ------------------------------------------------------------------------------- ledgers


def _saves(report: Report, file: BaselineFile, findings: Findings, rules: Rules) -> list[Check]:
    before, after = file.baseline["ledger"]["saves"], shares(report["ledger"]["saves"])
    line = file.line(before)
    if not before:
        return []
    if not after:
        return [
            Check(
                "ledger",
                "tokens kept",
                "failed",
                kept(before),
                None,
                text="no token was computed in this run",
                cause=findings.for_wiring(),
                remedy="did the engine come up, and did it get requests?",
                line=line,
            )
        ]
    if before.get(DECODE, 0.0) > 0:
        before, after = without_decode(before), without_decode(after)
    rises = {
        name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *after} if name not in KEPT
    }
    forgiven = sum(max(0.0, rise) for name, rise in rises.items() if cause_of(name) in rules.allow)
    was, now = kept(before), kept(after)
    if now + forgiven < was - rules.slack - _EPSILON:
        grown = {name: rise for name, rise in rises.items() if cause_of(name) not in rules.allow}
        return [
            Check(
                "ledger",
                "tokens kept",
                "failed",
                was,
                now,
                text=_grown(grown, before, after),
                cause=findings.for_accounts(grown),
                remedy=_LEDGER,
                line=line,
            )
        ]
    state = "better" if now > was + rules.slack else "passed"
    checks = [
        Check("ledger", "tokens kept", "better" if state == "better" else "passed", was, now, line=line)
    ]
    for name in sorted({*before, *after}):
        if abs(after.get(name, 0.0) - before.get(name, 0.0)) > rules.slack and state == "passed":
            checks.append(
                Check("ledger", name, "changed", before.get(name, 0.0), after.get(name, 0.0), line=line)
            )
    return checks


def _grown(rises: dict[str, float], before: dict[str, float], after: dict[str, float]) -> str:
    """The accounts that the tokens went to."""
    most = sorted((name for name in rises if rises[name] > 0.0005), key=lambda name: (-rises[name], name))
    return ", ".join(
        f"{name} {percent(before.get(name, 0.0))} -> {percent(after.get(name, 0.0))}" for name in most[:3]
    )


def _loads(report: Report, file: BaselineFile, findings: Findings, rules: Rules) -> list[Check]:
    before, after = file.baseline["ledger"]["loads"], shares(report["ledger"]["loads"])
    line, was = file.line(before), before.get(LOADED, 0.0)
    if was <= 0:
        return []
    if not after:
        return [
            Check(
                "ledger",
                "tokens loaded",
                "failed",
                was,
                None,
                text="no load was offered or asked for in this run",
                cause=findings.for_accounts({"missed:never-looked-up": 1.0}),
                remedy=_LEDGER,
                line=line,
            )
        ]
    now = after.get(LOADED, 0.0)
    rises = {
        name: after.get(name, 0.0) - before.get(name, 0.0)
        for name in {*before, *after}
        if name not in KEPT and cause_of(name) not in rules.allow
    }
    forgiven = sum(
        max(0.0, after[name] - before.get(name, 0.0)) for name in after if cause_of(name) in rules.allow
    )
    if now + forgiven < was - rules.slack - _EPSILON:
        return [
            Check(
                "ledger",
                "tokens loaded",
                "failed",
                was,
                now,
                text=_grown(rises, before, after),
                cause=findings.for_accounts(rises),
                remedy=_LEDGER,
                line=line,
            )
        ]
    return [
        Check(
            "ledger", "tokens loaded", "better" if now > was + rules.slack else "passed", was, now, line=line
        )
    ]


# ------------------------------------------------------------------------------ findings


def _found(report: Report, file: BaselineFile, findings: Findings, rules: Rules) -> list[Check]:
    checks = []
    seen = set()
    for one in report["findings"]:
        cause, severity = one["id"], one["severity"]
        seen.add(cause)
        old = findings.known.get(cause)
        if not findings.is_new(one) or cause in rules.allow:
            state: State = "passed"
        elif severity == FAULT:
            state = "failed"
        else:
            state = "changed"  # a limit or note costs nothing by itself: what it costs is in the ledger
        checks.append(
            Check(
                "finding",
                cause,
                state,
                old,
                severity,
                "text",
                text=one["title"],
                cause=cause if state == "failed" else None,
            )
        )
    for known in file.baseline["findings"]:
        if known["id"] not in seen:
            checks.append(
                Check(
                    "finding",
                    known["id"],
                    "changed" if known["severity"] == NOTE else "better",
                    known["severity"],
                    None,
                    "text",
                    line=file.line(known),
                )
            )
    return checks


# ------------------------------------------------------------------------------- targets


def _targets(report: Report, file: BaselineFile) -> list[Check]:
    now = {one["id"]: one for one in report["instrumentation"]["targets"]}
    same_tool = file.baseline["made"]["kvtrace"] == report["run"]["kvtrace"]
    checks = []
    for name in file.baseline["targets"]:
        target, line = now.get(name), file.line(name)
        status = target["status"] if target else None
        if status == "found":
            checks.append(Check("target", name, "passed", "found", "found", "text", line=line))
            continue
        twin = name.removesuffix("-old") if name.endswith("-old") else f"{name}-old"
        if twin in now and now[twin]["status"] == "found" and twin not in file.baseline["targets"]:
            checks.append(
                Check(
                    "target",
                    name,
                    "changed",
                    "found",
                    status,
                    "text",
                    text=f"{twin} was found instead",
                    line=line,
                )
            )
        elif target is None and not same_tool:
            checks.append(
                Check(
                    "target",
                    name,
                    "changed",
                    "found",
                    None,
                    "text",
                    text="this kvtrace has no such target",
                    line=line,
                )
            )
        else:
            place = f"{target['module']}.{target['attr']}" if target else ""
            checks.append(
                Check(
                    "target",
                    name,
                    "failed",
                    "found",
                    status,
                    "text",
                    line=line,
                    text=": ".join(filter(None, (place, target["detail"] if target else ""))),
                    remedy=_MOVED,
                )
            )
    return checks
