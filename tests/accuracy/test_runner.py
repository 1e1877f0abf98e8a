"""What the process that runs generated connectors does with its switches, without an engine."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from harness import runner


def runs(tmp_path: Path, **switches: bool) -> runner.Runs:
    return runner.Runs(
        {"out": str(tmp_path), "model": "m", "trace": False, "runs": [{"seed": 4, "fault": ""}], **switches}
    )


def test_verify_gets_the_plan_the_source_a_folder_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    module = ModuleType("harness.verified")
    answers = {"verified": {"transfer": "proved"}, "says": {}}
    module.verify_generated = lambda *given: asked.append(given) or answers  # type: ignore[attr-defined]
    module.restarted = lambda *given: ("failed", "nothing was found")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "harness.verified", module)
    plan: Any = SimpleNamespace(seed=7, planted=None, breaks=frozenset(), unpromised=frozenset())
    part: Any = SimpleNamespace(plan=plan, made="source")
    made: Any = SimpleNamespace(plan=plan, close=lambda: None, made=SimpleNamespace(place="path"))
    monkeypatch.setattr(runner, "Part", lambda *given: made)
    verifying = runs(tmp_path, verify=True)
    assert verifying._verified([part], tmp_path, "") == answers
    assert asked == [(made, tmp_path / "verify", "m", "quick")]
    for parts, problem in (([part], "the plan did not come true"), ([part, part], "")):
        assert verifying._verified(parts, tmp_path, problem) == {}
    assert runs(tmp_path)._verified([part], tmp_path, "") == {}
    assert len(asked) == 1
    plan.breaks = frozenset({"restart"})
    assert verifying._verified([part], tmp_path, "")["verified"] == {
        "transfer": "proved",
        "restart": "failed",
    }


def test_the_agent_is_told_of_device_memory_where_asked(tmp_path: Path) -> None:
    assert runs(tmp_path, device_memory=True).agent == {"as_device": True}
    assert runs(tmp_path).agent == {}


def started(source: Path, body: str, **names: Any) -> threading.Thread:
    """A thread in a connector's file of that folder."""
    exec(compile(f"def work():\n    {body}\n", str(source / "store.py"), "exec"), names)
    thread = threading.Thread(target=names["work"], daemon=True)
    thread.start()
    return thread


def test_a_thread_that_waits_for_work_does_not_go_on(tmp_path: Path) -> None:
    told = threading.Event()
    waits = started(tmp_path, "told.wait()", told=told)
    assert not runner._goes_on(tmp_path) and waits.is_alive()
    told.set()
    waits.join()


def test_a_thread_at_work_goes_on_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (begun, begins), (end, ends) = os.pipe(), os.pipe()
    body = "write(begins, b'x'), read(end, 1)"
    works = started(tmp_path / "a", body, write=os.write, read=os.read, begins=begins, end=end)
    os.read(begun, 1)

    def ended(_: float) -> None:
        os.write(ends, b"x")
        works.join()

    assert not runner._goes_on(tmp_path / "b"), "another connector's"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_AFTER_SECONDS", 0.1)
        assert runner._goes_on(tmp_path / "a")
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=time.monotonic, sleep=ended))
    assert not runner._goes_on(tmp_path / "a"), "it ended while it was looked at"
    for pipe in (begun, begins, end, ends):
        os.close(pipe)
