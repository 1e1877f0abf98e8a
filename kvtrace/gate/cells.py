"""A report's coverage as one list of cells: a hook or op, in one layer, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvtrace.gate.layers import group_of, index_of
from kvtrace.gate.mute import may_hide_work
from kvtrace.report.model import Report
from kvtrace.trace import hooks

EVERY_STEP = frozenset(hook.name for hook in hooks.TABLE if hook.always_due)
"""Due in every step of a connector's life; all other hooks come when there is a reason for them."""

_CAN_WORK = frozenset(
    hook.name
    for hook in hooks.TABLE
    if hook.reads_metadata or hook in (hooks.BIND_METADATA, hooks.BUILD_METADATA)
)
"""Those that something to store or load can be told of; the others never have work."""


@dataclass(frozen=True)
class CallCounts:
    """Counts of one hook or op; ``work`` is None where it is not known whether a call had any."""

    what: Literal["hook", "op"]
    name: str
    layer: str | None
    rank: int | None
    eligible: int
    fired: int
    work: int | None

    @property
    def group(self) -> str | None:
        return None if self.layer is None else group_of(self.layer)

    @property
    def index(self) -> str:
        return "" if self.layer is None else index_of(self.layer)

    @property
    def share(self) -> float:
        """Calls in due steps; a cell that was never due is not covered."""
        return min(1.0, self.fired / self.eligible) if self.eligible > 0 else 0.0


def cells(report: Report) -> list[CallCounts]:
    coverage, mute = report["coverage"], may_hide_work(report)
    found = []
    for row in coverage["hooks"]:
        unknown = mute and not row["with_work"] and row["hook"] in _CAN_WORK
        work = None if unknown else row["with_work"]
        found.append(
            CallCounts("hook", row["hook"], row["layer"], row["rank"], row["eligible"], row["fired"], work)
        )
    found += [
        CallCounts("op", row["op"], row["layer"], row["rank"], row["eligible"], row["fired"], 0)
        for row in coverage["ops"]
    ]
    return found


def by_layers(cells: Sequence[CallCounts]) -> dict[frozenset[str], list[int | None]]:
    """The layers (indices) that the cells of a rank are of -> the ranks whose cells are of exactly these."""
    sets: dict[frozenset[str], list[int | None]] = {}
    for rank in dict.fromkeys(cell.rank for cell in cells):
        sets.setdefault(frozenset(cell.index for cell in cells if cell.rank == rank), []).append(rank)
    return sets
