"""In which layers, and on which ranks, less was saved than in the others."""

from __future__ import annotations

from kvtrace.gate.layers import group_of, index_of, spelled
from kvtrace.report.model import Report
from kvtrace.words import count, listed


def less_in(report: Report) -> str:
    """``model.layers.{3}.self_attn.attn: 0 of 960 prompt tokens saved``; "" where all kept the same."""
    rows = report.get("layers", [])
    if not rows:
        return ""
    first = rows[0]
    worst = [one for one in rows if (one["engine"], one["tokens"]) == (first["engine"], first["tokens"])]
    layers = list(dict.fromkeys(one["layer"] for one in worst))
    groups = {group_of(layer) for layer in layers}
    if len(groups) == 1 and all(map(index_of, layers)):
        names = spelled(groups.pop(), map(index_of, layers), False)
    else:
        names = listed(layers)
    ranks = ", ".join(map(str, sorted({one["rank"] for one in worst})))
    said = f"{count(first['tokens'])} of {count(first['most'])} prompt tokens"
    return f"{names} on rank {ranks}: {said} saved"
