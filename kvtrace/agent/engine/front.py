"""API server side: the engine's arguments as given, and the client's request ids."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from kvtrace.agent.errors import startup
from kvtrace.agent.facts import describe
from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap import frames
from kvtrace.trace.facts import ClientIdFact, EngineArgsFact
from kvtrace.trace.format import Role


def wrap_engine_args(module: ModuleType) -> None:
    cls = module.EngineArgs
    original = cls.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            AGENT.set_role(Role.FRONT, "front")
            AGENT.fact(EngineArgsFact(asked(self)), Role.FRONT, standing="args")
        except Exception:
            AGENT.failed("create_engine_config")
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            startup.failed(startup.CONFIGURATION, error, Role.FRONT)
            frames.step_out(error)
            raise

    cls.create_engine_config = create_engine_config


def asked(args: Any) -> dict[str, Any]:
    """What the engine's arguments ask for where vLLM may decide otherwise, or decides where they do not."""
    config = getattr(args, "compilation_config", None)
    named = config if isinstance(config, dict) else {"cudagraph_mode": describe.get(config, "cudagraph_mode")}
    found = {"compilation_config.cudagraph_mode": describe.plain(named.get("cudagraph_mode"))}
    tokens = "max_num_batched_tokens"
    if getattr(args, tokens, None) != getattr(type(args), tokens, None):
        found[tokens] = getattr(args, tokens)
    return {name: value for name, value in found.items() if value is not None}


def wrap_input_processor(module: ModuleType) -> None:
    """``InputProcessor.assign_request_id`` appends a random suffix to the client's id (0.14+)."""
    cls = module.InputProcessor
    original = cls.assign_request_id

    @functools.wraps(original)
    def assign_request_id(request: Any) -> Any:
        result = original(request)
        try:
            client, engine = getattr(request, "external_req_id", None), getattr(request, "request_id", None)
            if client and engine:
                AGENT.fact(ClientIdFact(client, engine), Role.FRONT, flush=not AGENT.scheduler_writes)
        except Exception:
            AGENT.failed("assign_request_id")
        return result

    cls.assign_request_id = staticmethod(assign_request_id)
