"""Runs the workload of a plan on an engine in this process, and notes what the engine itself says."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvgen.plan import Plan
from kvgen.scheduler_side import OPT_OUT
from kvgen.source import Generated
from kvgen.workload import Round

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # log probabilities alone would be compiled: 18 seconds in each process
}
GPU_ENV = {
    "VLLM_KV_CACHE_LAYOUT": "HND",
    "TRITON_F32_DEFAULT": "ieee",  # else its products have half the digits
}
LATE_SECONDS = 0.8
STUCK_STEPS, STUCK_SECONDS = 150, 1.0
"""Engine steps in a row with nothing to show for, and how long they take at least, before a user goes."""


@dataclass
class Request:
    """One request as the engine saw it.

    Attributes:
        id: the engine's own name of it.
        finished: it came to its last token; not so where it was aborted or ended by an error.
        cached: prompt tokens that it did not compute (own prefix cache and connector together).
        hashes: the engine's hashes of its full blocks.
        round: number of its round.
        opted_out: it asked not to be stored.
    """

    id: str
    prompt: list[int]
    round: int
    answer: list[int] = field(default_factory=list)
    finished: bool = False
    cached: int = 0
    hashes: list[bytes] = field(default_factory=list)
    opted_out: bool = False


@dataclass
class Outcome:
    """What a run was, seen from the engine.

    Attributes:
        error: of the start or of the work; "" for none.
        started: the engine came up.
        free_at_first, free_at_last: free KV blocks before the first and after the last request.
        recovered: failed loads that the scheduler heard of.
        seconds: of the work alone.
    """

    requests: list[Request] = field(default_factory=list)
    error: str = ""
    started: bool = False
    free_at_first: int = 0
    free_at_last: int = 0
    recovered: int = 0
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        out = asdict(self)
        for request in out["requests"]:
            request["hashes"] = len(request["hashes"])
        return out


def transfer_config(plan: Plan, made: Generated, place: str) -> dict[str, Any]:
    """``kv_transfer_config`` of one connector whose store is at ``place``."""
    settings = {key: place if value == "@PLACE@" else value for key, value in made.settings.items()}
    transfer = {
        "kv_connector": made.class_name,
        "kv_connector_module_path": made.module,
        "kv_role": plan.kv_role,
        "kv_connector_extra_config": settings,
    }
    if plan.fault == "load-fails":
        transfer["kv_load_failure_policy"] = "recompute"
    return transfer


def engine_arguments(plan: Plan, transfers: list[dict[str, Any]], model: Path | str) -> dict[str, Any]:
    """Keyword arguments for ``LLM(...)``. Several connectors become children of a MultiConnector."""
    transfer = transfers[0]
    if len(transfers) > 1:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": transfers},
        }
    on_gpu = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.02} if plan.cuda else {}
    return {
        **on_gpu,
        "model": str(model),
        "block_size": plan.block,
        "num_gpu_blocks_override": plan.blocks,
        "max_model_len": max(len(p) + r.max_tokens + 1 for r in plan.rounds for p in r.prompts),
        "max_num_seqs": 16,
        "max_num_batched_tokens": plan.budget,
        "enforce_eager": True,
        "enable_prefix_caching": plan.prefix_caching,
        "async_scheduling": plan.async_scheduling,
        "kv_cache_memory_bytes": 64 << 20,
        "seed": 0,
        # half precision makes near ties of a random model flip with the shape of the batch
        "dtype": "float32",
        "disable_log_stats": True,
        "kv_transfer_config": transfer,
    }


_TURNS = 60
_PATIENCE_SECONDS = 20.0


class Work:
    """One engine and the requests that it gets."""

    def __init__(self, llm: Any, outcome: Outcome, healthy: bool = False, between: float = 0.0) -> None:
        """``healthy``: nothing is planted that keeps a save from ending. ``between``: seconds of rest between
        two rounds, for what is written later than it is said to be."""
        self.llm, self.outcome, self._between = llm, outcome, between
        self._patience = _PATIENCE_SECONDS if healthy else 0.0
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self._open: dict[str, Request] = {}
        self.outcome.free_at_first = self._free()

    def _free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def run(self, rounds: tuple[Round, ...]) -> None:
        for number, part in enumerate(rounds):
            if part.reset and number:
                self.llm.reset_prefix_cache()
            time.sleep(max(part.pause, self._between if number else 0.0))
            numbers = range(len(part.prompts))
            for batch in [numbers] if part.together else [[one] for one in numbers]:
                self._batch(batch, part, number)
        self.outcome.free_at_last = self._free()

    def _batch(self, batch: Sequence[int], part: Round, number: int) -> None:
        """``batch``: numbers of the round's prompts that are submitted at once."""
        from vllm import SamplingParams

        for i, at in enumerate(batch):
            prompt, out = list(part.prompts[at]), at in part.opted_out
            asks = {"kv_transfer_params": {OPT_OUT: True}} if out else None
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=part.max_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args=asks,
            )
            name = f"{number}-{len(self.outcome.requests)}-{i}"
            given: dict[str, Any] = {"prompt_token_ids": prompt}
            if part.salts and part.salts[at]:
                given["cache_salt"] = part.salts[at]
            inner = self.engine.add_request(name, given, sampling)
            request = Request(inner or name, prompt, number, opted_out=out)
            self.outcome.requests.append(request)
            self._open[name] = request
            self._note_hashes()
        idle = steps = 0
        last = time.monotonic()
        while self.engine.has_unfinished_requests() and (
            idle < STUCK_STEPS or time.monotonic() - last < STUCK_SECONDS
        ):
            if part.abort_after is not None and steps == part.abort_after:
                self.engine.abort_request(list(self._open))
            idle, last = (0, time.monotonic()) if self._step() else (idle + 1, last)
            steps += 1
        if self._open and self.engine.has_unfinished_requests():
            self.engine.abort_request(list(self._open))
        self._open.clear()
        self._settle()

    def _step(self) -> bool:
        """One engine step; whether it gave anything."""
        outputs = self.engine.step()
        self._note_hashes()
        for output in outputs:
            request = self._open.get(output.request_id)
            if request is None:
                continue
            request.answer = list(output.outputs[0].token_ids)
            request.cached = int(output.num_cached_tokens or 0)
            if output.finished:
                request.finished = output.outputs[0].finish_reason == "length"
                del self._open[output.request_id]
        if not outputs:
            time.sleep(0.003)  # an engine that waits would step as fast as it can
        return bool(outputs)

    def _note_hashes(self) -> None:
        for request in self._open.values():
            if request.id in self.scheduler.requests:
                request.hashes = list(self.scheduler.requests[request.id].block_hashes)

    def _settle(self) -> None:
        """Lets asynchronous saves come to their end, as a server between two requests would. A healthy
        connector's do, however slow the machine is; others' may never."""
        last = time.monotonic() + self._patience
        for turn in itertools.count():
            if not self.scheduler.has_requests() or (turn >= _TURNS and time.monotonic() > last):
                break
            self.engine.step()
            time.sleep(0.002)
        time.sleep(0.03)


def run(
    plan: Plan, arguments: dict[str, Any], outcome: Outcome, started: Callable[[], None] = lambda: None
) -> None:
    """Starts the engine, does the work, stops the engine. Never raises: errors stand in the outcome.

    Args:
        started: called when the engine is up, before any work.
    """
    llm = None
    handler = _Recovered(outcome)
    logging.getLogger("vllm").addHandler(handler)
    with _one_collection():
        try:
            from vllm import LLM

            llm = LLM(**arguments)
            outcome.started = True
            started()
            began = time.monotonic()
            rest = LATE_SECONDS if plan.late else 0.0
            Work(llm, outcome, plan.planted is None, rest).run(plan.rounds)
            outcome.seconds = time.monotonic() - began
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                _stop(llm)
            llm = None
            logging.getLogger("vllm").removeHandler(handler)


def _stop(llm: Any) -> None:
    """Ends an engine so that the next one in this process starts clean."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import kv_transfer_state

    try:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
    finally:
        del llm
        gc.collect()
        # a worker that failed half way leaves its connector behind, and so does a connector whose shutdown
        # raises: the next engine would reuse it
        try:
            kv_transfer_state.ensure_kv_transfer_shutdown()
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
            cleanup_dist_env_and_memory()


class _Recovered(logging.Handler):
    """Counts what the scheduler says of failed loads."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(logging.WARNING)
        self._outcome = outcome

    def emit(self, record: logging.LogRecord) -> None:
        if "KV load failure" in record.getMessage():
            self._outcome.recovered += 1


@contextlib.contextmanager
def _one_collection() -> Iterator[None]:
    """vLLM collects garbage nine times in an engine's life, most of what a small run took: once is enough."""
    collect = gc.collect
    gc.collect = lambda *_, **__: 0  # type: ignore[assignment]
    try:
        yield
    finally:
        gc.collect = collect
        gc.collect()
