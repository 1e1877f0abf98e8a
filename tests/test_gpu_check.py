"""scripts/gpu_check.py: what can be checked of it without a GPU. The runs themselves: `--device cpu`."""

from __future__ import annotations

import copy
import json
import sys
import threading
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu.cases import Case, expected, matrix
from gpu.judge import compare, judge, ratios

from kvtrace.trace import facts, hooks, ops, rows
from kvtrace.trace.format import DETAIL_IS_OP, Kind, Stop, pack_head
from kvtrace.trace.writer import Recorder

ROOT = Path(__file__).resolve().parent.parent

FULL = Case("FULL", False, "FLASH_ATTN")
MIXED = Case("FULL_AND_PIECEWISE", False, "FLASH_ATTN")
DECLARES = Case("FULL_AND_PIECEWISE", True, "FLASH_ATTN")


def mode(name: str, steps: int, ran: bool) -> dict[str, Any]:
    n = 4 * steps
    return {"mode": name, "steps": steps, "layer_steps": n, "bodies": n * ran, "saves": n * ran}


def report(
    *,
    used: str,
    modes: list[dict[str, Any]],
    finding: bool = False,
    why: tuple[str, ...] = (),
    saves: int = 8,
) -> dict[str, Any]:
    names = ("unified_attention_with_output", "save_kv_layer")
    fault = {"id": "full-cudagraph-replay", "severity": "fault"}
    return {
        "findings": [fault] if finding else [],
        "coverage": {"summary": [{"hook": "save_kv_layer", "fired": saves}]},
        "graphs": [{"used": used, "why": list(why), "modes": modes}],
        "device": {"lost": 0, "rows": [{"name": name, "count": 3} for name in names]},
    }


GOOD = {
    FULL: report(used="FULL", modes=[mode("FULL", 9, False)], finding=True, saves=0),
    MIXED: report(used="FULL_AND_PIECEWISE", modes=[mode("PIECEWISE", 2, True), mode("FULL", 9, False)]),
    DECLARES: report(
        used="PIECEWISE",
        modes=[mode("PIECEWISE", 11, True)],
        why=("GpuLayerStore declares requires_piecewise_for_cudagraph: ...",),
    ),
}


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_what_must_be_passes(case: Case) -> None:
    saves = GOOD[case]["coverage"]["summary"][0]["fired"]
    assert judge(case, GOOD[case], {"saves": saves}, "cuda") == []


def test_full_may_become_full_for_decode_and_it_is_said() -> None:
    said = "vLLM changed FULL to FULL_AND_PIECEWISE when the worker was ready, going by ..."
    modes = [mode("PIECEWISE", 2, True), mode("FULL", 9, False)]
    good = report(used="FULL_AND_PIECEWISE", modes=modes, why=(said,))
    assert judge(FULL, good, {"saves": 8}, "cuda") == []
    silent = report(used="FULL_AND_PIECEWISE", modes=modes)
    assert judge(FULL, silent, {"saves": 8}, "cuda") == [
        "the report does not say that vLLM changed FULL to FULL_AND_PIECEWISE"
    ]
    decode = report(
        used="FULL_DECODE_ONLY",
        modes=[mode("NONE", 2, True), modes[1]],
        why=("vLLM changed FULL to FULL_DECODE_ONLY ...",),
    )
    assert judge(FULL, decode, {"saves": 8}, "cuda") == []
    # not where the connector asked for PIECEWISE, nor for another mode
    assert judge(DECLARES, good, {"saves": 8}, "cuda") != []
    assert judge(Case("PIECEWISE", False, ""), good, {"saves": 8}, "cuda") != []


SHORT = {"id": "slots-short", "severity": "fault"}


def broken(case: Case, path: list[Any], value: object) -> list[str]:
    bad: Any = copy.deepcopy(GOOD[case])
    saves = bad["coverage"]["summary"][0]["fired"]
    part = bad
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return judge(case, bad, {"saves": saves}, "cuda")


@pytest.mark.parametrize(
    ("case", "path", "value", "says"),
    [
        (FULL, ["findings"], [], "full-cudagraph-replay is missing"),
        (MIXED, ["findings"], GOOD[FULL]["findings"], "full-cudagraph-replay was found"),
        (MIXED, ["findings"], [SHORT], "faults that are none: slots-short"),
        (MIXED, ["coverage", "summary", 0, "fired"], 12, "12 layer-steps in the report, 8 calls"),
        (MIXED, ["graphs"], [], "no section on graphs"),
        (DECLARES, ["graphs", 0, "used"], "FULL", "mode FULL was used, PIECEWISE expected"),
        (MIXED, ["graphs", 0, "modes"], [mode("FULL", 9, False)], "no step ran in mode PIECEWISE"),
        (DECLARES, ["graphs", 0, "modes", 0, "mode"], "FULL", "steps ran in mode FULL"),
        (MIXED, ["graphs", 0, "modes", 1, "bodies"], 4, "4 op bodies and 0 hooks in Python in FULL steps"),
        (MIXED, ["graphs", 0, "modes", 0, "bodies"], 7, "PIECEWISE: op bodies in 7 of 8 layer-steps"),
        (DECLARES, ["graphs", 0, "why"], [], "does not say that the connector's declaration"),
        (MIXED, ["device"], None, "no device times"),
        (MIXED, ["device", "rows", 1, "count"], 0, "no device times of save_kv_layer"),
        (MIXED, ["device", "lost"], 2, "2 device times could not be read"),
    ],
)
def test_what_must_not_be_is_said(case: Case, path: list[Any], value: object, says: str) -> None:
    problems = broken(case, path, value)
    assert any(says in problem for problem in problems), problems


def test_the_matrix_is_whole_and_each_case_expects_something() -> None:
    cases = matrix("cuda")
    assert len(cases) == len(set(cases)) == len({case.name for case in cases}) == 12
    flash = {(case.mode, case.declares) for case in cases if case.backend == "FLASH_ATTN"}
    modes = ("eager", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
    assert flash == {(name, declares) for name in modes for declares in (False, True)}
    assert {case.backend for case in cases} == {"FLASH_ATTN", "TRITON_ATTN"}
    for case in cases:
        want = expected(case)
        assert set(want.seen) <= set(want.may) and want.seen
        # a connector that declares PIECEWISE never meets a FULL graph
        assert not (case.declares and ("FULL" in want.may or want.full_finding))
    assert [case.name for case in matrix("cpu")] == ["eager-plain", "eager-declares"]


# 400 µs of attention; its hooks' 300 µs are counted to the op by the profiler, and not by the trace.
PROFILED = {"op": {"calls": 40.0, "device_ns": 700_000.0}, "save": {"calls": 40.0, "device_ns": 300_000.0}}
TRACED = {
    "op": {"calls": 40.0, "timed": 40.0, "device_ns": 600_000.0, "host_ns": 2_000_000.0, "own_ns": 0.0},
    "save": {"calls": 40.0, "timed": 40.0, "device_ns": 310_000.0, "host_ns": 900_000.0, "own_ns": 0.0},
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"calls": 39.0, "timed": 39.0}, "40 calls by the profiler, 39 in the trace"),
        ({"timed": 30.0}, "30 of 40 calls have a device time"),
        ({"device_ns": 300_000.0}, "less than its kernels' 0.400 ms"),
        ({"device_ns": 365_000.0}, ""),  # within the events' resolution
        ({"device_ns": 3_300_000.0}, "more than kernels and host can make (3.200 ms)"),
        ({"device_ns": 3_300_000.0, "own_ns": 900_000.0}, ""),  # events took long, by their own account
    ],
)
def test_device_times_against_the_profiler(change: dict[str, float], says: str) -> None:
    problems = compare(PROFILED, {**TRACED, "op": TRACED["op"] | change}, "cuda")
    assert bool(problems) == bool(says) and all(says in problem for problem in problems), problems


def test_the_hook_is_held_to_the_profiler_too() -> None:
    off = {**TRACED, "save": TRACED["save"] | {"calls": 44.0, "device_ns": 200_000.0}}
    assert compare(PROFILED, off, "cuda") == [
        "save_kv_layer: 40 calls by the profiler, 44 in the trace",
        "save_kv_layer: 40 of 44 calls have a device time",
        "save_kv_layer: 0.200 ms between the events, less than its kernels' 0.300 ms",
    ]


def test_a_profiler_without_kernels_proves_nothing() -> None:
    none = {name: row | {"device_ns": 0.0} for name, row in PROFILED.items()}
    assert len([line for line in compare(none, TRACED, "cuda") if "saw no kernel" in line]) == 2
    untimed = {name: row | {"timed": 0.0} for name, row in TRACED.items()}
    assert compare(none, untimed, "cpu") == []
    never = {name: row | {"calls": 0.0} for name, row in none.items()}
    assert compare(never, {name: row | {"calls": 0.0} for name, row in untimed.items()}, "cpu") != []


def test_the_trace_s_own_view_of_a_window(tmp_path: Path) -> None:
    """Calls and device times of the op and of the hook, between two host times, each for itself."""
    (tmp_path / "spool").mkdir()
    recorder = Recorder(tmp_path / "spool" / "worker.kvt", facts.Header(), 1 << 20)
    op, save = ops.ATTENTION_WITH_OUTPUT.code, hooks.SAVE_LAYER.code
    for t in (50, 150, 160, 950):
        recorder.add(rows.OpCall(pack_head(Kind.OP, 2, op), t, t + 5, 1, 0, 1, 0, 0))
        recorder.add(rows.DeviceCall(pack_head(Kind.DEVICE, 2, op, DETAIL_IS_OP), t, 1, 0, 30, 0, 7, 0))
    recorder.add(rows.HookCall(pack_head(Kind.HOOK, 2, save, 1), 170, 190, 1, 0, 0, 0, 0))
    recorder.add(rows.DeviceCall(pack_head(Kind.DEVICE, 2, save, 1), 170, 1, 0, 11, 0, 20, 0))
    for t, own in ((60, 999), (200, 30)):
        recorder.add(rows.TimedStep(pack_head(Kind.TIMED, 2), t, 1, 3, 0, 0, own_ns=own, busy_ns=90))
    recorder.stop(Stop.CLEAN)
    assert gpu_check.in_window(tmp_path, [100, 900]) == {
        "op": {"calls": 2, "timed": 2, "device_ns": 60, "host_ns": 14, "own_ns": 20},
        "save": {"calls": 1, "timed": 1, "device_ns": 11, "host_ns": 20, "own_ns": 10},
    }


def test_ratios_are_taken_pair_by_pair() -> None:
    found = ratios([2.0, 4.0, 1.0, 3.0], [1.0, 4.0, 1.0, 2.0])
    assert found == {"pairs": 4, "median": 1.25, "q1": 1.0, "q3": 1.875}
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


def test_without_a_gpu_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "missing", list)
    monkeypatch.setattr(gpu_check, "PROBE", "raise RuntimeError('CUDA error: busy\\nadvice')")
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "no CUDA device that can be used (RuntimeError: CUDA error: busy)" in captured.err
    assert list(tmp_path.iterdir()) == []
    assert gpu_check.main(["--device", "cpu", "--case", "nonsense"]) == 2
    assert "eager-plain" in capsys.readouterr().err


def test_what_this_python_lacks_is_said_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", ("json", "no_such_pandas", "no_such_typer"))
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main([]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "lacks no_such_pandas, no_such_typer" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_engines_keep_the_machines_settings_but_own_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/theirs")
    monkeypatch.setenv("PYTHONPATH", "/bundle")
    env = gpu_check.Runner(tmp_path, "cuda", tmp_path / "model").env
    assert env["VLLM_USE_DEEP_GEMM"] == "0" and env["VLLM_CACHE_ROOT"].startswith(str(tmp_path))
    assert env["PYTHONPATH"].split(":") == [
        str(ROOT),
        str(ROOT / "scripts"),
        str(ROOT / "scripts" / "gpu"),
        "/bundle",
    ]
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "KVTRACE_CONFIG" not in env


class Scripted(gpu_check.Runner):
    """Runner that starts no engine but a small script."""

    def __init__(self, work: Path, code: str) -> None:
        super().__init__(work, "cuda", work / "model")
        self.code = code

    def start(self, name: str, *_: Any, piped: bool = False, **__: Any) -> tuple[Any, Path]:
        folder = self.work / name
        folder.mkdir(parents=True)
        (folder / "log").write_text("the engine's last words")
        return self.begin([sys.executable, "-c", self.code], folder, piped), folder


ENGINE = """
import json, pathlib, sys
print("ready", flush=True)
seconds = 1.0 if pathlib.Path.cwd().name.endswith("-untraced") else 2.0
for n, line in enumerate(sys.stdin):
    tokens = [[int(line), n if OFF and seconds == 2.0 else 0]]
    print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)
device = {"steps": 4, "calls": 32, "own_ns": 5, "busy_ns": 1000}
report = {"run": {"engines": [{"real_steps": 10}]}, "limits": {"tracer": {"records": 255}}, "device": device}
pathlib.Path("run").mkdir()
pathlib.Path("run/report.json").write_text(json.dumps(report))
pathlib.Path("result.json").write_text("{}")
"""


@pytest.mark.parametrize(
    ("loaded", "proved", "fault", "problems"),
    [(384, 4, [], 0), (383, 4, [], 1), (384, 0, [], 1), (384, 4, ["kv-load-wrong"], 1)],
)
def test_vllms_own_connectors_give_back_what_the_engine_says(
    loaded: int, proved: int, fault: list[str], problems: int
) -> None:
    case = next(one for one in matrix("cuda") if one.connector == "OffloadingConnector")
    loads = {"tokens": {"loaded": float(loaded)}, "grades": {"loaded": {"proved": proved}}}
    told = {
        "ledger": {"loads": loads},
        "findings": [{"id": one, "severity": "fault"} for one in fault],
    }
    assert len(judge(case, told, {"loaded": 384}, "cuda")) == problems


@pytest.mark.parametrize("off", [False, True])
def test_the_ratio_is_of_living_engines_with_equal_tokens(off: bool, tmp_path: Path) -> None:
    runner: Any = Scripted(tmp_path, f"OFF = {off}\n{ENGINE}")
    found = gpu_check.run_ratio(runner, MIXED, gpu_check.time.monotonic() + 18)
    assert set(found["batches"]) == {"1", "64"}
    for part in found["batches"].values():
        for way in (part["default"], part["budget"]):
            assert way["median"] == way["q1"] == way["q3"] == 2.0 and way["pairs"] >= 2
        assert part["untraced_step_ms"] == round(1000 / 24, 3)
    assert found["per_step"] == {
        "steps": 10,
        "records": 25.5,
        "timed_steps": 4,
        "event_pairs_a_timed_step": 8.0,
        "timing_share": 0.005,
    }
    assert found["ok"] is not off
    assert len(found["problems"]) == 2 * off


def test_parts_that_fail_or_run_out_of_time_stand_in_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    runner: Any = Scripted(tmp_path / "dead", "raise SystemExit(3)")
    assert gpu_check.check(runner, [FULL], "H", 60, out, ["cases", "profile", "parts", "ratio"]) is False
    document = json.loads(out.read_text())
    assert document["ok"] is False and document["schema"] == "kvtrace.gpu-check/1"
    (case,) = document["parts"]["cases"]
    assert case["problems"][0].startswith("no result: FileNotFoundError") and "last words" in case["log"]
    for part in ("profile", "parts"):
        assert document["parts"][part]["problems"][0].startswith("no result")
    assert document["parts"]["ratio"]["problems"] == ["EOFError: an engine ended early"]
    runner = Scripted(tmp_path / "slow", "import time; time.sleep(60)")
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 0.6)
    deadline = gpu_check.time.monotonic() + 1.49
    assert gpu_check.run_case(runner, FULL, deadline)["problems"] == ["cut off after 1 s"]
    assert gpu_check.run_case(runner, MIXED, deadline)["problems"] == ["skipped: no time left"]


def test_results_are_written_by_case_and_a_hanging_case_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "CASE_SECONDS", 5)  # the second case ends by itself sooner
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 1)
    monkeypatch.setattr(gpu_check, "JOBS", 1)
    code = "import pathlib, time; time.sleep(60 if 'full-plain' in pathlib.Path.cwd().name else 0)"
    runner = Scripted(tmp_path / "work", code)
    out = tmp_path / "out.json"
    seen: list[int] = []

    def keep(rows: Any) -> None:
        seen.append(len(rows))

    rows = gpu_check.run_cases(runner, [FULL, MIXED], gpu_check.time.monotonic() + 60, keep)
    assert seen == [1, 2] and not runner.living
    assert rows[0]["problems"] == ["cut off after 5 s"] and rows[1]["problems"][0].startswith("no result")
    with pytest.MonkeyPatch.context() as patch:  # cut off before the first case is done
        patch.setattr(gpu_check, "run_cases", lambda *_: sys.exit(143))
        with pytest.raises(SystemExit):
            gpu_check.check(runner, [MIXED], "H", 60, out, ["cases"])
    assert json.loads(out.read_text())["ok"] is False


@pytest.mark.parametrize("late", [False, True])
def test_told_to_stop_it_leaves_no_engine_behind(tmp_path: Path, late: bool) -> None:
    """Nor one that was on its way just then."""
    code = "import pathlib, time; time.sleep(0 if pathlib.Path.cwd().name == 'full-plain-flash_attn' else 60)"
    runner = Scripted(tmp_path, code)
    begin, stop_all = runner.begin, runner.stop_all
    told = threading.Event()

    def slow(command: list[str], folder: Path, piped: bool) -> Any:
        if late and folder.name != FULL.name:
            assert told.wait(20)
        return begin(command, folder, piped)

    def stop() -> None:
        stop_all()
        told.set()

    def stopped(rows: Any) -> None:
        raise SystemExit(143)

    runner.begin, runner.stop_all = slow, stop  # type: ignore[method-assign]
    began = gpu_check.time.monotonic()
    with pytest.raises(SystemExit):
        gpu_check.run_cases(runner, [FULL, MIXED, DECLARES], began + 60, stopped)
    assert gpu_check.time.monotonic() - began < 30 and not runner.living
