"""CUDA graphs of each worker: the mode that was asked for, the one that was used, and why."""

from __future__ import annotations

from kvtrace.ledger.run import Engine, Run, Worker
from kvtrace.report import model
from kvtrace.report.shape import row
from kvtrace.trace.format import MODES

DEFAULT = "default"
NONE = "NONE"
_FULL = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def graph_rows(run: Run) -> list[model.GraphRow]:
    """One for each worker that ran a step where there are CUDA graphs, or a graph mode was seen."""
    return [
        _row(engine, worker)
        for engine in run.engines
        for worker in engine.workers
        if worker.steps and (engine.facts.platform == "cuda" or max(worker.modes, default=0) > 0)
    ]


def asked_for(engine: Engine) -> str:
    """The graph mode that the command names, DEFAULT where it names none, "" where that is not known. With
    --enforce-eager none is asked for, whatever else is named."""
    if engine.facts.enforce_eager:
        return NONE
    return _named(engine) or (DEFAULT if engine.args or engine.facts.known else "")


def _named(engine: Engine) -> str:
    return str(engine.args.get("compilation_config.cudagraph_mode") or "")


def used_by(engine: Engine, worker: Worker) -> str:
    """The graph mode of a worker when its first step began, "" unknown."""
    return worker.graphs.mode or engine.facts.cudagraph_mode or ""


def runner_of(worker: Worker) -> str:
    """V1 | V2 | "" unknown."""
    known = worker.graphs.v2
    return "" if known is None else "V2" if known else "V1"


def _row(engine: Engine, worker: Worker) -> model.GraphRow:
    return row(
        model.GraphRow, worker.graphs,
        process=worker.process, rank=worker.rank, runner=runner_of(worker), asked=asked_for(engine),
        configured=engine.facts.cudagraph_mode, used=used_by(engine, worker), why=_why(engine, worker),
        capturing_steps=worker.capturing_steps, modes=[_mode(worker, mode) for mode in sorted(worker.modes)],
    )  # fmt: skip


def _mode(worker: Worker, mode: int) -> model.ModeRow:
    steps = worker.modes[mode]
    tokens, padded = worker.batches.get(mode, (0, 0))
    bodies, saves = worker.python.get(mode, (0, 0))
    return {
        "mode": MODES.get(mode, "unknown"),
        "steps": steps,
        "tokens": tokens,
        "padded": padded,
        "layer_steps": steps * len(worker.kv_layers),
        "bodies": bodies,
        "saves": saves,
    }


def _why(engine: Engine, worker: Worker) -> list[str]:
    platform = engine.facts.platform
    if platform and platform != "cuda" and max(worker.modes, default=0) <= 0:
        return [f"this platform ({platform}) has no CUDA graphs"]
    if engine.facts.enforce_eager:
        return ["enforce_eager switches them off"]
    asked, configured = _named(engine), engine.facts.cudagraph_mode or ""
    used, connector = used_by(engine, worker), worker.connector or engine.connector
    before = asked or "vLLM's default"
    why: list[str] = []
    if connector and connector.requires_piecewise and configured == "PIECEWISE" and asked in ("", *_FULL):
        why.append(
            f"{connector.cls} declares requires_piecewise_for_cudagraph: "
            f"vLLM takes PIECEWISE instead of {before}"
        )
    elif asked and configured and asked != configured:
        why.append(f"vLLM changed {asked} to {configured}, going by {_suspects(worker)}")
    if used != configured and configured and used:
        why.append(
            f"vLLM changed {configured} to {used} when the worker was ready, going by {_suspects(worker)}"
        )
    if not why and not asked and used:
        why.append(f"{used} is vLLM's default here")
    if used in _FULL and connector and connector.requires_piecewise is False and connector.saves_per_layer:
        why.append(
            f"{connector.cls} saves layer by layer and does not declare requires_piecewise_for_cudagraph, so "
            "vLLM keeps FULL graphs"
        )
    return why


def _suspects(worker: Worker) -> str:
    backends = sorted(set(worker.facts.backends.values()))
    attention = f"the attention backend ({', '.join(backends)})" if backends else "the attention backend"
    return f"what {attention}, the model or the platform supports"
