"""Coverage held against what was asked for: grouped by layers and ranks that fell short alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtrace.gate.baseline import CoverageRow, subject
from kvtrace.gate.cells import CallCounts, by_layers
from kvtrace.gate.contract import rounded
from kvtrace.gate.layers import spelled, within
from kvtrace.gate.outcome import Check
from kvtrace.grouped import grouped


@dataclass(frozen=True)
class Short:
    """Cells of one hook that fell short alike; `rank` is None where all ranks did (or there are none)."""

    rank: int | None
    layers: str
    share: float
    fired: int
    eligible: int


def too_few(short: Short, name: str, asked: float, cause: str | None, remedy: str) -> Check:
    """The failure that `short` is, where a share of `asked` was wanted."""
    steps = "layer-steps" if short.layers else "steps"
    text = f"called in {short.fired} of {short.eligible} {steps}"
    return Check(
        "coverage", name, "failed", asked, short.share,
        layers=short.layers, rank=short.rank, text=text, cause=cause, remedy=remedy,
    )  # fmt: skip


def matching(row: CoverageRow, cells: Iterable[CallCounts]) -> list[CallCounts]:
    """The cells that a row of a baseline speaks of."""
    what, name = subject(row)
    only, ranks = row.get("only"), row.get("ranks")
    return [
        cell
        for cell in cells
        if cell.what == what
        and cell.name == name
        and cell.group == row.get("layers")
        and (only is None or within(cell.index, only))
        and (ranks is None or cell.rank in ranks)
    ]


def shortfalls(cells: list[CallCounts], falls_short: Callable[[CallCounts], bool]) -> list[Short]:
    """The cells for which `falls_short` holds, as few groups as their layers and ranks allow."""
    out: list[Short] = []
    for group, members in grouped(cells, lambda cell: cell.group):
        for share, bad in grouped(filter(falls_short, members), lambda cell: rounded(cell.share)):
            for indices, ranks in by_layers(bad).items():
                everywhere = set(ranks) == {cell.rank for cell in members}
                for rank in [None] if everywhere else ranks:
                    part = [
                        cell for cell in bad if cell.index in indices and (everywhere or cell.rank == rank)
                    ]
                    everything = {cell.index for cell in members if everywhere or cell.rank == rank}
                    layers = "" if group is None else spelled(group, indices, indices == everything)
                    out.append(
                        Short(rank, layers, share, sum(c.fired for c in part), sum(c.eligible for c in part))
                    )
    return sorted(out, key=lambda short: (short.rank is None, short.rank or 0, short.layers, short.share))
