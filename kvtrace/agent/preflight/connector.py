"""The class that vLLM would make a connector of, found in vLLM's own way, and what its code says."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from kvtrace.agent.code import config_source
from kvtrace.agent.facts.connector_facts import does_nothing, resolves, says_piecewise
from kvtrace.agent.facts.describe import jsonable
from kvtrace.agent.preflight import rounding, signatures, sources
from kvtrace.agent.preflight.facts import Class, CommandLine, ExtraKeys

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_MOST_CHILDREN = 8
_MOST = 60


class FoundClass(NamedTuple):
    """A class with its facts, or the reason why there is none."""

    cls: type | None
    facts: Class
    extra: dict[str, Any]


def connectors(asked: CommandLine, transfer: dict[str, Any] | None) -> list[FoundClass]:
    """The connector that is asked for, then the children of a MultiConnector; [] where none is configured."""
    given = transfer or {}
    extra = given.get("kv_connector_extra_config") or {}
    if asked.connector:
        return [_found(asked.connector.partition(":")[2], lambda: _named(asked.connector), given, extra)]
    if not given.get("kv_connector"):
        return []
    first = _found(str(given["kv_connector"]), lambda: _by_vllm(given), given, extra)
    return [first, *_children(first, given, extra)]


def _children(first: FoundClass, given: dict[str, Any], extra: dict[str, Any]) -> Iterator[FoundClass]:
    children = extra.get("connectors") if isinstance(extra, dict) else None
    if first.facts.name != "MultiConnector" or not isinstance(children, (list, tuple)):
        return
    for child in children[:_MOST_CHILDREN]:
        if isinstance(child, dict) and child.get("kv_connector"):
            inner = {"kv_role": given.get("kv_role"), **child}
            own = child.get("kv_connector_extra_config") or {}
            yield _found(str(child["kv_connector"]), lambda inner=inner: _by_vllm(inner), inner, own)


def _named(text: str) -> type:
    module, _, name = text.partition(":")
    value = attrgetter(name)(importlib.import_module(module))
    if not isinstance(value, type):
        raise TypeError(f"{text} is no class")
    return value


def _by_vllm(given: dict[str, Any]) -> type:
    """As vLLM's own factory finds it, with vLLM's own errors."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    made: type = KVConnectorFactory.get_connector_class(KVTransferConfig(**given))
    return made


def _found(configured: str, load: Any, given: dict[str, Any], extra: Any) -> FoundClass:
    extra = extra if isinstance(extra, dict) else {}
    common: dict[str, Any] = {"role": given.get("kv_role"), "extra": jsonable(extra)}
    try:
        cls = load()
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"[:600]
        return FoundClass(None, Class(configured, text, where(error), **common), extra)
    try:
        base = getattr(importlib.import_module(_BASE), "KVConnectorBase_V1")  # noqa: B009
    except (ImportError, AttributeError):
        return FoundClass(cls, Class(configured, name=cls.__name__, module=cls.__module__, **common), extra)
    own = {name: value for name, value in signatures.own_methods(cls, base).items() if hasattr(base, name)}
    public = [name for name in own if not name.startswith("_")]
    facts = Class(
        configured,
        name=cls.__name__,
        module=cls.__module__,
        file=str(getattr(sys.modules.get(cls.__module__), "__file__", None) or ""),
        resolves=resolves(cls, given.get("kv_connector_module_path"), given.get("kv_connector")),
        based=issubclass(cls, base),
        abstract=tuple(sorted(getattr(cls, "__abstractmethods__", ()))),
        overrides=tuple(public),
        idle=tuple(name for name in public if does_nothing(getattr(cls, name, None))),
        elsewhere=signatures.elsewhere(cls, base),
        signatures=tuple(signatures.signatures(cls, base)),
        piecewise=says_piecewise(cls, extra),
        **_of_source(cls, base),
        **common,
    )
    return FoundClass(cls, facts, extra)


def _of_source(cls: type, base: type) -> dict[str, Any]:
    """What its source says beside the class; nothing where that cannot all be read."""
    try:
        texts = sources.of_class(cls)
        used = sources.uses(texts)  # whether something else calls a method
        like = tuple(signatures.named_like(cls, base, used))
        return {"like": like, "batched": tuple(rounding.to_batched_tokens(texts))}
    except (sources.Unknown, SyntaxError, ValueError, RecursionError):
        return {}


def keys(found: FoundClass) -> ExtraKeys:
    """Which of the keys that it is given its source asks for."""
    given = tuple(key for key in found.extra if isinstance(key, str))[:_MOST]
    if found.cls is None or not given:
        return ExtraKeys(given, known=not given)
    try:
        texts = sources.of_class(found.cls)
        asked = config_source.keys_named(list(texts.values()))
    except (sources.Unknown, config_source.Hidden, SyntaxError, ValueError, RecursionError):
        return ExtraKeys(given, known=False)
    unread = {key for key in given if key not in asked}
    if unread:
        folder = os.path.dirname(str(getattr(sys.modules.get("vllm"), "__file__", "")))
        unread -= sources.literal_in_vllm(folder, unread)
    return ExtraKeys(
        given, True, tuple(key for key in given if key in unread), tuple(sorted(asked - set(given)))[:_MOST]
    )


def where(error: BaseException) -> str:
    """The last line outside of vLLM and Python's own files that an exception went through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename.replace("\\", "/")
        if not ("/vllm/" in file or "/kvtrace/" in file or "importlib" in file or file.startswith("<")):
            return f"{frame.filename}:{frame.lineno}"
    return ""
