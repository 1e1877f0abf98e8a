"""Rows: processes, parallelism, schedulers, and connectors in connectors."""

from __future__ import annotations

from typing import Any

from matrix_rows.row import CHUNKS, MODEL, SHORT, STORE, Connector, Row, generate, multi

PROMPTS = generate("topologies", 64, 160, 96, 256, together=False)
AGAIN = generate("topologies", 64, 160, together=False)
"""Of those the first two once more: they are loaded."""
TOGETHER = generate("together", 96, 128, 224, 64, max_tokens=6)
BOTH = (PROMPTS, AGAIN)

DEAD = Connector("DownStore", "saves", extra={"path": STORE, "unit": 64},
                 first=frozenset({"exception-swallowed"}))  # fmt: skip
SWALLOWED, SHORTENED = DEAD.first, SHORT.first

TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
PIECEWISE: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}
"""In eager mode this build does not make the buffers that pass between the stages."""


def drafts(**more: Any) -> dict[str, Any]:
    return {"speculative_config": {"num_speculative_tokens": 2, **more}}


def _processes() -> tuple[Row, ...]:
    return (
        Row("in-process", "One process", BOTH, shows=("loaded",)),
        Row("multi-process", "vLLM's own processes", BOTH, how="many", shows=("loaded",)),
        Row("serve", "Server", BOTH, how="serve", shows=("loaded",)),
        Row("two-api-servers", "Two API servers", (TOGETHER,), how="serve",
            engine={"api_server_count": 2}),
        Row("two-engines", "Two engines in one script, each in processes of its own",
            (PROMPTS, {**TOGETHER, "engine": 1}), how="many", engines=({}, {}), shows=("engines",)),
        Row("two-engines-one-process", "Two engines at once in one process",
            (PROMPTS, {**TOGETHER, "engine": 1}), alone=True, engines=({}, {}), shows=("engines",)),
        Row("producer-consumer", "A producer, and a consumer of its store",
            (PROMPTS, {**AGAIN, "engine": 1}), how="many", shows=("engines", "loaded"),
            engines=({"role": "kv_producer"}, {"role": "kv_consumer"})),
    )  # fmt: skip


def _parallel() -> tuple[Row, ...]:
    return (
        Row("tp2", "Tensor parallel size 2", BOTH, how="many", engine=TWO_RANKS, shows=("ranks", "loaded")),
        Row("pp2", "Pipeline parallel size 2", BOTH, how="many", shows=("ranks",),
            engine={"pipeline_parallel_size": 2, **PIECEWISE}),
        Row("dp2", "Data parallel size 2", (PROMPTS, TOGETHER), how="serve", shows=("engines",),
            engine={"data_parallel_size": 2}),
        Row("external-launcher", "External launcher, tensor parallel size 2", BOTH, how="torchrun",
            engine={**TWO_RANKS, "distributed_executor_backend": "external_launcher"}),
        Row("ray", "Ray, tensor parallel size 2", BOTH, how="many",
            engine={**TWO_RANKS, "distributed_executor_backend": "ray"},
            note="with Ray installed vLLM refuses its CPU platform (`current platform cpu does not support "
                 "ray.`, vllm/v1/executor/ray_utils.py). A Ray worker gets kvtrace by its environment: "
                 "tests/launch/test_child_environment.py holds which variables Ray hands on"),
    )  # fmt: skip


def _schedulers() -> tuple[Row, ...]:
    return (
        Row("async-scheduling", "Asynchronous scheduling on", (TOGETHER, PROMPTS),
            engine={"async_scheduling": True}),
        Row("sync-scheduling", "Asynchronous scheduling off", (TOGETHER, PROMPTS),
            engine={"async_scheduling": False}),
        Row("ngram", "Speculation by n-grams", (TOGETHER, PROMPTS), alone=True,
            engine=drafts(method="ngram", prompt_lookup_max=3)),
        Row("draft-model", "Speculation by a draft model", (TOGETHER, PROMPTS), alone=True,
            engine=drafts(method="draft_model", model=MODEL)),
        Row("eagle", "Speculation by EAGLE", (TOGETHER, PROMPTS), alone=True, model="eagle",
            engine=drafts(method="eagle", model=f"{MODEL}/draft")),
    )  # fmt: skip


def _connectors() -> tuple[Row, ...]:
    wide = Connector("ChunkStore", "chunk_store", extra={"path": STORE, "unit": 64})
    return (
        Row("multi", "MultiConnector of two", BOTH, at_rest=False, healthy=multi(CHUNKS, wide),
            planted=multi(CHUNKS, DEAD, first=SWALLOWED), note="planted: the second one is dead"),
        Row("multi-faulty", "MultiConnector of two, one faulty", BOTH, at_rest=False,
            healthy=multi(CHUNKS, CHUNKS), planted=multi(CHUNKS, SHORT, first=SHORTENED)),
        Row("multi-nested", "MultiConnector in a MultiConnector", BOTH, at_rest=False,
            healthy=multi(multi(CHUNKS, wide), CHUNKS),
            planted=multi(multi(CHUNKS, DEAD), CHUNKS, first=SWALLOWED),
            note="planted: the second one of the inner two is dead"),
        Row("nixl", "NIXL between two engines", BOTH, alone=True,
            healthy=Connector("NixlConnector"), planted=Connector("NixlConnector", first=SHORTENED),
            note="a pair of engines with nixl 1.5.1, on this machine, is a run of "
                 "[real-connectors.md](real-connectors.md)"),
    )  # fmt: skip


ROWS: tuple[Row, ...] = (*_processes(), *_parallel(), *_schedulers(), *_connectors())
