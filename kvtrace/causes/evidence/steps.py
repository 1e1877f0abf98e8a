"""Counts over the workers' steps that several rules quote."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvtrace.ledger.run import Run, Worker
from kvtrace.trace.ops import UPDATES
from kvtrace.words import count, listed

_UPDATES = {op.name for op in UPDATES}


@dataclass(frozen=True)
class Bodies:
    """Attention ops over KV-owning layers: layer-steps, and the names of the ops that ran."""

    eligible: int
    ran: int
    op: str

    @property
    def share(self) -> str:
        """``unified_attention_with_output ran in 48/48 layer-steps``."""
        return f"{self.op} ran in {count(self.ran)}/{count(self.eligible)} layer-steps"


def bodies(run: Run) -> Bodies:
    owning = {(w.engine, w.pid, w.rank, layer) for w in run.workers() for layer in w.kv_layers}
    best: dict[tuple[object, ...], tuple[int, int]] = {}
    names = set()
    for one in run.ops:
        if one.op in _UPDATES:
            continue
        if one.fired > 0:
            names.add(one.op)
        key = one.engine, one.pid, one.rank, one.layer
        if key in owning:
            eligible, fired = best.get(key, (0, 0))
            best[key] = max(eligible, one.eligible), max(fired, one.fired)
    eligible, fired = map(sum, zip(*best.values(), strict=True)) if best else (0, 0)
    return Bodies(eligible, fired, listed(sorted(names)) or "the attention op")


def calls(run: Run, hook: str) -> tuple[int, int, int, int]:
    """(eligible, fired, with work, raised) of a worker's hook, summed over ranks and layers."""
    found = [one for one in run.hooks if one.hook == hook and one.rank >= 0]
    return (
        sum(one.eligible for one in found), sum(one.fired for one in found),
        sum(one.with_work for one in found), sum(one.raised for one in found),
    )  # fmt: skip


def modes(workers: list[Worker]) -> dict[int, int]:
    """Graph mode -> real worker-steps."""
    found: Counter[int] = Counter()
    for worker in workers:
        found.update(worker.modes)
    return found


def skipped(run: Run, skip: str) -> int:
    """Attention bodies in real steps around which the hooks did not run for this reason."""
    return sum(one.layer_steps for one in run.skips if one.skip == skip)
