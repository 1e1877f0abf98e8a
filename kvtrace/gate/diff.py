"""Two reports side by side: settings, targets, coverage, ledgers and findings that differ."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from kvtrace.gate.cells import CallCounts, cells
from kvtrace.gate.contract import rounded
from kvtrace.gate.explain import worst
from kvtrace.gate.limits import limits_of
from kvtrace.gate.outcome import Change, Difference, Value
from kvtrace.gate.shares import DECODE, grade_of, shares, without
from kvtrace.grouped import leaves
from kvtrace.report.model import EngineRow, FindingRow, LedgerRow, Report
from kvtrace.terms import FAULT, KEPT, LOCAL_HIT, NOTE, PENDING, severity_order

_EPSILON = 0.0005
"""Shares that print alike are alike."""
_RUN = ("vllm", "torch", "python", "kvtrace")
_ENGINE = (
    "platform",
    "model",
    "tp",
    "pp",
    "block_size",
    "prefix_caching",
    "max_num_batched_tokens",
    "chunked_prefill",
    "enforce_eager",
    "cudagraph_mode",
    "kv_layers",
    "ranks",
)
_CONNECTOR = ("name", "class", "module", "file", "role")


def difference(a: Report, b: Report, where_a: str, where_b: str) -> Difference:
    """What differs from `a` to `b`. Step counts and times are left out: no two runs share them."""
    return Difference(
        a=where_a,
        b=where_b,
        settings=[*_versions(a, b), *_engines(a, b), *_flags(a["run"]["command"], b["run"]["command"])],
        targets=_targets(a, b),
        coverage=_coverage(cells(a), cells(b)),
        saves=_ledger(a["ledger"]["saves"], b["ledger"]["saves"], _leave_out(a, b)),
        loads=_ledger(a["ledger"]["loads"], b["ledger"]["loads"]),
        findings=_findings(a["findings"], b["findings"]),
        verdicts=(a["verdict"], b["verdict"]),
        limits=(limits_of(a), limits_of(b)),
    )


# ------------------------------------------------------------------------------ settings


def _versions(a: Report, b: Report) -> list[Change]:
    before: dict[str, Any] = dict(a["run"])
    after: dict[str, Any] = dict(b["run"])
    names = {"vllm": "vLLM", "python": "Python"}
    return [Change(names.get(key, key), before[key], after[key]) for key in _RUN if before[key] != after[key]]


def _engines(a: Report, b: Report) -> list[Change]:
    one, two = a["run"]["engines"], b["run"]["engines"]
    changes = []
    if len(one) != len(two):
        changes.append(Change("engines", len(one), len(two), "count"))
    for number in range(min(len(one), len(two))):
        prefix = f"engine {number}: " if max(len(one), len(two)) > 1 else ""
        before, after = _settings(one[number]), _settings(two[number])
        changes += [
            Change(prefix + key, before[key], after[key]) for key in before if before[key] != after[key]
        ]
    return list(dict.fromkeys(changes))


def _settings(engine: EngineRow) -> dict[str, Value]:
    plain: dict[str, Any] = dict(engine)
    connector: dict[str, Any] = dict(engine["connector"] or {})
    found: dict[str, Value] = {key.replace("_", " "): _word(plain[key]) for key in _ENGINE}
    for key in _CONNECTOR:
        found["connector" if key == "name" else f"connector {key}"] = _word(connector.get(key))
    return found


def _word(value: object) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _flags(a: Sequence[str], b: Sequence[str]) -> list[Change]:
    """Options of the command (``--name value``, ``--name=value``) that differ."""
    before, after = _options(a), _options(b)
    return [
        Change(name, before.get(name), after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _options(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    last = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            found.setdefault(name, []).append(value if equals else "")
            last = None if equals else name
        elif last is not None:
            found[last][-1] = word
            last = None
    flat: dict[str, str] = {}
    for name, values in found.items():
        inner = _json(values[0]) if len(values) == 1 else None
        flat.update(
            (inner and {f"{name} {key}": value for key, value in inner.items()})
            or {name: ", ".join(values) or "given"}
        )
    return flat


def _json(text: str) -> dict[str, str] | None:
    """The values of an argument that is a JSON object, by their keys with dots between; None of any other."""
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {key: one if isinstance(one, str) else json.dumps(one) for key, one in leaves(value)}


# ------------------------------------------------------------------------------- targets


def _targets(a: Report, b: Report) -> list[Change]:
    before = {one["id"]: one for one in a["instrumentation"]["targets"]}
    after = {one["id"]: one for one in b["instrumentation"]["targets"]}
    changes = []
    for name in sorted({*before, *after}):
        was = before[name]["status"] if name in before else None
        now = after[name]["status"] if name in after else None
        if was == now or "found" not in (was, now):
            continue
        gone = was == "found"
        target = (after if name in after else before)[name]
        place = f"{target['module']}.{target['attr']}"
        words = ": ".join(filter(None, (place, target["detail"] if gone and name in after else "")))
        changes.append(Change(name, was, now, verdict="worse" if gone else "better", text=words))
    return changes


# ------------------------------------------------------------------------------ coverage


def _coverage(a: list[CallCounts], b: list[CallCounts]) -> list[Change]:
    before, after = _worst(a), _worst(b)
    changes = []
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key), after.get(key)
        if (was or 0.0) == (now or 0.0):
            continue  # or never called in one run, not listed in the other
        text = "only in A" if now is None else "only in B" if was is None else ""
        if was is not None and now is not None and abs(was - now) < _EPSILON and (was < 1) == (now < 1):
            continue
        verdict: Any = "better" if (now or 0.0) > (was or 0.0) else "worse"
        changes.append(Change(key[1], was, now, "share", layers=key[2], verdict=verdict, text=text))
    return changes


def _worst(found: list[CallCounts]) -> dict[tuple[str, str, str], float]:
    """(hook or op, name, layer group) -> its least share over layers and ranks."""
    out: dict[tuple[str, str, str], float] = {}
    for cell in found:
        key = (cell.what, cell.name, cell.group or "")
        out[key] = min(out.get(key, 1.0), rounded(cell.share))
    return out


# ------------------------------------------------------------------------------- ledgers


def _leave_out(a: Report, b: Report) -> str:
    """Generated tokens, where neither run offers them: how long the answers are is not the connector's."""
    both = all(shares(one["ledger"]["saves"]).get(DECODE) for one in (a, b))
    return DECODE if both else ""


def _ledger(a: LedgerRow, b: LedgerRow, leave_out: str = "") -> list[Change]:
    before, after = without(shares(a), leave_out), without(shares(b), leave_out)
    if not before and not after:
        return []
    changes = []
    good = [name for name in KEPT if name in before or name in after]
    rest = sorted(
        {*before, *after} - set(good), key=lambda one: (-abs(after.get(one, 0.0) - before.get(one, 0.0)), one)
    )
    for name in [*good, *rest]:
        was, now = before.get(name, 0.0), after.get(name, 0.0)
        if abs(was - now) < _EPSILON:
            continue
        up: Any = "better" if name in KEPT else "worse"
        down: Any = "worse" if name in KEPT else "better"
        if name in (LOCAL_HIT, PENDING):
            up = down = ""
        changes.append(Change(name, was, now, "share", verdict=up if now > was else down))
    grades = grade_of(a), grade_of(b)
    if all(grades) and grades[0] != grades[1]:
        changes.append(Change("grade of what was saved", *grades))
    elif not all(grades) and a["trust"] != b["trust"]:
        changes.append(Change("trust", a["trust"], b["trust"]))
    return changes


# ------------------------------------------------------------------------------ findings


def _findings(a: list[FindingRow], b: list[FindingRow]) -> list[Change]:
    before, after = worst(a), worst(b)
    changes = []
    for name in dict.fromkeys([*after, *before]):
        was, now = before.get(name), after.get(name)
        if was and now and was["severity"] == now["severity"]:
            continue
        worse = now is not None and (
            was is None or severity_order(now["severity"]) < severity_order(was["severity"])
        )
        shown = now or was
        assert shown is not None
        words = shown["title"]
        if now and now["severity"] == FAULT and now["remedy"]:
            words = f"{words} Remedy: {now['remedy'][0]}"
        verdict: Any = ("worse" if worse else "better") if shown["severity"] != NOTE else ""
        old, new = (one["severity"] if one else None for one in (was, now))
        changes.append(Change(name, old, new, verdict=verdict, text=words))
    return changes
