"""Trace and profile functions that several threads set at once, beside audit hooks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvtrace.agent.outside import files as paths
from kvtrace.agent.wrap.tracing import set_profile, set_trace


@pytest.mark.parametrize("setter", [set_trace, set_profile])
def test_threads_that_set_theirs_at_once_all_succeed(setter: Callable[[Any], bool]) -> None:
    """An audit hook, as the agent has one, lets another thread in amid the call."""
    paths.install()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    said: list[bool] = []

    def work() -> None:
        said.extend(setter(None) for _ in range(2000))

    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert said == [True] * 8000


def test_what_cannot_be_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(function: Any) -> None:
        raise RuntimeError("another one is being installed")

    monkeypatch.setattr(sys, "settrace", refuses)
    assert set_trace(None) is False
