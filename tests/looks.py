"""What a connector can find out about itself: the same traced and untraced."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import yaml

HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
)


def of_config(extra: Any) -> list[str]:
    """Of ``kv_connector_extra_config``."""
    return [
        f"type {type(extra)} {type(extra) is dict}",
        f"yaml {yaml.safe_dump(extra)!r}",
        f"json {json.dumps(extra)}",
        f"pickle {pickle.dumps(extra)!r}",
    ]


def of_class(connector: Any, cls: type) -> list[str]:
    """Of a connector's class, which it believes to be ``cls`` and counts its looks in."""
    registry = {cls: "registered"}
    type(connector).looks = cls.looks + 1  # type: ignore[attr-defined]
    return [
        f"class {connector.__class__ is cls} {type(connector) in [cls]} {isinstance(connector, cls)}",
        f"named {type(connector).__module__} {type(connector).__qualname__} {type(connector).__doc__!r}",
        f"registry {registry.get(type(connector))} {registry.get(connector.__class__)}",
        f"looks {cls.looks}",  # type: ignore[attr-defined]
        f"attributes {sorted(vars(connector))}",
        f"abstract {inspect.isabstract(type(connector))}",
    ]


def of_hooks(connector: Any) -> list[str]:
    return [
        f"hook {name} {getattr(connector, name).__qualname__} {inspect.signature(getattr(connector, name))} "
        f"{inspect.ismethod(getattr(connector, name))} {getattr(connector, name).__self__ is connector}"
        for name in HOOKS
    ]


def of_exception(raises: Callable[[], object]) -> list[str]:
    """Type, arguments and each frame of what a call raises."""
    try:
        raises()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{os.path.basename(f.filename)}:{f.lineno} {f.name} {f.line}" for f in frames]
        return [f"raised {type(error)} {error.args} {error.__context__!r} {error.__cause__!r}", *places]
    return ["nothing raised"]
