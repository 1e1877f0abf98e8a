"""API server side: the engine's arguments as given, and the client's request ids."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from kvtrace.agent.errors import startup
from kvtrace.agent.facts import describe
from kvtrace.agent.state import AGENT
from kvtrace.agent.steps import graphs
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
            given = {**describe.engine_args(self), **graphs.asked(self)}
            AGENT.fact(EngineArgsFact(given), Role.FRONT, standing="args")
        except Exception:
            AGENT.failed("create_engine_config")
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            startup.failed(startup.CONFIGURATION, error, Role.FRONT)
            frames.step_out(error)
            raise

    cls.create_engine_config = create_engine_config


def wrap_input_processor(module: ModuleType) -> None:
    """``InputProcessor.assign_request_id`` appends a random suffix to the client's id (0.14+)."""
    cls = module.InputProcessor
    original = cls.__dict__["assign_request_id"]
    plain = getattr(original, "__func__", original)

    @functools.wraps(plain)
    def assign_request_id(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        try:
            request = kwargs.get("request", args[-1] if args else None)
            client, engine = getattr(request, "external_req_id", None), getattr(request, "request_id", None)
            if client and engine:
                AGENT.fact(ClientIdFact(client, engine), Role.FRONT, flush=not AGENT.scheduler_writes)
        except Exception:
            AGENT.failed("assign_request_id")
        return result

    bound = isinstance(original, (staticmethod, classmethod))
    cls.assign_request_id = type(original)(assign_request_id) if bound else assign_request_id
