#!/usr/bin/env python3
"""Check kvtrace on a GPU: graph modes, findings, device times, and what tracing costs. One JSON.

    python scripts/gpu_check.py [--out FILE] [--work DIR] [--seconds N]
    python scripts/gpu_check.py --device cpu        # a dry run of driver, judge and JSON on a CPU build

Needs vLLM, torch and a CUDA device; no network. A tiny model is made on the spot. Three parts, each with a
time budget of its own: the cases (`scripts/gpu/cases.py`: graph mode x connector x attention backend), each
a real engine under `kvtrace run`; device times against torch's profiler over the same steps; and traced
against untraced engines, in turns, at batch 1 and 64. What fails or finds no time stands in the JSON; the
rest stays. Exit code 0 where all is as it must be, 1 where not, 2 where it cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "scripts" / "gpu"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu.cases import OP, Case, matrix  # noqa: E402
from gpu.judge import compare, judge, ratios  # noqa: E402

SHARES = {"cases": 0.6, "profile": 0.15, "ratio": 0.25}  # of the seconds
JOBS = 3
BATCHES = (1, 64)


def gpu_name() -> str | None:
    """The device's name; None where there is none."""
    try:
        import torch
    except ImportError:
        return None
    with contextlib.suppress(Exception):
        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name())
    return None


class Runner:
    """Starts engines below a working directory."""

    def __init__(self, work: Path, device: str, model: Path) -> None:
        from vllm_env import vllm_env

        self.work, self.device, self.model = work, device, model
        path = [str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
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
        self, name: str, case: Case, job: str, timing: str | None, piped: bool = False
    ) -> tuple[subprocess.Popen[str], Path]:
        """A process of its own session, and its folder. ``timing`` None: untraced."""
        folder = self.work / name
        folder.mkdir(parents=True)
        spec = {
            "job": job, "mode": case.mode, "declares": case.declares, "backend": case.backend,
            "device": self.device, "model": str(self.model), "store": str(folder / "store"),
            "result": str(folder / "result.json"),
        }  # fmt: skip
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, str(SUPPORT / "drive.py"), str(folder / "spec.json")]
        if timing is not None:
            traced = ["run", "-o", str(folder / "run"), "--device-timing", timing, "--"]
            command = [sys.executable, "-m", "kvtrace", *traced, *command]
        pipe = subprocess.PIPE if piped else subprocess.DEVNULL
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, env=self.env, cwd=folder, stdin=pipe, stdout=pipe, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
        return process, folder


def stop(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    left = deadline - began
    if left < 10:
        return row | {"problems": ["skipped: no time left"]}
    process, folder = runner.start(case.name, case, "case", "full")
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
        stop(process)
    return row | {"seconds": round(time.monotonic() - began, 1)}


def run_cases(runner: Runner, cases: list[Case], deadline: float) -> list[dict[str, Any]]:
    jobs = 1 if runner.device == "cpu" else JOBS
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda case: run_case(runner, case, deadline), cases))


def in_window(run_dir: Path, window: list[int]) -> dict[str, float]:
    """The trace's own view of the attention op between two host times."""
    from kvtrace.trace.format import OP_CODE, QUIET_IS_OP, Kind
    from kvtrace.trace.reader import Spool, code, kind, lane, spool_paths

    found = {"calls": 0, "timed": 0, "device_ns": 0, "host_ns": 0}
    for path in spool_paths(run_dir):
        for chunk in Spool(path).chunks():
            head = chunk[:, 0]
            inside = (chunk[:, 1] >= window[0]) & (chunk[:, 1] <= window[1]) & (code(head) == OP_CODE[OP])
            found["calls"] += int((inside & (kind(head) == Kind.OP)).sum())
            timed = chunk[inside & (kind(head) == Kind.DEVICE) & (lane(head) == QUIET_IS_OP)]
            found["timed"] += len(timed)
            found["device_ns"] += int(timed[:, 4].sum())
            found["host_ns"] += int(timed[:, 6].sum())
    return {name: float(value) for name, value in found.items()}


def run_profile(runner: Runner, case: Case, deadline: float) -> dict[str, Any]:
    process, folder = runner.start("profile", case, "profile", "full")
    try:
        process.wait(max(1.0, deadline - time.monotonic()))
        result, _ = outcome(folder)
        seen = in_window(folder / "run", result["profile"]["window"])
        problems = compare(result["profile"], seen, runner.device)
        return {
            "case": case.name, "ok": not problems, "problems": problems, "profiler": result["profile"],
            "trace": seen, "vllm": result["vllm"], "torch": result["torch"],
        }  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"ok": False, "problems": ["cut off: no time left"], "log": log_tail(folder)}
    except (OSError, ValueError, KeyError) as error:
        problem = f"no result: {type(error).__name__}: {error}"
        return {"ok": False, "problems": [problem], "log": log_tail(folder)}
    finally:
        stop(process)


def read_line(stream: IO[str], deadline: float) -> str:
    """Raises TimeoutError past the deadline, EOFError where the engine ended."""
    if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TimeoutError("no time left")
    line = stream.readline()
    if not line:
        raise EOFError("an engine ended early")
    return line


def run_ratio(runner: Runner, case: Case, deadline: float) -> dict[str, Any]:
    """Traced (as by default) and untraced, alive at once, one block each in turn."""
    engines = {
        name: runner.start(f"ratio-{name}", case, "blocks", timing, piped=True)
        for name, timing in (("traced", "sampled"), ("untraced", None))
    }
    out: dict[str, Any] = {"case": case.name, "ok": False, "problems": [], "batches": {}}
    try:
        for process, _ in engines.values():
            assert process.stdout is not None
            read_line(process.stdout, deadline)
        share = max(1.0, deadline - time.monotonic() - 15) / len(BATCHES)
        for batch in BATCHES:
            seconds: dict[str, list[float]] = {"traced": [], "untraced": []}
            until = time.monotonic() + share
            # The first ones warm up; a traced engine's first eight steps with work run watched.
            pair = -10 if batch == BATCHES[0] else -3
            while pair < 2 or (time.monotonic() < until and pair < 200):
                figures = {}
                for name in ("traced", "untraced") if pair % 2 else ("untraced", "traced"):
                    process, _ = engines[name]
                    assert process.stdin is not None and process.stdout is not None
                    process.stdin.write(f"{batch}\n")
                    process.stdin.flush()
                    figures[name] = json.loads(read_line(process.stdout, deadline))
                    if pair >= 0:
                        seconds[name].append(figures[name]["seconds"])
                said = f"batch {batch}: traced and untraced made different tokens"
                if (
                    figures["traced"]["tokens"] != figures["untraced"]["tokens"]
                    and said not in out["problems"]
                ):
                    out["problems"].append(said)
                pair += 1
            out["batches"][str(batch)] = ratios(seconds["traced"], seconds["untraced"])
        for process, _ in engines.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(max(1.0, deadline - time.monotonic()))
        _, report = outcome(engines["traced"][1])
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
            stop(process)
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
    most = "FULL_AND_PIECEWISE" if runner.device != "cpu" else "eager"
    typical = next((case for case in matrix(runner.device) if case.mode == most), cases[0])
    # In FULL replays there is no call to compare: PIECEWISE shows every step.
    shown = next((case for case in matrix(runner.device) if case.mode == "PIECEWISE"), cases[0])
    jobs: dict[str, Callable[[float], Any]] = {
        "cases": lambda deadline: run_cases(runner, cases, deadline),
        "profile": lambda deadline: run_profile(runner, shown, deadline),
        "ratio": lambda deadline: run_ratio(runner, typical, deadline),
    }
    for part in parts:
        # what an earlier part left over is a later one's
        later = sum(SHARES[other] for other in parts[parts.index(part) :])
        left = seconds - (time.monotonic() - began)
        deadline = time.monotonic() + left * SHARES[part] / later
        try:
            document["parts"][part] = jobs[part](deadline)
        except Exception:
            document["parts"][part] = {"ok": False, "problems": [traceback.format_exc()[-1500:]]}
        document["seconds"] = round(time.monotonic() - began, 1)
        values = document["parts"].values()
        rows = [row for value in values for row in (value if isinstance(value, list) else [value])]
        document["ok"] = len(document["parts"]) == len(parts) and all(row["ok"] for row in rows)
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        for row in rows if part == parts[-1] else ():
            state = "ok" if row["ok"] else "; ".join(row["problems"])
            print(f"{row.get('case', '-'):40} {state}", flush=True)
    return bool(document["ok"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the JSON [gpu-check.json]")
    parser.add_argument("--work", type=Path, help="a new folder for the runs [.cache/gpu-check-<pid>]")
    parser.add_argument("--seconds", type=float, default=450, help="for all of it [450]")
    parser.add_argument("--case", action="append", help="only cases of this name (repeatable)")
    parser.add_argument("--part", action="append", choices=tuple(SHARES), help="only this part (repeatable)")
    options = parser.parse_args(arguments)
    name = gpu_name() if options.device == "cuda" else "cpu (dry run)"
    if name is None:
        print("gpu_check: no CUDA device here: run it on a GPU machine, or try --device cpu", file=sys.stderr)
        return 2
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
    except (OSError, ImportError) as error:
        print(f"gpu_check: cannot prepare {work}: {error}", file=sys.stderr)
        return 2
    runner = Runner(work, options.device, model)
    parts = [part for part in SHARES if not options.part or part in options.part]
    good = check(runner, cases, name, options.seconds, options.out, parts)
    print(f"gpu_check: {'all as expected' if good else 'not as expected'}: {options.out}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
