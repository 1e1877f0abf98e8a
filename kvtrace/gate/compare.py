"""A report against a baseline: one check for each line of the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from kvtrace.gate.baseline import Baseline, CoverageRow, EngineShape, subject
from kvtrace.gate.cells import CallCounts, cells
from kvtrace.gate.contract import shapes
from kvtrace.gate.covered import matching, shortfalls, too_few
from kvtrace.gate.explain import Findings
from kvtrace.gate.lost import less_in
from kvtrace.gate.outcome import Check, State
from kvtrace.gate.read_baseline import BaselineFile
from kvtrace.gate.rules import Rules
from kvtrace.gate.shares import DECODE, kept, shares, without
from kvtrace.grouped import grouped
from kvtrace.report.model import Report
from kvtrace.terms import FAULT, KEPT, LOADED, LOCAL_HIT, NOTE, cause_of
from kvtrace.trace.targets import other_id
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


@dataclass(frozen=True)
class _Held:
    """What is held against what."""

    report: Report
    file: BaselineFile
    rules: Rules
    findings: Findings

    @property
    def baseline(self) -> Baseline:
        return self.file.baseline


def compare(report: Report, file: BaselineFile, rules: Rules, findings: Findings) -> list[Check]:
    """Every line of the baseline, and what it has come to in this report.

    Step counts, times and the traffic's size are not looked at. Where the baseline's share of a hook is
    1, the run's has to be 1; other shares may be worse by the tolerance of `rules`.
    """
    held = _Held(report, file, rules, findings)
    parts = (_engines, _coverage, _saves, _loads, _found, _targets)
    return [replace(check, source=file.path) for part in parts for check in part(held)]


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


def _engines(held: _Held) -> list[Check]:
    wanted, seen = list(held.baseline["engines"]), shapes(held.report)
    checks = []
    for shape in list(wanted):
        if shape in seen:
            wanted.remove(shape)
            seen.remove(shape)
            words, line = _engine_words(shape), held.file.line(shape)
            checks.append(Check("engine", "engine", "passed", words, words, "text", line=line))
    for number, shape in enumerate(wanted):
        line = held.file.line(shape)
        if number < len(seen):
            differ = (part(shape, seen[number], held.findings) for part in (_wiring, _workers))
            checks += [replace(one, line=line) for part in differ for one in part]
        else:
            checks.append(
                Check(
                    "engine", "engine", "failed", _engine_words(shape), None, "text", line=line,
                    text="this engine was not seen in the run", cause=held.findings.for_wiring(),
                    remedy="look at the start of the run: did the engine come up?",
                )
            )  # fmt: skip
    for shape in seen[len(wanted) :]:
        words = _engine_words(shape)
        checks.append(Check("engine", "engine", "changed", None, words, "text", text="an additional engine"))
    return checks


def _engine_words(shape: EngineShape) -> str:
    ranks = len(shape["ranks"])
    who = shape["connector"] or "no connector"
    return f"{who}, {plural(ranks, 'rank')}, {plural(shape['kv_layers'], 'KV layer')}"


def _wiring(want: EngineShape, have: EngineShape, findings: Findings) -> list[Check]:
    checks = []
    before, after = cast("dict[str, str | None]", want), cast("dict[str, str | None]", have)
    for key, words in _FIELDS.items():
        if before[key] == after[key]:
            checks.append(Check("engine", words, "passed", before[key], after[key] or None, "text"))
        elif key == "connector" or after["connector"] is not None:  # else said once: there is none
            checks.append(
                Check(
                    "engine", words, "failed", before[key], after[key] or None, "text",
                    cause=findings.for_wiring(_CAUSES[key]),
                    remedy="set the engine's --kv-transfer-config as in the run of the baseline",
                )
            )  # fmt: skip
    return checks


def _workers(want: EngineShape, have: EngineShape, findings: Findings) -> list[Check]:
    """Ranks and KV layers: fewer of them fail."""
    checks = [
        Check(
            "engine", "worker", "failed", "seen", None, "text", rank=rank,
            text=f"rank {rank} was not seen in this run", cause=findings.for_wiring(("agent-not-loaded",)),
            remedy="look at the start of the run: did this worker come up, and under kvtrace run?",
        )
        for rank in want["ranks"]
        if rank not in have["ranks"]
    ]  # fmt: skip
    if set(have["ranks"]) - set(want["ranks"]):
        checks.append(Check("engine", "workers", "changed", len(want["ranks"]), len(have["ranks"]), "count"))
    before, after = want["kv_layers"], have["kv_layers"]
    if before != after:
        state: State = "failed" if after < before else "changed"
        cause = findings.for_wiring() if after < before else None
        remedy = "is it the same model? vLLM calls no hook in layers without KV"
        checks.append(Check("engine", "KV layers", state, before, after, "count", cause=cause, remedy=remedy))
    return checks


# ------------------------------------------------------------------------------ coverage


def _coverage(held: _Held) -> list[Check]:
    seen = cells(held.report)
    rows: list[CoverageRow] = [*held.baseline["coverage"]["hooks"], *held.baseline["coverage"]["ops"]]
    checks = []
    for row in rows:
        line = held.file.line(row)
        for check in (*_called(row, seen, held), *_working(row, seen, held.findings)):
            checks.append(replace(check, line=line))
    known = {(subject(row)[1], row.get("layers")) for row in rows}
    fresh = [cell for cell in seen if cell.fired and (cell.name, cell.group) not in known]
    for (name, group), members in grouped(fresh, lambda cell: (cell.name, cell.group)):
        if members[0].what == "op" or all(cell.share >= 1.0 for cell in members):
            share, text = min(cell.share for cell in members), "not in the baseline"
            checks.append(Check("coverage", name, "changed", None, share, layers=group or "", text=text))
    return checks


def _called(row: CoverageRow, seen: list[CallCounts], held: _Held) -> list[Check]:
    """Whether the hook or op of a row was called as often as the baseline promises."""
    (what, name), members = subject(row), matching(row, seen)
    share, layers, slack = row["share"], row.get("layers", ""), held.rules.slack
    cause, remedy = held.findings.for_calls(), _RENAMED if what == "op" else _LOST
    if not members:
        text = "never seen in this run" + (_instead(seen, held.baseline) if what == "op" else "")
        check = Check("coverage", name, "failed", share, layers=layers, text=text, cause=cause, remedy=remedy)
        return [check] if share > 0 else []

    def falls_short(cell: CallCounts) -> bool:
        return cell.share < 1.0 if share >= 1.0 else cell.share + _EPSILON < share - slack

    short = [too_few(one, name, share, cause, remedy) for one in shortfalls(members, falls_short)]
    if short:
        return short
    least = min(cell.share for cell in members)
    better = least > share + (_EPSILON if least >= 1.0 else slack)
    return [Check("coverage", name, "better" if better else "passed", share, least, layers=layers)]


def _instead(seen: list[CallCounts], baseline: Baseline) -> str:
    """The ops that were called, and that the baseline does not know."""
    known = {row["op"] for row in baseline["coverage"]["ops"]}
    other = sorted({cell.name for cell in seen if cell.what == "op" and cell.fired} - known)
    return f"; seen instead: {', '.join(other)}" if other else ""


def _working(row: CoverageRow, seen: list[CallCounts], findings: Findings) -> list[Check]:
    """Whether a hook that had something to store or load had it again."""
    if not row["work"]:
        return []
    cells = matching(row, seen)
    idle = shortfalls(cells, lambda cell: cell.fired > 0 and cell.work == 0)
    if not idle and any(cell.fired and cell.work is None for cell in cells):
        text = "the metadata names nothing, and no call was seen to store or load: not observed in this run"
        return [Check("work", subject(row)[1], "changed", "with work", None, "text", text=text)]
    return [
        Check(
            "work", subject(row)[1], "failed", "with work", "without", "text",
            layers=one.layers, rank=one.rank,
            text=f"called {plural(one.fired, 'time')}, but never with anything to store or load",
            cause=findings.for_losses(), remedy=_LEDGER,
        )
        for one in idle
    ]  # fmt: skip


# ------------------------------------------------------------------------------- ledgers


def _saves(held: _Held) -> list[Check]:
    before, after = held.baseline["ledger"]["saves"], shares(held.report["ledger"]["saves"])
    line = held.file.line(before)
    if not before:
        return []
    if not after:
        return [
            Check(
                "ledger", "tokens kept", "failed", kept(before), None, line=line,
                text="no token was computed in this run", cause=held.findings.for_wiring(),
                remedy="did the engine come up, and did it get requests?",
            )
        ]  # fmt: skip
    if before.get(DECODE, 0.0) > 0:
        # How long the answers are is no matter of the connector's.
        before, after = without(before, DECODE), without(after, DECODE)
    here = without(before, LOCAL_HIT), without(after, LOCAL_HIT)
    if not all(here):
        return []  # all was reused from the GPU: that says nothing of the store
    check = _share_kept(held, "tokens kept", here, kept)
    if check.state == "failed" and (lost := less_in(held.report)):
        check = replace(check, text="; ".join(filter(None, (check.text, lost))))
    checks = [replace(check, line=line)]
    for name in sorted({*before, *after}) if check.state == "passed" else ():
        was, now = before.get(name, 0.0), after.get(name, 0.0)
        if abs(now - was) > held.rules.slack:
            checks.append(Check("ledger", name, "changed", was, now, line=line))
    return checks


def _share_kept(
    held: _Held,
    name: str,
    ledgers: tuple[dict[str, float], dict[str, float]],
    share: Callable[[dict[str, float]], float],
) -> Check:
    """A share of two ledgers, before and after, that may fall by the slack, and by what is allowed."""
    before, after = ledgers
    rises = {
        name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *after} if name not in KEPT
    }
    grown = {name: rise for name, rise in rises.items() if cause_of(name) not in held.rules.allow}
    forgiven = sum(max(0.0, rise) for name, rise in rises.items() if name not in grown)
    was, now, slack = share(before), share(after), held.rules.slack
    if now + forgiven >= was - slack - _EPSILON:
        return Check("ledger", name, "better" if now > was + slack else "passed", was, now)
    text, cause = _grown(grown, before, after), held.findings.for_accounts(grown)
    return Check("ledger", name, "failed", was, now, text=text, cause=cause, remedy=_LEDGER)


def _grown(rises: dict[str, float], before: dict[str, float], after: dict[str, float]) -> str:
    """The outcomes that the tokens had instead."""
    most = sorted((name for name in rises if rises[name] > 0.0005), key=lambda name: (-rises[name], name))
    return ", ".join(
        f"{name} {percent(before.get(name, 0.0))} -> {percent(after.get(name, 0.0))}" for name in most[:3]
    )


def _loads(held: _Held) -> list[Check]:
    before, after = held.baseline["ledger"]["loads"], shares(held.report["ledger"]["loads"])
    line, was = held.file.line(before), before.get(LOADED, 0.0)
    if was <= 0:
        return []
    if not after:
        return [
            Check(
                "ledger", "tokens loaded", "failed", was, None, line=line,
                text="no load was offered or asked for in this run",
                cause=held.findings.for_accounts({"missed:never-looked-up": 1.0}), remedy=_LEDGER,
            )
        ]  # fmt: skip
    check = _share_kept(held, "tokens loaded", (before, after), lambda part: part.get(LOADED, 0.0))
    return [replace(check, line=line)]


# ------------------------------------------------------------------------------ findings


def _found(held: _Held) -> list[Check]:
    checks = []
    for one in held.report["findings"]:
        cause, severity = one["id"], one["severity"]
        state: State = "passed"
        if held.findings.is_new(one) and cause not in held.rules.allow:
            # a limit or note costs nothing by itself: what it costs is in the ledger
            state = "failed" if severity == FAULT else "changed"
        old, failed = held.findings.known.get(cause), cause if state == "failed" else None
        checks.append(Check("finding", cause, state, old, severity, "text", text=one["title"], cause=failed))
    seen = {one["id"] for one in held.report["findings"]}
    for known in held.baseline["findings"]:
        if known["id"] not in seen:
            gone: State = "changed" if known["severity"] == NOTE else "better"
            line = held.file.line(known)
            checks.append(Check("finding", known["id"], gone, known["severity"], None, "text", line=line))
    return checks


# ------------------------------------------------------------------------------- targets


def _targets(held: _Held) -> list[Check]:
    now = {one["id"]: one for one in held.report["instrumentation"]["targets"]}
    same_tool = held.baseline["made"]["kvtrace"] == held.report["run"]["kvtrace"]
    checks = []
    for name in held.baseline["targets"]:
        target, line = now.get(name), held.file.line(name)
        status = target["status"] if target else None
        twin = other_id(name)
        state: State = "changed"
        remedy = ""
        if status == "found":
            state, text = "passed", ""
        elif twin in now and now[twin]["status"] == "found" and twin not in held.baseline["targets"]:
            text = f"{twin} was found instead"
        elif target is None and not same_tool:
            text = "this kvtrace has no such target"
        else:
            place = (f"{target['module']}.{target['attr']}", target["detail"]) if target else ()
            state, text, remedy = "failed", ": ".join(filter(None, place)), _MOVED
        checks.append(
            Check("target", name, state, "found", status, "text", text=text, remedy=remedy, line=line)
        )
    return checks
