"""Worker side: which step runs, what the worker owns, and when its records go to disk.

Wraps ``WorkerWrapperBase`` (``vllm/v1/worker/worker_base.py`` from 0.11.1), which every executor calls.
"""

from __future__ import annotations

import functools
import json
from array import array
from dataclasses import replace
from types import ModuleType
from typing import Any

from kvtrace.agent.engine.scheduler import PROMPT_ATTRIBUTE, STEP_ATTRIBUTE
from kvtrace.agent.errors import startup
from kvtrace.agent.facts import config_keys, describe
from kvtrace.agent.hooks import held
from kvtrace.agent.hooks.device import DEVICE
from kvtrace.agent.hooks.hook_records import DECLARED_ATTRIBUTE
from kvtrace.agent.kv.caches import CACHES
from kvtrace.agent.prints.prints import PRINTS
from kvtrace.agent.state import AGENT, clock
from kvtrace.agent.steps import graphs
from kvtrace.agent.watch import records as watch_records
from kvtrace.agent.watch.policy import POLICY
from kvtrace.agent.watch.states import STATES
from kvtrace.agent.wrap import frames
from kvtrace.trace import rows
from kvtrace.trace.format import DETAIL_IS_OP, UNKNOWN, Flag, Kind, Role, pack_head
from kvtrace.trace.writer import CallSums

_EXEC = pack_head(Kind.EXEC, Role.WORKER)
_next_ordinal = 1


def wrap_worker(module: ModuleType) -> None:
    cls = module.WorkerWrapperBase
    _wrap_execute(cls)
    _wrap_initialize(cls)
    startup.watch(cls)


def _wrap_initialize(cls: Any) -> None:
    original = cls.__dict__.get("initialize_from_config")
    if original is None:
        return

    @functools.wraps(original)
    def initialize_from_config(self: Any, kv_cache_configs: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, kv_cache_configs, *args, **kwargs)
        try:
            _ready(self, kv_cache_configs[self.global_rank])
        except Exception:
            AGENT.failed("initialize_from_config")
        return result

    cls.initialize_from_config = initialize_from_config


def _ready(wrapper: Any, kv_cache_config: Any) -> None:
    global _next_ordinal
    held.of_worker(wrapper)
    fact = describe.worker(wrapper, kv_cache_config, _next_ordinal)
    _next_ordinal += 1
    AGENT.set_role(Role.WORKER, f"worker-r{fact.rank}")
    context = describe.get(wrapper, "vllm_config.compilation_config.static_forward_context", {})
    CACHES.configure(kv_cache_config, context)
    sizes = {name: CACHES.slot_bytes(layer) for name, layer in CACHES.layers.items()}
    AGENT.fact(replace(fact, slot_bytes={name: size for name, size in sizes.items() if size}), Role.WORKER)
    STATES.configure(kv_cache_config, context, fact.other_layers)
    PRINTS.open(wrapper, kv_cache_config)
    DEVICE.open(len(fact.kv_layers))
    _wrap_sampling(wrapper.worker)


def _wrap_sampling(worker: Any) -> None:
    """``sample_tokens`` is the second half of a step (0.11.1+); wrapped on the instance,
    because it may be any platform's worker class."""
    original = getattr(worker, "sample_tokens", None)
    if original is None or "sample_tokens" in vars(worker):
        return

    @functools.wraps(original)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        raised = True
        try:
            result = original(*args, **kwargs)
            raised = False
            return result
        finally:
            _end_of_step(raised)

    worker.sample_tokens = sample_tokens


def _wrap_execute(cls: Any) -> None:
    original = cls.__dict__.get("execute_model")
    if original is None:
        return
    worker = AGENT.worker

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        step = 0
        try:
            held.of_worker(self)
            step = getattr(scheduler_output, STEP_ATTRIBUTE, 0)
            _begin_of_step(step)
            PRINTS.begins(scheduler_output, step)
            worker.declared = getattr(scheduler_output, DECLARED_ATTRIBUTE, None)
            graphs.step_begins(self, step)
            tokens = scheduler_output.total_num_scheduled_tokens
            many = tokens > len(scheduler_output.num_scheduled_tokens)
            worker.prompt = getattr(scheduler_output, PROMPT_ATTRIBUTE, many)
            worker.finishes = bool(getattr(scheduler_output, "finished_req_ids", None))
            POLICY.step_begins()
        except Exception:
            AGENT.failed("execute_model")
        t0 = clock()
        flags = 0
        result = None
        try:
            result = original(self, scheduler_output, *args, **kwargs)
        except BaseException as error:
            flags = int(Flag.RAISED)
            frames.step_out(error)
            raise
        finally:
            try:
                t1 = clock()
                tokens = scheduler_output.total_num_scheduled_tokens
                if not step:
                    flags |= Flag.DUMMY
                if not tokens:
                    flags |= Flag.NO_FORWARD
                if graphs.captured_in_step():
                    flags |= Flag.CAPTURE
                flags |= worker.watched
                PRINTS.account.busy += t1 - t0
                if POLICY.account is not None:
                    POLICY.account.busy += t1 - t0
                if scheduler_output.scheduled_new_reqs or not PRINTS.idle:
                    PRINTS.plan(scheduler_output)
                head = _EXEC | flags << 32 | AGENT.thread() << 48
                requests = len(scheduler_output.num_scheduled_tokens)
                AGENT.add((head, t0, t1, step, tokens, requests, worker.mode, worker.padded))
                raised = bool(flags & Flag.RAISED)
                if result is not None or raised:
                    _end_of_step(raised)
            except Exception:
                AGENT.failed("execute_model")
        return result

    cls.execute_model = execute_model


def _begin_of_step(step: int) -> None:
    worker = AGENT.worker
    if worker.step:
        # The last step's sample_tokens never came (pooling, a runner that lacks it).
        PRINTS.drop()
        _end_of_step()
    worker.step = step
    worker.latest = step or worker.latest
    worker.mode = UNKNOWN
    worker.padded = 0
    worker.hooked_layer = None
    worker.watch_store = worker.watch_load = worker.watch_after = None
    worker.watched = 0
    DEVICE.begin(step)
    recorder = AGENT.recorder
    if step and recorder is not None and recorder.full:
        # Past the size limit: gather the step, and write it whole only if it is not quiet.
        worker.gathering = True
        recorder.gather()
        AGENT.add = recorder.add


def _end_of_step(raised: bool = False) -> None:
    worker = AGENT.worker
    try:
        worker.step = 0
        worker.declared = None
        watch_records.settle()
        if raised:
            PRINTS.drop()
        if not PRINTS.idle:
            PRINTS.take()
        worker.watch_store = worker.watch_load = worker.watch_after = None
        config_keys.step_ended(Role.WORKER)
        gathering, worker.gathering = worker.gathering, False
        recorder = AGENT.recorder
        if recorder is None:
            return
        if gathering:
            calls = recorder.settle()
            AGENT.add = recorder.add
            for one in calls or ():
                recorder.add(_sum(one))
        DEVICE.finish()
        if raised or not AGENT.scheduler_writes:  # it hears of the step next
            recorder.flush()
    except Exception:
        AGENT.failed("end of step")


# --- past the size limit: one record per hook and quiet step -------------------------------


@functools.lru_cache(maxsize=256)
def _layers(given: bytes) -> str:
    """The layers of calls, as the recorder gives them, as QUIET records name them: the same in each step."""
    return json.dumps(sorted(set(array("q", given))))


def _sum(calls: CallSums) -> rows.QuietCalls:
    """The calls of one hook or op in a quiet step."""
    detail = calls.detail & ~DETAIL_IS_OP | (DETAIL_IS_OP if calls.kind == Kind.OP else 0)
    return rows.QuietCalls(
        pack_head(Kind.QUIET, Role.WORKER, calls.code, detail),
        calls.t0,
        layer_set=AGENT.id(_layers(calls.layers)),
        step=calls.step,
        count=calls.number,
        total_ns=calls.total_ns,
        least_ns=calls.least_ns,
        most_ns=calls.most_ns,
    )
