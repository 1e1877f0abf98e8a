"""Scheduler side: steps, requests, prefill chunks, preemptions, finishes.

Wraps ``vllm.v1.core.sched.scheduler.Scheduler`` (AsyncScheduler inherits). vLLM sends no
step id to its workers: the one given here rides on the SchedulerOutput as an attribute and
survives the pickle of the message queue (from 0.11.1 on).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import ref

from kvtrace.agent.facts import config_keys, describe
from kvtrace.agent.hooks import held
from kvtrace.agent.metadata import read_tables
from kvtrace.agent.metadata.recording import READER
from kvtrace.agent.state import AGENT, clock
from kvtrace.agent.steps import handover, prefixes
from kvtrace.agent.steps.block_tables import RecordedTables
from kvtrace.agent.steps.prompts import LOADED_ATTRIBUTE
from kvtrace.agent.wrap import frames
from kvtrace.trace import rows
from kvtrace.trace.format import STEP_SHIFT, Flag, Kind, Role, pack_head

STEP_ATTRIBUTE = "_kvtrace_step"
PROMPT_ATTRIBUTE = "_kvtrace_prompt"
"""Of a SchedulerOutput: whether it has prompt tokens to compute."""
_STATE_ATTRIBUTE = "_kvtrace_state"
_STEP = pack_head(Kind.STEP, Role.SCHEDULER)


class _StepCounter:
    """One Scheduler instance's tag and counter, the requests still in prefill, the block tables.

    ``sessions``: requests whose prompt comes in parts, and how long it was when it was last seen."""

    def __init__(self) -> None:
        self.tag = secrets.randbits(29) + 1
        self.step = self.tag << STEP_SHIFT
        self.prefilling: dict[str, int] = {}
        self.sessions: dict[str, int] = {}
        self.tables = RecordedTables()


def _steps(scheduler: Any) -> _StepCounter:
    state: _StepCounter | None = getattr(scheduler, _STATE_ATTRIBUTE, None)
    if state is None:
        state = _StepCounter()
        setattr(scheduler, _STATE_ATTRIBUTE, state)
    return state


def wrap_scheduler(module: ModuleType) -> None:
    """Instrument the Scheduler class; methods that a version lacks are left out."""
    cls = module.Scheduler
    for name, (before, after) in _WRAPS.items():
        original = cls.__dict__.get(name)
        if original is not None:
            setattr(cls, name, _around(original, name, before, after))


def _around(
    original: Callable[..., Any],
    name: str,
    before: Callable[..., Any] | None,
    after: Callable[..., Any] | None,
) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        t0 = clock()
        if before is not None:
            try:
                before(self, t0, *args, **kwargs)
            except Exception:
                AGENT.failed(name)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            frames.step_out(error)
            raise
        if after is not None:
            try:
                after(self, t0, result, *args)
            except Exception:
                AGENT.failed(name)
        return result

    return wrapper


def _created(self: Any, t0: int, result: Any, *args: Any) -> None:
    state = _steps(self)
    AGENT.scheduler.current = ref(self)
    held.of_scheduler(self)
    AGENT.set_role(Role.SCHEDULER, f"scheduler-dp{describe.dp_rank(self.vllm_config)}")
    AGENT.fact(describe.engine(self, state.tag), Role.SCHEDULER)


def _before_schedule(self: Any, t0: int, *args: Any, **kwargs: Any) -> None:
    held.of_scheduler(self)
    state = _steps(self)
    state.step += 1
    AGENT.scheduler.step = state.step
    AGENT.scheduler.current = ref(self)
    AGENT.scheduler.allocated.clear()


def _after_schedule(self: Any, t0: int, output: Any, *args: Any) -> None:
    t1 = clock()
    state = _steps(self)
    setattr(output, STEP_ATTRIBUTE, state.step)
    scheduled = output.num_scheduled_tokens
    preempted = getattr(output, "preempted_req_ids", None) or ()
    thread = AGENT.thread()
    head = _STEP | thread << 48
    gone = len(preempted) << 32 | len(output.finished_req_ids or ())
    new = len(output.scheduled_new_reqs)
    AGENT.add((head, t0, t1, state.step, output.total_num_scheduled_tokens, len(scheduled), new, gone))
    for req_id in preempted:
        request = self.requests.get(req_id)
        if request is not None:
            state.prefilling[req_id] = request.num_prompt_tokens
    if new and state.sessions:
        _grown(self, state, output, t1)
    prompts = bool(state.prefilling) and _chunks(self, state, scheduled, t1, thread)
    setattr(output, PROMPT_ATTRIBUTE, prompts)
    loading = AGENT.scheduler.loading
    if loading and new:
        loaded = [one.req_id for one in output.scheduled_new_reqs if one.req_id in loading]
        if loaded:
            setattr(output, LOADED_ATTRIBUTE, loaded)
            loading.difference_update(loaded)
    state.tables.scheduled(self, output, AGENT.scheduler.allocated, state.step, t1)


def _grown(self: Any, state: _StepCounter, output: Any, t: int) -> None:
    """GROWN records: a session whose next part has come is scheduled as if it were new."""
    for new in output.scheduled_new_reqs:
        req_id = new.req_id
        request = self.requests.get(req_id)
        before = state.sessions.get(req_id)
        if before is None or request is None or request.num_prompt_tokens <= before:
            continue
        prompt = state.sessions[req_id] = state.prefilling[req_id] = int(request.num_prompt_tokens)
        start = max(0, request.num_computed_tokens - output.num_scheduled_tokens[req_id])
        ident = AGENT.request_id(req_id)
        head = pack_head(Kind.GROWN, Role.SCHEDULER, 0, 0, 0, AGENT.thread())
        AGENT.add(rows.Growth(head, t, ident, state.step, start=start, prompt=prompt))
        head = pack_head(Kind.PREFIX, Role.SCHEDULER)
        found = prefixes.of_request(request, describe.block_size(self))
        for number, digest in enumerate(found.prefixes, 1):
            end = number * found.stride
            if end > before:
                AGENT.add(rows.Prefixes(head, ident, end, end, digest, 0, 0, 0))


def _chunks(self: Any, state: _StepCounter, scheduled: dict[str, int], t: int, thread: int) -> bool:
    """CHUNK records of the step; whether there was one."""
    head = pack_head(Kind.CHUNK, Role.SCHEDULER, 0, 0, 0, thread)
    done: list[str] = []
    found = False
    for req_id, prompt in state.prefilling.items():
        tokens = scheduled.get(req_id)
        if not tokens:
            continue
        found = True
        request = self.requests[req_id]
        # schedule() has already advanced num_computed_tokens by this step's tokens.
        end = request.num_computed_tokens
        start = max(0, end - tokens)
        flags = Flag.RESUMED if getattr(request, "num_preemptions", 0) else 0
        inside = max(0, min(end, prompt) - start)
        row = rows.Chunk(
            head | flags << 32,
            t,
            AGENT.request_id(req_id),
            state.step,
            start=start,
            tokens=inside,
            prompt=prompt,
            block=describe.block_size(self),
        )
        AGENT.add(row)
        if end >= prompt:
            done.append(req_id)
    for req_id in done:
        del state.prefilling[req_id]
    return found


def _before_add_request(self: Any, t0: int, request: Any, *args: Any, **kwargs: Any) -> None:
    req_id = request.request_id
    if req_id in self.requests:
        return  # the next part of a session, or its end: the request is that one's
    prompt = int(request.num_prompt_tokens)
    state = _steps(self)
    state.prefilling[req_id] = prompt
    cache_salt = getattr(request, "cache_salt", None)
    salt = prefixes.digest_of(str(cache_salt), AGENT.config.salt) if cache_salt else 0
    found = prefixes.of_request(request, describe.block_size(self))
    if getattr(request, "resumable", False):
        state.sessions[req_id] = prompt
    head = pack_head(Kind.REQUEST, Role.SCHEDULER, 0, 0, 0, AGENT.thread())
    limit = int(getattr(request, "max_tokens", -1) or -1)
    ident = AGENT.request_id(req_id)
    row = rows.Arrival(
        head, t0, ident, salt, prompt=prompt, digest=found.prompt, prefix=found.aligned, max_tokens=limit
    )
    AGENT.add(row)
    handover.record(req_id, getattr(request, "kv_transfer_params", None))
    head = pack_head(Kind.PREFIX, Role.SCHEDULER)
    for at in range(0, len(found.prefixes), 4):
        four = (*found.prefixes[at : at + 4], 0, 0, 0)[:4]
        AGENT.add(rows.Prefixes(head, ident, (at + 1) * found.stride, found.stride, *four))


def _before_preempt(self: Any, t0: int, request: Any, *args: Any, **kwargs: Any) -> None:
    head = pack_head(Kind.PREEMPT, Role.SCHEDULER, 0, 0, 0, AGENT.thread())
    step = AGENT.scheduler.step
    computed = int(request.num_computed_tokens)
    AGENT.add(rows.Preemption(head, t0, AGENT.request_id(request.request_id), step, computed))
    _steps(self).prefilling[request.request_id] = request.num_prompt_tokens


def _after_invalid_blocks(self: Any, t0: int, result: Any, *args: Any) -> None:
    """Blocks that could not be loaded: their prompts are computed again from there on."""
    state = _steps(self)
    for request in self.running:
        if request.num_computed_tokens < request.num_prompt_tokens:
            state.prefilling[request.request_id] = request.num_prompt_tokens


def _before_free(self: Any, t0: int, request: Any, *args: Any, **kwargs: Any) -> None:
    req_id = request.request_id
    AGENT.scheduler.loading.discard(req_id)
    output = int(request.num_output_tokens)
    computed = int(request.num_computed_tokens)
    if output:
        # The last sampled token was never fed back; steps in flight count ahead of that.
        computed = min(computed, int(request.num_tokens) - 1)
    status = getattr(request.status, "name", str(request.status))
    head = pack_head(Kind.FINISH, Role.SCHEDULER, 0, 0, 0, AGENT.thread())
    step = AGENT.scheduler.step
    row = rows.Finish(
        head,
        t0,
        AGENT.request_id(req_id),
        step,
        computed=computed,
        output=output,
        status_name=AGENT.id(status),
        preemptions=int(getattr(request, "num_preemptions", 0)),
    )
    AGENT.add(row)
    state = _steps(self)
    state.prefilling.pop(req_id, None)
    state.sessions.pop(req_id, None)
    if getattr(self, "connector", None) is not None:
        READER.admissions.freed(req_id, read_tables(self, req_id))


def _after_free(self: Any, t0: int, result: Any, request: Any, *args: Any) -> None:
    _steps(self).tables.forget(request.request_id)
    recorder = AGENT.recorder
    if recorder is not None:
        recorder.forget_name(request.request_id)


def _flush(self: Any, t0: int, result: Any, *args: Any) -> None:
    config_keys.step_ended(Role.SCHEDULER)
    AGENT.flush()


# method -> (before the call, after it)
_WRAPS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "__init__": (None, _created),
    "add_request": (_before_add_request, None),
    "schedule": (_before_schedule, _after_schedule),
    "update_from_output": (None, _flush),
    "_preempt_request": (_before_preempt, None),
    "_handle_invalid_blocks": (None, _after_invalid_blocks),
    "_free_request": (_before_free, _after_free),
    "finish_requests": (None, _flush),
}
