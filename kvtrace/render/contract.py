"""What a baseline promises, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.gate.baseline import Baseline
from kvtrace.gate.shares import DECODE, kept, without
from kvtrace.render.layout import names
from kvtrace.terms import FAULT, LIMIT
from kvtrace.words import clean, percent, plural


def contract_lines(baseline: Baseline, path: str, limits: Sequence[str]) -> list[str]:
    """Said once it is written: what it holds, what it lets pass, and the limits of its run's report."""
    hooks = {row["hook"] for row in baseline["coverage"]["hooks"]}
    partly = [row for row in baseline["coverage"]["hooks"] if row["share"] < 1]
    groups = list(dict.fromkeys(row["layers"] for row in baseline["coverage"]["hooks"] if "layers" in row))
    parts = [plural(len(baseline["engines"]), "engine"), plural(len(hooks), "hook")]
    if groups:
        parts.append(f"layers {names(groups, 3)}")
    saves = without(baseline["ledger"]["saves"], DECODE)  # as check judges it
    parts.append(f"{percent(kept(saves))} of the tokens stored or loaded")
    lines = [f"wrote {clean(path)}: {', '.join(parts)}"]
    if partly:
        lines.append(
            "  not complete in this run, required as they are: "
            + names((f"{row['hook']} {percent(row['share'])}" for row in partly), 6)
        )
    unknown = list(dict.fromkeys(row["hook"] for row in baseline["coverage"]["hooks"] if row["work"] is None))
    if unknown:
        lines.append(
            "  not guarded, as it is not known whether these calls had anything to store or load: "
            + names(unknown, 6)
        )
    for severity in (FAULT, LIMIT):
        found = [one["id"] for one in baseline["findings"] if one["severity"] == severity]
        if found:
            lines.append(f"  allows {plural(len(found), severity)}: {names(found)}")
    return [*lines, *(f"  limits of this run: {clean(one)}" for one in limits)]
