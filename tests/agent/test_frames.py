"""Which hook runs, by the frames on a stack."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvtrace.agent.wrap import frames


def function_of(file: str) -> Callable[..., Any]:
    """``call(inner)`` that calls ``inner``, as if it stood in that file."""
    scope: dict[str, Any] = {}
    # Two pieces of code of other files are equal where they say the same.
    exec(compile(f"def call(inner):\n    return {file!r} and inner()", file, "exec"), scope)
    made: Callable[..., Any] = scope["call"]
    return made


def here() -> frames.Running | None:
    return frames.innermost(sys._getframe())


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    made = function_of("<a wrapper>")
    monkeypatch.setattr(frames, "_wrappers", {})
    frames.know(made.__code__, ("save_kv_layer", 1))
    return made


def test_wrappers_that_say_the_same_are_told_apart(hook: Any) -> None:
    """Two connectors of one class have wrappers with equal code."""
    other = function_of("<a wrapper>")
    frames.know(other.__code__, ("save_kv_layer", 2))
    assert hook.__code__ == other.__code__
    assert hook(here) == ("save_kv_layer", 1, None) and other(here) == ("save_kv_layer", 2, None)


@pytest.mark.parametrize("file", ["/site/vllm/v1/engine/core.py", "/site/vllm/v1/executor/uniproc.py"])
def test_the_engine_s_own_frames_end_the_search_for_a_hook(hook: Any, file: str) -> None:
    """It hands something to a thread in each step: its whole stack is not walked for that."""
    engine, own = function_of(file), function_of("/home/me/connector.py")
    assert engine(lambda: own(lambda: hook(lambda: own(here)))) == ("save_kv_layer", 1, None)
    assert hook(lambda: own(here)) == ("save_kv_layer", 1, None)
    assert hook(lambda: engine(here)) is None
    assert engine(here) is None
