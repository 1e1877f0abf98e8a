"""Whether a run showed what it must: pure functions over reports, counts and durations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.cases import OP, OWN, SAVE, Case, expected

LOW = 0.9
"""Of the profiler's kernel time: what lies between two events cannot be less, but for their resolution."""
SLACK_NS = 20_000
"""A call: launches and the events themselves, where these did not take longer."""


def judge(case: Case, report: Mapping[str, Any], counted: Mapping[str, Any], device: str) -> list[str]:
    """What is wrong with a case's report; an empty list is good.

    Args:
        counted: the connector's own calls of save_kv_layer: ``saves`` outside of capture; or ``loaded``.
    """
    faults = [one["id"] for one in report["findings"] if one["severity"] == "fault"]
    if case.connector != OWN:
        return _loads_problems(report, counted, faults)
    problems = []
    ids = [one["id"] for one in report["findings"]]
    graphs = report.get("graphs") or []
    used = graphs[0]["used"] if graphs else ""
    want = expected(case, used)
    if want.full_finding != ("full-cudagraph-replay" in ids):
        problems.append(f"full-cudagraph-replay {'is missing' if want.full_finding else 'was found'}")
    others = sorted(set(faults) - {"full-cudagraph-replay"})
    if others:
        problems.append(f"faults that are none: {', '.join(others)}")
    if "config-key-unused" in ids:
        problems.append("config-key-unused was found: this connector reads all of its keys")
    fired = next((row["fired"] for row in report["coverage"]["summary"] if row["hook"] == SAVE), 0)
    own = counted.get("saves")
    if fired != own:
        problems.append(f"{SAVE}: {fired} layer-steps in the report, {own} calls by the connector")
    if device == "cpu":
        return problems
    if not graphs:
        return [*problems, "the report has no section on graphs"]
    if used != want.used:
        problems.append(f"mode {used} was used, {want.used} expected")
    changed = f"changed {case.mode} to {used}"
    if (
        case.mode == "FULL"
        and used.startswith("FULL_")
        and not any(changed in line for line in graphs[0]["why"])
    ):
        problems.append(f"the report does not say that vLLM {changed}")
    seen = {row["mode"]: row for row in graphs[0]["modes"]}
    problems += [f"no step ran in mode {mode}" for mode in want.seen if mode not in seen]
    problems += [f"steps ran in mode {mode}" for mode in seen if mode not in want.may]
    full = seen.get("FULL")
    if full and (full["bodies"] or full["saves"]):
        problems.append(f"{full['bodies']} op bodies and {full['saves']} hooks in Python in FULL steps")
    for mode in ("NONE", "PIECEWISE"):
        row = seen.get(mode)
        if row and row["bodies"] != row["layer_steps"]:
            problems.append(f"{mode}: op bodies in {row['bodies']} of {row['layer_steps']} layer-steps")
    if want.declared and not any("requires_piecewise_for_cudagraph" in line for line in graphs[0]["why"]):
        problems.append("the report does not say that the connector's declaration changed the mode")
    if want.used != "FULL":  # else no call ran in Python
        problems += _device_problems(report)
    return problems


def _loads_problems(
    report: Mapping[str, Any], counted: Mapping[str, Any], faults: Sequence[str]
) -> list[str]:
    """``counted``: ``loaded``, tokens that the engine did not compute."""
    problems = [f"faults that are none: {', '.join(faults)}"] if faults else []
    loads = report["ledger"]["loads"]
    loaded, proved = loads["tokens"].get("loaded", 0), loads["grades"].get("loaded", {}).get("proved", 0)
    if loaded != counted["loaded"] or not loaded:
        problems.append(f"{loaded:g} tokens loaded in the report, {counted['loaded']} by the engine")
    if not proved:
        problems.append("of no loaded token it is proved that it came back equal")
    return problems


def _device_problems(report: Mapping[str, Any]) -> list[str]:
    part = report.get("device")
    if not part:
        return ["the report has no device times"]
    problems = []
    rows = {row["name"]: row for row in part["rows"]}
    for name in (OP, SAVE):
        if not rows.get(name, {}).get("count"):
            problems.append(f"no device times of {name}")
    if part["lost"]:
        problems.append(f"{part['lost']} device times could not be read")
    return problems


def compare(profiled: Mapping[str, Any], traced: Mapping[str, Mapping[str, float]], device: str) -> list[str]:
    """The profiler's view of the attention op and of save_kv_layer against the trace's, over the same steps.

    The hooks run inside the op: the profiler counts their kernels to it, the trace does not.

    Args:
        profiled: of ``op`` and ``save``: ``calls``, ``device_ns`` (the kernels that were launched in it).
        traced: of both: ``calls``; ``timed``; of these ``device_ns`` (event to event), ``host_ns``, and
            ``own_ns``: what timing them took beside.
    """
    op, save = profiled["op"], profiled["save"]
    body = {**op, "device_ns": op["device_ns"] - save["device_ns"]}
    return _compare(OP, body, traced["op"], device) + _compare(SAVE, save, traced["save"], device)


def _compare(name: str, profiled: Mapping[str, float], traced: Mapping[str, float], device: str) -> list[str]:
    problems = []
    by_profiler, by_trace, timed = profiled["calls"], traced["calls"], traced["timed"]
    if by_profiler != by_trace or not by_trace:
        problems.append(f"{name}: {by_profiler:g} calls by the profiler, {by_trace:g} in the trace")
    if device == "cpu":
        return problems
    if timed != by_trace:
        problems.append(f"{name}: {timed:g} of {by_trace:g} calls have a device time")
    kernels, events = profiled["device_ns"], traced["device_ns"]
    most = kernels + traced["host_ns"] + max(SLACK_NS * timed, traced["own_ns"])
    told = f"{name}: {events / 1e6:.3f} ms between the events"
    if not kernels:
        problems.append(f"{name}: the profiler saw no kernel")
    if events < LOW * kernels:
        problems.append(f"{told}, less than its kernels' {kernels / 1e6:.3f} ms")
    if events > most:
        problems.append(f"{told}, more than kernels and host can make ({most / 1e6:.3f} ms)")
    return problems


def ratios(traced: Sequence[float], untraced: Sequence[float]) -> dict[str, float]:
    """Pair by pair: median and quartiles of traced / untraced. At least two pairs."""
    parts = [a / b for a, b in zip(traced, untraced, strict=True)]
    low, middle, high = statistics.quantiles(parts, n=4)
    return {"pairs": len(parts), "median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}
