"""CUDA graphs of each worker: the mode that was asked for, the one that was used, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtrace.ledger.run import Engine, Run, Worker
from kvtrace.trace.format import MODES

DEFAULT = "default"
NONE = "NONE"
_FULL = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass(frozen=True)
class ModeUse:
    """The steps of one worker in one mode."""

    mode: str
    steps: int
    tokens: int  # scheduled, in the steps whose padded size is known
    padded: int  # that the model ran in them, padding included
    layer_steps: int  # KV layers times steps
    bodies: int  # of these, with an attention body that ran in Python
    saves: int  # ... with a call of save_kv_layer


@dataclass(frozen=True)
class GraphUse:
    """What became of CUDA graphs in one worker. Modes are "" where unknown."""

    worker: Worker
    runner: str  # V1 | V2 | ""
    asked: str
    configured: str
    used: str
    why: list[str] = field(default_factory=list)
    breakable: bool | None = None
    captured: int | None = None  # graphs, before the first step
    capturing_steps: int = 0  # real steps in which a graph was captured
    modes: list[ModeUse] = field(default_factory=list)


def graph_uses(run: Run) -> list[GraphUse]:
    """One for each worker that ran a step where there are CUDA graphs, or a graph mode was seen."""
    return [
        _use(engine, worker)
        for engine in run.engines
        for worker in engine.workers
        if worker.steps and (engine.facts.platform == "cuda" or max(worker.modes, default=0) > 0)
    ]


def asked_for(engine: Engine) -> str:
    """The graph mode that the command names, DEFAULT where it names none, "" where that is not known. With
    --enforce-eager none is asked for, whatever else is named."""
    if engine.facts.enforce_eager:
        return NONE
    asked = str(engine.args.get("compilation_config.cudagraph_mode") or "")
    return asked or (DEFAULT if engine.args or engine.facts.known else "")


def used_by(engine: Engine, worker: Worker) -> str:
    """The graph mode of a worker when its first step began, "" unknown."""
    return worker.graphs.mode or engine.facts.cudagraph_mode or ""


def runner_of(worker: Worker) -> str:
    """V1 | V2 | "" unknown."""
    known = worker.graphs.v2
    return "" if known is None else "V2" if known else "V1"


def _use(engine: Engine, worker: Worker) -> GraphUse:
    known = worker.graphs
    asked = str(engine.args.get("compilation_config.cudagraph_mode") or "")
    configured = engine.facts.cudagraph_mode or ""
    used = used_by(engine, worker)
    return GraphUse(
        worker=worker,
        runner=runner_of(worker),
        asked=asked_for(engine),
        configured=configured,
        used=used,
        why=_why(engine, worker, asked, configured, used),
        breakable=known.breakable,
        captured=known.captured,
        capturing_steps=worker.capturing_steps,
        modes=[_mode(worker, mode) for mode in sorted(worker.modes)],
    )


def _mode(worker: Worker, mode: int) -> ModeUse:
    steps = worker.modes[mode]
    tokens, padded = worker.batches.get(mode, (0, 0))
    bodies, saves = worker.python.get(mode, (0, 0))
    return ModeUse(
        MODES.get(mode, "unknown"), steps, tokens, padded, steps * len(worker.kv_layers), bodies, saves
    )


def _why(engine: Engine, worker: Worker, asked: str, configured: str, used: str) -> list[str]:
    platform = engine.facts.platform
    if platform and platform != "cuda" and max(worker.modes, default=0) <= 0:
        return [f"this platform ({platform}) has no CUDA graphs"]
    if engine.facts.enforce_eager:
        return ["enforce_eager switches them off"]
    connector = worker.connector or engine.connector
    needs = connector.requires_piecewise if connector else None
    before = asked or "vLLM's default"
    why: list[str] = []
    if needs and configured == "PIECEWISE" and asked in ("", *_FULL):
        why.append(
            f"{connector.cls if connector else 'the connector'} declares requires_piecewise_for_cudagraph: "
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
    if used in _FULL and needs is False and connector is not None and connector.saves_per_layer:
        why.append(
            f"{connector.cls} saves layer by layer and does not declare requires_piecewise_for_cudagraph, so "
            "vLLM keeps FULL graphs"
        )
    return why


def _suspects(worker: Worker) -> str:
    backends = sorted(set(worker.facts.backends.values()))
    attention = f"the attention backend ({', '.join(backends)})" if backends else "the attention backend"
    return f"what {attention}, the model or the platform supports"
