"""Where an exception came from: the connector's own line, wherever its folder lies."""

from __future__ import annotations

import shutil
import struct
from typing import Any

import pytest

from kvtrace.agent.code.owners import Owner
from kvtrace.agent.code.traces import type_name
from kvtrace.agent.state import where_raised


class Mine:
    """A connector."""


def raised_through(*paths: str) -> BaseException:
    """An exception that went through a function of each file, the last one innermost."""
    source = "def run(*inner):\n    if not inner:\n        raise KeyError('k')\n    inner[0](*inner[1:])\n"
    calls = []
    for path in paths:
        space: dict[str, Any] = {}
        exec(compile(source, path, "exec"), space)
        calls.append(space["run"])
    with pytest.raises(KeyError) as caught:
        calls[0](*calls[1:])
    trace = caught.value.__traceback__
    assert trace is not None
    return caught.value.with_traceback(trace.tb_next)  # from there on, as a wrapper of ours sees it


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        (["/a/vllm/v1/worker/x.py", "/home/me/store/connector.py"], "store/connector.py:3 in run"),
        (["/home/me/store/connector.py", "/s/torch/nn/functional.py"], "store/connector.py:4 in run"),
        # the user's clone may have our name
        (["/home/me/kvtrace/mine/connector.py", "/s/torch/_ops.py"], "mine/connector.py:4 in run"),
        (
            ["/s/vllm/distributed/kv_transfer/kv_connector/v1/example.py", "/s/vllm/utils.py"],
            "v1/example.py:4 in run",
        ),
        (["/home/me/store/connector.py", shutil.__file__], "store/connector.py:4 in run"),
        # a library that it calls, as it is made
        (["/home/me/store/connector.py", "/s/site-packages/redis/client.py"], "store/connector.py:4 in run"),
        (
            [
                "/s/site-packages/vllm/distributed/kv_transfer/kv_connector/v1/mine.py",
                "/s/site-packages/mine/store.py",
                "/s/site-packages/redis/client.py",
            ],
            "mine/store.py:4 in run",
        ),
    ],
)
def test_the_innermost_line_of_the_connector(paths: list[str], place: str) -> None:
    assert where_raised(raised_through(*paths)) == place


def test_a_librarys_error_is_told_at_the_line_that_calls_it() -> None:
    """It was: fix the connector at safetensors/torch.py."""
    error = raised_through(
        "/s/site-packages/glue/wrap.py",
        "/home/me/store/connector.py",
        "/s/site-packages/safetensors/torch.py",
    )
    assert where_raised(error) == "glue/wrap.py:4 in run"
    assert where_raised(error, Owner(Mine(), 1)) == "store/connector.py:4 in run"


@pytest.mark.parametrize(
    ("error", "name"),
    [(struct.error(), "struct.error"), (shutil.Error(), "shutil.Error"), (OSError(), "OSError")],
)
def test_a_library_s_error_is_told_with_its_module(error: Exception, name: str) -> None:
    assert type_name(error) == name
