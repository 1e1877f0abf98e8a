#!/usr/bin/env python3
"""Check kvtrace on a GPU: graph modes, findings, device times, and what tracing costs. One JSON.

    python scripts/gpu_check.py [--out FILE] [--work DIR] [--seconds N]
    python scripts/gpu_check.py --device cpu        # a dry run of driver, judge and JSON on a CPU build

Needs a CUDA device and a Python with vLLM, its torch and transformers, and what kvtrace needs: numpy, pandas,
rich, typer (`pip install --target DIR pandas rich typer` where there is a network, then PYTHONPATH=DIR); a C
compiler and Python's headers for Triton; no network, and kvtrace need not be installed. A tiny model is made
on the spot. Four parts, each with a time budget of its own: the cases (`scripts/gpu/cases.py`: graph mode x
connector x attention backend), each a real engine under `kvtrace run`; device times against torch's profiler
over the same steps; the agent's time of a step by its parts (`scripts/step_parts.py`); and traced against
untraced engines, in turns, at batch 1 and 64. What fails or finds no
time stands in the JSON; the rest stays. Exit code 0 where all is as it must be, 1 where not, 2 where it
cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import select
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "scripts" / "gpu"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu.cases import BLOCK_STEPS, OP, SAVE, Case, matrix  # noqa: E402
from gpu.judge import compare, judge, ratios  # noqa: E402

SHARES = {"cases": 0.5, "profile": 0.12, "parts": 0.13, "ratio": 0.25}  # of the seconds
JOBS = 4
FULL = ("--device-timing", "full")
WAYS: dict[str, tuple[str, ...] | None] = {
    "default": (), "budget": ("--budget", "2%"), "first": ("--watch", "first"), "untraced": None,
}  # fmt: skip
"""Of the ratio's engines: options of `kvtrace run`. "first" shows steps that are not watched."""
BATCHES = (1, 64)
CASE_SECONDS = 150
"""A case that hangs must not take the others' time."""
LEAST_SECONDS = 10
"""With fewer left no case begins."""

NEEDED = (
    "vllm", "torch", "transformers", "tokenizers", "safetensors",  # an engine and its model
    "numpy", "pandas", "rich", "typer",  # kvtrace and its report
)  # fmt: skip
PROBE = """
import torch
name = torch.cuda.get_device_name()
torch.zeros(1, device="cuda").cpu()
print(name)
"""


def missing() -> list[str]:
    """Packages that this Python lacks. Looked for, not imported."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def cannot_compile() -> str:
    """What Triton will miss, "" where nothing: it compiles its launchers on the spot."""
    if not (os.environ.get("CC") or any(map(shutil.which, ("clang", "gcc", "cc")))):
        return "no C compiler"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.exists() else f"no Python headers ({header})"


def find_gpu() -> tuple[str | None, str]:
    """(the device's name, "") or (None, why it cannot be used: absent, busy, out of memory).

    Asked in a process of its own: a context of ours would take memory, or the device where only one may
    have it.
    """
    try:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return None, "no answer within 120 s"
    if probe.returncode:
        # torch adds advice below its message
        said = [line for line in probe.stderr.splitlines() if "Error" in line]
        return None, (said or ["no CUDA device"])[-1][:300]
    return probe.stdout.strip().splitlines()[-1], ""


class Runner:
    """Starts engines below a working directory."""

    def __init__(self, work: Path, device: str, model: Path) -> None:
        from vllm_env import vllm_env

        self.work, self.device, self.model = work, device, model
        self.living: set[subprocess.Popen[str]] = set()
        self.closed = False
        path = [str(ROOT), str(ROOT / "scripts"), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        env = vllm_env(work / "cache")
        # what the machine's own set-up says of vLLM (a package that is not there, ...) must hold here too
        own = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        self.env = {**own, **env} | {
            "PYTHONPATH": os.pathsep.join(part for part in path if part),
            # the engine, its worker and the profiler in one process
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # there may be no network but the loopback device
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }

    def start(
        self, name: str, case: Case, job: str, options: Sequence[str] | None, piped: bool = False
    ) -> tuple[subprocess.Popen[str], Path]:
        """A process of its own session, and its folder. ``options``: of `kvtrace run`; None: untraced."""
        folder = self.work / name
        folder.mkdir(parents=True)
        spec = {
            "job": job, "mode": case.mode, "declares": case.declares, "backend": case.backend,
            "connector": case.connector, "device": self.device, "model": str(self.model),
            "store": str(folder / "store"), "result": str(folder / "result.json"),
        }  # fmt: skip
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, str(SUPPORT / "drive.py"), str(folder / "spec.json")]
        if options is not None:
            traced = ["run", "-o", str(folder / "run"), *options, "--"]
            command = [sys.executable, "-m", "kvtrace", *traced, *command]
        return self.begin(command, folder, piped), folder

    def begin(self, command: list[str], folder: Path, piped: bool) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE if piped else subprocess.DEVNULL
        with (folder / "log").open("a") as log:
            process = subprocess.Popen(
                command, env=self.env, cwd=folder, stdin=pipe, stdout=pipe, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
        self.living.add(process)
        if self.closed:  # told to stop while this one was on its way
            self.stop(process)
        return process

    def stop(self, process: subprocess.Popen[str]) -> None:
        """End its whole session's group: an engine that is left behind would keep the device."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.living.discard(process)

    def stop_all(self) -> None:
        self.closed = True
        for process in list(self.living):
            self.stop(process)


def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the driver found, the report). Raises where one of them is not there."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result, json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))


def log_tail(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "log").read_text(encoding="utf-8", errors="replace")[-1500:]
    return ""


# --- the parts -------------------------------------------------------------------------------------


def run_case(runner: Runner, case: Case, deadline: float) -> dict[str, Any]:
    began = time.monotonic()
    row: dict[str, Any] = {"case": case.name, "ok": False, "problems": []}
    left = min(CASE_SECONDS, deadline - began)
    if left < LEAST_SECONDS:
        return row | {"problems": ["skipped: no time left"]}
    process, folder = runner.start(case.name, case, "case", FULL)
    try:
        process.wait(left)
        result, report = outcome(folder)
        row["problems"] = judge(case, report, result["counts"], runner.device)
        row["counts"] = result["counts"]
        row["findings"] = [one["id"] for one in report["findings"]]
        row["graphs"], row["device"] = report.get("graphs"), report.get("device")
        row["ok"] = not row["problems"]
    except subprocess.TimeoutExpired:
        row["problems"] = [f"cut off after {left:.0f} s"]
        row["log"] = log_tail(folder)
    except (OSError, ValueError, KeyError) as error:
        row["problems"] = [f"no result: {type(error).__name__}: {error}"]
        row["log"] = log_tail(folder)
    finally:
        runner.stop(process)
    return row | {"seconds": round(time.monotonic() - began, 1)}


def run_cases(
    runner: Runner, cases: list[Case], deadline: float, keep: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Several at once; ``keep`` is given the rows after each."""
    jobs = 1 if runner.device == "cpu" else JOBS
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for row in pool.map(lambda case: run_case(runner, case, deadline), cases):
                rows.append(row)
                keep(rows)
        except BaseException:  # told to stop: the threads wait for their engines
            pool.shutdown(wait=False, cancel_futures=True)
            runner.stop_all()
            raise
    return rows


def in_window(run_dir: Path, window: list[int]) -> dict[str, dict[str, float]]:
    """The trace's own view of the attention op and of save_kv_layer between two host times. ``own_ns``: what
    the timing took for so many calls, by its own account (a profiler makes events dear)."""
    from kvtrace.trace import hooks, ops, rows
    from kvtrace.trace.format import DETAIL_IS_OP
    from kvtrace.trace.reader import Spool, spool_paths

    def inside(row: Any, number: int) -> Any:
        return (row.t0 >= window[0]) & (row.t0 <= window[1]) & (rows.code(row.head) == number)

    wanted: dict[str, tuple[int, Any]] = {
        "op": (ops.BY_NAME[OP].code, rows.OpCall),
        "save": (hooks.BY_NAME[SAVE].code, rows.HookCall),
    }
    found = {name: {"calls": 0, "timed": 0, "device_ns": 0, "host_ns": 0, "own_ns": 0} for name in wanted}
    own = calls = 0
    for path in spool_paths(run_dir):
        for chunk in Spool(path).chunks():
            timed, steps = rows.of_kind(rows.DeviceCall, chunk), rows.of_kind(rows.TimedStep, chunk)
            during = (steps.t >= window[0]) & (steps.t <= window[1])
            own, calls = own + int(steps.own_ns[during].sum()), calls + int(steps.calls[during].sum())
            of_op = rows.detail(timed.head) == DETAIL_IS_OP
            for name, (number, row) in wanted.items():
                sums = found[name]
                sums["calls"] += int(inside(rows.of_kind(row, chunk), number).sum())
                chosen = inside(timed, number) & (of_op == (row is rows.OpCall))
                sums["timed"] += int(chosen.sum())
                sums["device_ns"] += int(timed.device_ns[chosen].sum())
                sums["host_ns"] += int(timed.host_ns[chosen].sum())
    for sums in found.values():
        sums["own_ns"] = own * sums["timed"] // max(1, calls)
    return {name: {key: float(value) for key, value in sums.items()} for name, sums in found.items()}


def run_profile(runner: Runner, case: Case, deadline: float) -> dict[str, Any]:
    def of(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
        seen = in_window(folder / "run", result["profile"]["window"])
        problems = compare(result["profile"], seen, runner.device)
        return {
            "ok": not problems, "problems": problems, "profiler": result["profile"],
            "trace": seen, "vllm": result["vllm"], "torch": result["torch"],
        }  # fmt: skip

    return run_alone(runner, "profile", case, FULL, deadline, of)


def run_parts(runner: Runner, case: Case, deadline: float) -> dict[str, Any]:
    """µs of a step, of which few are watched."""

    def of(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
        return {"ok": True, "problems": [], "parts": result["parts"]}

    return run_alone(runner, "parts", case, WAYS["first"], deadline, of)


def run_alone(
    runner: Runner,
    job: str,
    case: Case,
    options: Sequence[str] | None,
    deadline: float,
    of: Callable[[Path, dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """One engine that does this job, and what ``of`` makes of its folder and result."""
    process, folder = runner.start(job, case, job, options)
    try:
        process.wait(max(1.0, deadline - time.monotonic()))
        return {"case": case.name, **of(folder, outcome(folder)[0])}
    except subprocess.TimeoutExpired:
        return {"ok": False, "problems": ["cut off: no time left"], "log": log_tail(folder)}
    except (OSError, ValueError, KeyError) as error:
        problem = f"no result: {type(error).__name__}: {error}"
        return {"ok": False, "problems": [problem], "log": log_tail(folder)}
    finally:
        runner.stop(process)


def read_line(stream: IO[str], deadline: float) -> str:
    """Raises TimeoutError past the deadline, EOFError where the engine ended."""
    if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TimeoutError("no time left")
    line = stream.readline()
    if not line:
        raise EOFError("an engine ended early")
    return line


def run_ratio(runner: Runner, case: Case, deadline: float) -> dict[str, Any]:
    """Traced (as by default, and within a budget) and untraced, alive at once, one block each in turn."""
    engines = {
        name: runner.start(f"ratio-{name}", case, "blocks", options, piped=True)
        for name, options in WAYS.items()
    }
    out: dict[str, Any] = {"case": case.name, "ok": False, "problems": [], "batches": {}}
    try:
        for process, _ in engines.values():
            assert process.stdout is not None
            read_line(process.stdout, deadline)
        share = max(1.0, deadline - time.monotonic() - 15) / len(BATCHES)
        for batch in BATCHES:
            seconds: dict[str, list[float]] = {name: [] for name in WAYS}
            until = time.monotonic() + share
            # The first ones warm up; a traced engine's first eight steps with work run watched.
            pair = -10 if batch == BATCHES[0] else -3
            while pair < 2 or (time.monotonic() < until and pair < 200):
                figures = {}
                for name in sorted(WAYS, reverse=bool(pair % 2)):
                    process, _ = engines[name]
                    assert process.stdin is not None and process.stdout is not None
                    process.stdin.write(f"{batch}\n")
                    process.stdin.flush()
                    figures[name] = json.loads(read_line(process.stdout, deadline))
                    if pair >= 0:
                        seconds[name].append(figures[name]["seconds"])
                said = f"batch {batch}: traced and untraced made different tokens"
                if any(one["tokens"] != figures["untraced"]["tokens"] for one in figures.values()):
                    out["problems"] += [said] if said not in out["problems"] else []
                pair += 1
            untraced = seconds.pop("untraced")
            out["batches"][str(batch)] = {
                "untraced_step_ms": round(1e3 * statistics.median(untraced) / BLOCK_STEPS, 3),
                **{name: ratios(some, untraced) for name, some in seconds.items()},
            }
        for process, _ in engines.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(max(1.0, deadline - time.monotonic()))
        _, report = outcome(engines["default"][1])
        steps = sum(one["real_steps"] for one in report["run"]["engines"])
        timed = report.get("device") or {"steps": 0, "calls": 0, "own_ns": 0, "busy_ns": 0}
        out["per_step"] = {
            "steps": steps,
            "records": round(report["limits"]["tracer"]["records"] / max(1, steps), 1),
            "timed_steps": timed["steps"],
            "event_pairs_a_timed_step": round(timed["calls"] / max(1, timed["steps"]), 1),
            "timing_share": round(timed["own_ns"] / timed["busy_ns"], 5) if timed["busy_ns"] else 0.0,
        }
        out["ok"] = not out["problems"]
    except (OSError, ValueError, KeyError, EOFError, TimeoutError, subprocess.TimeoutExpired) as error:
        out["problems"].append(f"{type(error).__name__}: {error}")
        out["logs"] = {name: log_tail(folder) for name, (_, folder) in engines.items()}
    finally:
        for process, _ in engines.values():
            runner.stop(process)
    return out


# --- one JSON --------------------------------------------------------------------------------------


def check(runner: Runner, cases: list[Case], name: str, seconds: float, out: Path, parts: list[str]) -> bool:
    """Run the parts and write the JSON after each; whether all is well."""
    from kvtrace import __version__

    began = time.monotonic()
    document: dict[str, Any] = {
        "schema": "kvtrace.gpu-check/1", "ok": False, "device": name, "kvtrace": __version__,
        "python": platform.python_version(), "seconds": 0.0, "parts": {},
    }  # fmt: skip
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    most = "FULL_AND_PIECEWISE" if runner.device != "cpu" else "eager"
    typical = next((case for case in matrix(runner.device) if case.mode == most), cases[0])
    # In FULL replays there is no call to compare: PIECEWISE shows every step.
    shown = next((case for case in matrix(runner.device) if case.mode == "PIECEWISE"), cases[0])

    def keep(part: str, value: Any) -> list[dict[str, Any]]:
        """The JSON as far as it is known: whoever cuts this off has what was found."""
        document["parts"][part] = value
        document["seconds"] = round(time.monotonic() - began, 1)
        values = document["parts"].values()
        rows = [row for value in values for row in (value if isinstance(value, list) else [value])]
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return rows

    jobs: dict[str, Callable[[float], Any]] = {
        "cases": lambda deadline: run_cases(runner, cases, deadline, lambda rows: keep("cases", rows)),
        "profile": lambda deadline: run_profile(runner, shown, deadline),
        "parts": lambda deadline: run_parts(runner, typical, deadline),
        "ratio": lambda deadline: run_ratio(runner, typical, deadline),
    }
    for part in parts:
        # what an earlier part left over is a later one's
        later = sum(SHARES[other] for other in parts[parts.index(part) :])
        left = seconds - (time.monotonic() - began)
        deadline = time.monotonic() + left * SHARES[part] / later
        try:
            value = jobs[part](deadline)
        except Exception:
            value = {"ok": False, "problems": [traceback.format_exc()[-1500:]]}
        rows = keep(part, value)
    document["ok"] = all(row["ok"] for row in rows)
    keep(part, value)
    for row in rows:
        state = "ok" if row["ok"] else "; ".join(row["problems"])
        print(f"{row.get('case', '-'):40} {state}", flush=True)
    return bool(document["ok"])


def main(arguments: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the JSON [gpu-check.json]")
    parser.add_argument("--work", type=Path, help="a new folder for the runs [.cache/gpu-check-<pid>]")
    parser.add_argument("--seconds", type=float, default=450, help="for all of it [450]")
    parser.add_argument("--case", action="append", help="only cases of this name (repeatable)")
    parser.add_argument("--part", action="append", choices=tuple(SHARES), help="only this part (repeatable)")
    options = parser.parse_args(arguments)
    lacking = missing()
    if lacking:
        print(
            f"gpu_check: {sys.executable} lacks {', '.join(lacking)}; see the head of this file",
            file=sys.stderr,
        )
        return 2
    name, why = find_gpu() if options.device == "cuda" else ("cpu (dry run)", "")
    if name is None:
        print(
            f"gpu_check: no CUDA device that can be used ({why}): run it on a GPU machine, or try "
            "--device cpu",
            file=sys.stderr,
        )
        return 2
    if options.device == "cuda" and cannot_compile():
        print(f"gpu_check: {cannot_compile()}: Triton's launchers may fail to compile", file=sys.stderr)
    cases = [case for case in matrix(options.device) if not options.case or case.name in options.case]
    if not cases:
        known = ", ".join(case.name for case in matrix(options.device))
        print(f"gpu_check: no such case; there are {known}", file=sys.stderr)
        return 2
    work = (options.work or ROOT / ".cache" / f"gpu-check-{os.getpid()}").resolve()
    try:
        work.mkdir(parents=True)
        from tiny_model import make_tiny_model

        model = make_tiny_model(work / "model")
        options.out.touch()  # where it cannot be written, say so now
    except (OSError, ImportError) as error:
        print(f"gpu_check: cannot prepare {work}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    runner = Runner(work, options.device, model)
    parts = [part for part in SHARES if not options.part or part in options.part]
    # `timeout` and a closed terminal must not leave engines behind, in sessions of their own.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    try:
        left = options.seconds - (time.monotonic() - began)  # looking for the device, and the model
        good = check(runner, cases, name, left, options.out, parts)
    finally:
        runner.stop_all()
    print(f"gpu_check: {'all as expected' if good else 'not as expected'}: {options.out}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
