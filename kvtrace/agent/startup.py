"""Why a worker never came up: a device that is absent, busy or out of memory ends vLLM before its first step,
under the name of "Engine core initialization failed" at best. The exception itself goes on untouched."""

from __future__ import annotations

import functools
from typing import Any

from kvtrace.agent import foreign, frames, owners
from kvtrace.agent.state import AGENT
from kvtrace.trace.facts import StartFailed
from kvtrace.trace.format import Role

_OF_WRAPPER = ("init_device", "initialize_from_config")
_OF_WORKER = ("load_model", "determine_available_memory", "compile_or_warm_up_model")


def watch(cls: Any) -> None:
    """``WorkerWrapperBase``, and the worker that it makes in ``init_device``."""
    for name in _OF_WRAPPER:
        original = cls.__dict__.get(name)
        if original is not None:
            setattr(cls, name, _watched(original, name))


def _watched(original: Any, stage: str) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            _failed(stage, error)
            frames.step_out(error)
            raise
        if stage == "init_device":
            _watch_worker(getattr(args[0], "worker", None))
        return result

    return wrapper


def _watch_worker(worker: Any) -> None:
    try:
        for name in _OF_WORKER:
            method = getattr(worker, name, None)
            if callable(method) and name not in vars(worker):
                setattr(worker, name, _watched(method, name))
    except Exception:
        AGENT.failed("init_device")


def _of_the_engine(error: BaseException) -> bool:
    """Whether only vLLM's and torch's code took part: before the first request, that speaks of no content."""
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__") or "")
        if not owners.is_foreign(name) or ".kv_transfer." in name:
            return False
        trace = trace.tb_next
    return True


def _failed(stage: str, error: BaseException) -> None:
    try:
        # torch adds paragraphs of advice below its message
        keep = AGENT.keeps_messages or _of_the_engine(error)
        said = foreign.of_exception(error, keep, 2000)
        message = next(iter(said.strip().splitlines()), "")[:300]
        AGENT.fact(StartFailed(stage, type(error).__name__, message), Role.WORKER)
    except Exception:
        AGENT.failed(stage)
