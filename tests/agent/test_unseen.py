"""A connector finds the same traced and untraced. (On a real engine: tests/engine, with the same looks.)"""

from __future__ import annotations

import abc
import copy
import pickle
import queue
from collections.abc import Callable
from typing import Any, ClassVar

import looks
import pytest

from kvtrace.agent.wrap.proxy import index_of

from . import fakes
from .fakes import on_worker

EXTRA = {"path": "/x", "nested": {"unit": [1, 2]}}


class Curious(fakes.KVConnectorBase_V1, abc.ABC):
    """A connector's own documentation."""

    looks = 0
    made: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.extra = EXTRA

    def __init_subclass__(cls, **given: Any) -> None:
        Curious.made.append(cls.__name__)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise LookupError(layer_name, "has no KV cache")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> Any:
        return forward_context(self)

    def wait_for_save(self) -> None:
        self.save_kv_layer("layer.0", None, attn_metadata=None)

    def get_finished(self, finished_req_ids: set[str], *more: int) -> tuple[Any, Any]:
        return queue.Queue[Any]().get(timeout=0)


def found(connector: Any, cls: Any) -> list[str]:
    """What it finds in a hook: only there it is itself."""
    return connector.start_load_kv(lambda self: list(_found(self, cls)))  # type: ignore[no-any-return]


def _found(connector: Any, cls: Any) -> list[str]:
    cls.looks = 0
    return [
        *looks.of_config(connector.extra),
        *looks.of_class(connector, cls),
        *looks.of_hooks(connector),
        *looks.of_exception(connector.wait_for_save),
        *looks.of_exception(lambda: connector.get_finished(set())),
        *looks.of_exception(lambda: connector.save_kv_layer("layer.0")),
        *looks.of_exception(lambda: connector.wait_for_save(1, 2)),
        *looks.of_exception(lambda: connector.no_such_thing),
        f"copies {type(copy.copy(connector))} {type(pickle.loads(pickle.dumps(connector)))}",
        f"of itself {type(type(connector)())}",
    ]


def test_a_connector_finds_the_same_traced_and_untraced(trace: Any) -> None:
    untraced = found(Curious(), Curious)
    connector = on_worker(Curious())
    assert index_of(connector), "it is traced"
    assert found(connector, Curious) == untraced
    assert Curious.made == [], "no subclass is announced to the user's class"


@pytest.mark.parametrize("watched", [False, True])
def test_no_frame_of_ours_stands_in_a_traceback(
    trace: Any, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtrace.agent.state import AGENT

    def lines(raises: Callable[[], object]) -> list[str]:
        return looks.of_exception(raises)

    plain = lines(Curious().wait_for_save)
    connector = on_worker(Curious())
    if watched:
        monkeypatch.setattr(AGENT.worker, "watch_store", object())
    assert lines(connector.wait_for_save) == plain
