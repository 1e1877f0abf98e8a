"""In which layers, and on which ranks, less was saved than in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrace.gate.layers import together
from kvtrace.words import count, listed

if TYPE_CHECKING:
    from kvtrace.report.model import LayerKept, Report


def least_saved(report: Report) -> tuple[list[LayerKept], list[str], list[int]]:
    """The layers and ranks of an engine that kept least, their layers, their ranks; nothing where all kept
    the same."""
    rows = report.get("layers", [])
    worst = [one for one in rows if (one["engine"], one["tokens"]) == (rows[0]["engine"], rows[0]["tokens"])]
    return worst, list(dict.fromkeys(one["layer"] for one in worst)), sorted({one["rank"] for one in worst})


def less_in(report: Report) -> str:
    """``model.layers.{3}.self_attn.attn: 0 of 960 prompt tokens saved``; "" where all kept the same."""
    worst, layers, ranks = least_saved(report)
    if not worst:
        return ""
    names = together(layers) or listed(layers)
    said = f"{count(worst[0]['tokens'])} of {count(worst[0]['most'])} prompt tokens"
    return f"{names} on rank {', '.join(map(str, ranks))}: {said} saved"
