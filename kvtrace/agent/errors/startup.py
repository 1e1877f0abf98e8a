"""Why an engine never came up, in whichever process: a command line that vLLM refuses, a module that is not
there, an assertion in the engine core, a device that is out of memory. vLLM's own last words are "Engine core
initialization failed" at best. And what ended one that was up. The exception itself goes on untouched."""

from __future__ import annotations

import functools
import linecache
import re
from types import ModuleType, TracebackType
from typing import Any

from kvtrace.agent.code import foreign, owners, traces
from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap import frames
from kvtrace.trace.facts import STEP, StartFailedFact
from kvtrace.trace.format import Role
from kvtrace.trace.mask import mask_text

_OF_WRAPPER = ("init_device", "initialize_from_config")
_OF_WORKER = ("load_model", "determine_available_memory", "compile_or_warm_up_model")
_STEPS = ("step", "step_with_batch_queue")
COMMAND_LINE, CONFIGURATION, ENGINE_CORE, LLM = "command line", "configuration", "engine core", "LLM"
_CHECKERS = {"kvtrace", "pydantic", "pydantic_core"}
_MOST = 500
_NEXT_SENTENCE = re.compile(r"\n(?!\s*[a-z])")
"""A line that does not go on with the one above."""


def wrap_parser(module: ModuleType) -> None:
    """``FlexibleArgumentParser.error``: what vLLM prints as it refuses the command line."""
    cls = module.FlexibleArgumentParser
    original = cls.error

    @functools.wraps(original)
    def error(self: Any, message: Any) -> Any:
        try:
            AGENT.set_role(Role.FRONT, "front")
            said = " ".join(mask_text(str(message)).split())[:_MOST]
            AGENT.fact(StartFailedFact(COMMAND_LINE, "", said), Role.FRONT)
        except Exception:
            AGENT.failed("error")
        return original(self, message)

    cls.error = error


def wrap_init(name: str, stage: str, role: Role, module: ModuleType) -> None:
    """The constructor of a class of the module; of the engine core its steps, too: what they raise ends
    it."""
    cls = getattr(module, name)
    cls.__init__ = _watched(cls.__init__, stage, role)
    for step in _STEPS if stage == ENGINE_CORE else ():
        if step in vars(cls):
            setattr(cls, step, _watched(vars(cls)[step], STEP, role))


def watch(cls: Any) -> None:
    """``WorkerWrapperBase``, and the worker that it makes in ``init_device``."""
    for name in _OF_WRAPPER:
        original = cls.__dict__.get(name)
        if original is not None:
            setattr(cls, name, _watched(original, name))


def _watched(original: Any, stage: str, role: Role = Role.WORKER) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            failed(stage, error, role)
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


def _before_any_request(error: BaseException) -> bool:
    """Whether the message can hold no content of a user's: no step was planned or executed in this process,
    and vLLM's own code took part (a user's script may fail by itself, with what it was about to ask)."""
    if AGENT.scheduler.step or AGENT.worker.latest:
        return False
    return any(owners.top(_module(trace)) == "vllm" for trace in traces.entries(error.__traceback__))


def _of_the_engine(error: BaseException) -> bool:
    """Whether only vLLM's and torch's code took part, and none of a connector's."""
    for name in map(_module, traces.entries(error.__traceback__)):
        inside = ".kv_transfer." in name and not name.endswith(".factory")
        if inside or not (owners.is_foreign(name) or owners.top(name) in _CHECKERS):
            return False
    return True


def _module(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__") or "")


def failed(stage: str, error: BaseException, role: Role) -> None:
    """Note what ended a stage of the engine's start. Never raises."""
    try:
        AGENT.fact(StartFailedFact(stage, traces.type_name(error), said(error), place(error)), role)
    except Exception:
        AGENT.failed(stage)


def place(error: BaseException) -> str:
    """``file.py:12 in function``: the innermost line that is not Python's own, nor of what checks types."""
    best = ""
    for trace in traces.entries(error.__traceback__):
        code, name = trace.tb_frame.f_code, owners.top(_module(trace))
        if not (code.co_filename.startswith("<") or name in _CHECKERS or owners.is_stdlib_module(name)):
            best = traces.place(code, trace.tb_lineno)
    return best


def _asserted(error: BaseException) -> str:
    """vLLM's own line of code that asserts, where it says no more; "" of any other error."""
    *_, last = [None, *traces.entries(error.__traceback__)]
    if not isinstance(error, AssertionError) or str(error) or not last or owners.top(_module(last)) != "vllm":
        return ""
    return linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()[:_MOST]


def said(error: BaseException) -> str:
    """The message of an exception at the engine's start, whole where no request was there yet."""
    if asserted := _asserted(error):
        return asserted
    keep = AGENT.config.keep_messages or _before_any_request(error) or _of_the_engine(error)
    text = foreign.of_exception(error, keep, 2000).strip()
    first, *_ = _NEXT_SENTENCE.split(text, 1)
    # pydantic says the field and what is wrong below; torch adds sentences of advice below its message
    return " ".join((text if "validation error" in first else first).split())[:_MOST]
