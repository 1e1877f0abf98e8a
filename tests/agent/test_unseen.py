"""A connector's exceptions are the same traced and untraced. (On a real engine: tests/engine, with the same
looks.)"""

from __future__ import annotations

import queue
from typing import Any

import looks
import pytest

from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap.proxy import index_of

from . import fakes
from .fakes import on_worker


class Curious(fakes.KVConnectorBase_V1):
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise LookupError(layer_name, "has no KV cache")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> Any:
        return forward_context(self)

    def wait_for_save(self) -> None:
        self.save_kv_layer("layer.0", None, attn_metadata=None)

    def get_finished(self, finished_req_ids: set[str], *more: int) -> tuple[Any, Any]:
        return queue.Queue[Any]().get(timeout=0)


def raised(connector: Any) -> list[str]:
    """What a connector catches of itself in a hook: only there it is itself."""
    return connector.start_load_kv(_raised)  # type: ignore[no-any-return]


def _raised(connector: Any) -> list[str]:
    return [
        *looks.of_exception(connector.wait_for_save),
        *looks.of_exception(lambda: connector.get_finished(set())),
        *looks.of_exception(lambda: connector.save_kv_layer("layer.0")),
        *looks.of_exception(lambda: connector.wait_for_save(1, 2)),
        *looks.of_exception(lambda: connector.no_such_thing),
    ]


def test_a_connector_catches_the_same_traced_and_untraced(trace: Any) -> None:
    untraced = raised(Curious())
    connector = on_worker(Curious())
    assert index_of(connector), "it is traced"
    assert raised(connector) == untraced


@pytest.mark.parametrize("watched", [False, True])
def test_no_frame_of_ours_stands_in_a_traceback(
    trace: Any, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = looks.of_exception(Curious().wait_for_save)
    connector = on_worker(Curious())
    if watched:
        monkeypatch.setattr(AGENT.worker, "watch_store", object())
    assert looks.of_exception(connector.wait_for_save) == plain
