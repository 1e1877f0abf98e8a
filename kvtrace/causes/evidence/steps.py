"""Counts over the workers' steps that several rules quote."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvtrace.ledger.run import Run, Worker
from kvtrace.trace.ops import UPDATES
from kvtrace.words import count, listed


@dataclass(frozen=True)
class Bodies:
    """Attention ops over KV-owning layers: layer-steps, and the names of the ops that ran."""

    eligible: int
    ran: int
    direct: int
    op: str

    @property
    def share(self) -> str:
        """``unified_attention_with_output ran in 48/48 layer-steps``."""
        return f"{self.op} ran in {count(self.ran)}/{count(self.eligible)} layer-steps"


def bodies(run: Run) -> Bodies:
    ops = run.ops[~run.ops["op"].isin([op.name for op in UPDATES])]
    best = ops.groupby(["engine", "pid", "rank", "layer"]).agg(
        {"eligible": "max", "fired": "max", "direct": "max"}
    )
    owning = {(w.engine, w.pid, w.rank, layer) for w in run.workers() for layer in w.kv_layers}
    kept = best[[key in owning for key in best.index]] if len(best) else best
    names = listed(sorted(set(ops[ops["fired"] > 0]["op"]))) or "the attention op"
    return Bodies(int(kept["eligible"].sum()), int(kept["fired"].sum()), int(kept["direct"].sum()), names)


def calls(run: Run, hook: str) -> tuple[int, int, int, int]:
    """(eligible, fired, with work, raised) of a worker's hook, summed over ranks and layers."""
    rows = run.hooks[(run.hooks["hook"] == hook) & (run.hooks["rank"] >= 0)]
    return tuple(int(rows[name].sum()) for name in ("eligible", "fired", "with_work", "raised"))  # type: ignore[return-value]


def real_steps(run: Run) -> int:
    """Real forward steps, counted once per engine where its ranks agree."""
    return sum(max((worker.steps for worker in engine.workers), default=0) for engine in run.engines)


def modes(workers: list[Worker]) -> dict[int, int]:
    """Graph mode -> real worker-steps."""
    found: Counter[int] = Counter()
    for worker in workers:
        found.update(worker.modes)
    return found


def skipped(run: Run, skip: str) -> int:
    """Attention bodies in real steps around which the hooks did not run for this reason."""
    rows = run.skips[run.skips["skip"] == skip]
    return int(rows["layer_steps"].sum())


def product(run: Run) -> str:
    """`` (4 layers x 2 ranks x 212 steps)`` where the numbers multiply, else ""."""
    if len(run.engines) != 1 or not run.engines[0].workers:
        return ""
    engine = run.engines[0]
    layers = {len(worker.kv_layers) for worker in engine.workers}
    steps = {worker.steps for worker in engine.workers}
    if len(layers) != 1 or len(steps) != 1:
        return ""
    ranks = f"{len(engine.workers)} rank{'s' if len(engine.workers) > 1 else ''}"
    return f" ({count(layers.pop())} layers x {ranks} x {count(steps.pop())} steps)"
