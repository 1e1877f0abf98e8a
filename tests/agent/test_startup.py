"""A worker that never comes up: the stage and the exception are in the trace, and go on untouched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.errors import startup
from kvtrace.causes.diagnose import diagnose
from kvtrace.ledger import read_run
from kvtrace.report.build import build_report
from kvtrace.trace.format import Fact, Role

OOM = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"


class Inner:
    def __init__(self, fails: str) -> None:
        self.fails = fails

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        if self.fails == "load_model":
            raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
        return f"loaded {load_dummy_weights}"


def wrapper_class(fails: str) -> Any:
    class WorkerWrapperBase:
        def init_device(self) -> None:
            if fails == "init_device":
                raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
            self.worker = Inner(fails)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.worker, name)

    startup.watch(WorkerWrapperBase)
    return WorkerWrapperBase


@pytest.mark.parametrize("stage", ["init_device", "load_model"])
def test_the_stage_that_raised_is_told(trace: Any, stage: str) -> None:
    wrapper = wrapper_class(stage)()
    with pytest.raises(RuntimeError) as caught:
        wrapper.init_device()
        wrapper.load_model()
    assert str(caught.value) == OOM
    said = {"stage": stage, "type": "RuntimeError", "message": "CUDA error: out of memory"}
    (fact,) = trace.facts(Fact.START_FAILED)
    assert fact.pop("where").startswith("agent/test_startup.py:") and fact == said
    trace.read()  # the spool is on disk
    run_dir = trace.run_dir
    line = f"{stage} of a worker raised RuntimeError: CUDA error: out of memory"
    assert [one.line for one in read_run(run_dir).start_failures] == [line]
    report = build_report(run_dir)
    assert report["verdict"] == f"The engine did not start: {line}."
    (finding,) = report["findings"]
    assert finding["id"] == "engine-did-not-start" and "out of memory" in finding["evidence"][0]
    assert finding["remedy"][0] == "Free the device's memory, or lower --gpu-memory-utilization"
    assert f"the engine did not start: {line}" in report["limits"]["notes"]
    assert not [one for one in diagnose(read_run(run_dir)).not_observed if one.id == "device-time"]


@pytest.mark.parametrize("raised", [True, False])
def test_what_ends_an_engine_that_was_up_is_told(trace: Any, raised: bool) -> None:
    """vLLM's own assertion about an answer of the connector's: only the command's exit code was said."""

    class EngineCore:
        def __init__(self, vllm_config: object) -> None:
            self.step_fn = self.step

        def step(self) -> str:
            assert not raised
            return "done"

    startup.wrap_init(
        "EngineCore", startup.ENGINE_CORE, Role.SCHEDULER, SimpleNamespace(EngineCore=EngineCore)
    )  # type: ignore[arg-type]
    core = EngineCore(None)
    if not raised:
        assert core.step_fn() == "done" and not trace.facts(Fact.START_FAILED)
        return
    with pytest.raises(AssertionError) as caught:
        core.step_fn()
    assert [one.name for one in caught.traceback][-1] == "step"
    trace.read()  # the spool is on disk
    run = read_run(trace.run_dir)
    assert not run.start_failures
    (ended,) = run.ended_in_steps
    assert ended.type == "AssertionError" and ended.where.endswith("in step")


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("vllm.v1.core", "assert found > 0", "assert found > 0"),
        ("vllm.v1.core", "assert found > 0, 'nothing'", "nothing"),
        ("my_store", "assert found > 0", ""),
    ],
)
def test_what_vllm_asserts_is_its_own_line(tmp_path: Path, module: str, line: str, told: str) -> None:
    """A line of a connector's may name what it stores."""
    path = tmp_path / "core.py"
    path.write_text(f"found = 0\n{line}\n", encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": module})
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # type: ignore[union-attr]
    assert startup.said(error) == told


def test_a_worker_that_comes_up_says_nothing(trace: Any) -> None:
    wrapper = wrapper_class("")()
    wrapper.init_device()
    assert wrapper.load_model(load_dummy_weights=True) == "loaded True"
    assert trace.facts(Fact.START_FAILED) == []
    startup._watch_worker(SimpleNamespace(load_model=None))
    startup._watch_worker(None)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "\n  Begun before the\n  other one was ready.\n\n  This means",
            "Begun before the other one was ready.",
        ),
        (OOM, "CUDA error: out of memory"),
        ("1 validation error for C\n  Value error, x\n", "1 validation error for C Value error, x"),
        ("", ""),
    ],
)
def test_what_is_told_of_a_message_of_several_lines(trace: Any, message: str, told: str) -> None:
    assert startup.said(RuntimeError(message)) == told
