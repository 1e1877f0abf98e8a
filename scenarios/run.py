"""Runs scenarios on the vLLM of this Python, traced: ``python scenarios/run.py NAME... --out DIR``.

Each scenario gets a run directory DIR/<name> as ``kvtrace run`` makes them. Scenarios of one
process share this one, engine after engine (a few seconds each after one import of vLLM); the
others go through ``kvtrace run``. Beside the run directories: DIR/_outcome/<name>.json (answers,
files in the store, seconds) and DIR/_store/<name> (what the connector wrote).

Exit codes: 0 all ran (and, with --check, gave what they expect), 1 not, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
from spec import Scenario, ScenarioError, load, names

from kvtrace import CONFIG_VARIABLE
from kvtrace.launch.own_process import write_run
from kvtrace.trace.config import AgentConfig, new_salt

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LIMIT_BYTES = 256 << 20
NOTE = "one process: scheduler and worker side by side, several engines in turn"


class Output:
    """Where things of one call of this script lie."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def run(self, name: str) -> Path:
        return self.out / name

    def store(self, name: str) -> Path:
        return self.out / "_store" / name

    def outcome(self, name: str) -> Path:
        return self.out / "_outcome" / f"{name}.json"


def run_here(scenarios: list[Scenario], output: Output, model: str, trace: bool) -> list[str]:
    """Runs one-process scenarios in this process, one engine after another; returns the failed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    drive.prepare_environment()
    os.environ.pop(CONFIG_VARIABLE, None)
    if trace:
        first = output.run(scenarios[0].name)
        first.mkdir(mode=0o700)
        config = AgentConfig(first, new_salt(), scenarios[0].name, LIMIT_BYTES)
        os.environ[CONFIG_VARIABLE] = config.to_text()
    failed = []
    for i, scenario in enumerate(scenarios):
        name = scenario.name
        run_dir = output.run(name)
        if trace and i > 0:
            run_dir.mkdir(mode=0o700)
            retarget(str(run_dir))
        began = time.time_ns()
        error = None
        with more_environment(scenario.env), one_collection():
            try:
                llm = drive.start(scenario, model, output.store(name))
                try:
                    answers = drive.work(llm, scenario)
                finally:
                    drive.stop(llm)
                    del llm
                seconds = (time.time_ns() - began) / 1e9
                drive.write_outcome(output.outcome(name), answers, output.store(name), seconds)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
                if type(caught).__name__ == scenario.raises:
                    store = output.store(name)
                    drive.write_outcome(output.outcome(name), [], store, (time.time_ns() - began) / 1e9)
                else:
                    traceback.print_exc()
                    failed.append(name)
        if trace:
            retarget(None)
            write_run(run_dir, name, began, exit_code=1 if error else 0, notes=[NOTE])
            write_rest(run_dir)
        say(f"{name}: {error or 'ran'} ({(time.time_ns() - began) / 1e9:.1f} s)")
    return failed


def run_outside(scenario: Scenario, output: Output, model: str, trace: bool) -> bool:
    """Runs a scenario in processes of its own, under ``kvtrace run``. True where it went well."""
    name = scenario.name
    environment = {k: v for k, v in os.environ.items() if k not in (CONFIG_VARIABLE, "VLLM_PLUGINS")}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    command = [sys.executable, str(Path(drive.__file__)), name, "--model", model]
    command += ["--store", str(output.store(name)), "--outcome", str(output.outcome(name))]
    if trace:
        kvtrace = [sys.executable, "-m", "kvtrace", "run", "-o", str(output.run(name)), "--name", name]
        if scenario.stuck_after is not None:
            kvtrace += ["--stuck-after", str(scenario.stuck_after)]
        command = [*kvtrace, "--", *command]
    began = time.monotonic()
    if not trace or scenario.stuck_after is None:
        code = subprocess.run(command, env=environment, check=False).returncode
    else:
        with subprocess.Popen(command, env=environment) as run:
            code = _end_what_hangs(run, output.run(name), scenario.stuck_in)
        drive.write_outcome(output.outcome(name), [], output.store(name), time.monotonic() - began)
    say(f"{name}: {'ran' if code == 0 else f'exit code {code}'} ({time.monotonic() - began:.1f} s)")
    return code == 0


def _end_what_hangs(run: subprocess.Popen[bytes], run_dir: Path, function: str) -> int:
    """Kill the process that kvtrace has seen to stand in this function; 0 where that ended the run."""
    from kvtrace.trace.stuck_file import read_stuck_file

    while run.poll() is None:
        looks = [
            look
            for look in read_stuck_file(run_dir)[0].looks
            if look.stood and any(_is_in(function, thread.frames) for thread in look.threads)
        ]
        if looks:
            os.kill(looks[-1].pid, signal.SIGKILL)
            return 0 if run.wait() == 128 + signal.SIGKILL else 1
        time.sleep(0.2)
    return 1


def _is_in(function: str, frames: Any) -> bool:
    return any(frame.function.rpartition(".")[2] == function for frame in frames)


def check(scenarios: list[Scenario], output: Output) -> int:
    """Builds the reports, prints what differs from what the scenarios expect; counts those."""
    from judge import judge

    from kvtrace.report.build import build_report

    wrong = 0
    for scenario in scenarios:
        try:
            differences = judge(scenario, build_report(output.run(scenario.name)))
        except Exception as error:
            traceback.print_exc()
            differences = [f"no report: {type(error).__name__}: {error}"]
        wrong += bool(differences)
        say(f"{scenario.name}: {'as expected' if not differences else 'NOT as expected'}")
        for line in differences:
            say(f"    {line}")
    return wrong


def _use_clone_environment() -> None:
    """This process's environment becomes that of every vLLM of this clone (caches inside it)."""
    from vllm_env import vllm_env

    environment = vllm_env()
    os.environ.clear()
    os.environ.update(environment)


def _tiny_model() -> Path:
    from vllm_env import CACHE

    path = Path(CACHE / "tiny-model")
    # in a process of its own: torch must not be imported here before the agent is set up
    subprocess.run([sys.executable, str(SCRIPTS / "tiny_model.py"), str(path)], check=True)
    return path


def retarget(run_dir: str | None) -> None:
    """The agent of this process goes on recording there, or stops."""
    from kvtrace.agent import plugin

    plugin.retarget(run_dir)


def write_rest(run_dir: Path) -> None:
    """What lies in the files that the run wrote: `kvtrace run` looks when its child has ended."""
    from kvtrace.launch import rest

    rest.write_rest(run_dir)


@contextlib.contextmanager
def one_collection() -> Iterator[None]:
    """vLLM collects garbage nine times in an engine's life, a third of a second each with all of it
    imported: most of what a small scenario took. Once, when the engine is gone, is enough here, and once for
    what is imported."""
    collect = gc.collect
    gc.collect = lambda *_, **__: 0
    try:
        yield
    finally:
        gc.collect = collect
        gc.collect()
        if not gc.get_freeze_count():
            gc.freeze()


class more_environment:
    """os.environ with some variables more, for a while."""

    def __init__(self, more: dict[str, str]) -> None:
        self.more = more

    def __enter__(self) -> None:
        self.before = {key: os.environ.get(key) for key in self.more}
        os.environ.update(self.more)

    def __exit__(self, *_: Any) -> None:
        for key, value in self.before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def say(text: str) -> None:
    print(f"scenarios: {text}", file=sys.stderr, flush=True)


def main() -> int:
    sys.path.append(str(SCRIPTS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="new or empty directory")
    parser.add_argument("--model", type=Path, help="default: the tiny model of scripts/tiny_model.py")
    parser.add_argument("--check", action="store_true", help="compare the reports with what is expected")
    parser.add_argument("--no-trace", action="store_true", help="run without kvtrace")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of vLLM's"
    )
    parser.add_argument(
        "--executor", metavar="NAME", help="vLLM's distributed_executor_backend, of those in one process"
    )
    parser.add_argument("--apart", action="store_true", help="each in processes of its own, by `kvtrace run`")
    args = parser.parse_args()
    if not all("=" in pair for pair in args.env):
        parser.error("--env takes NAME=VALUE")
    try:
        scenarios = [load(name) for name in args.names or names()]
    except ScenarioError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    if args.executor:
        more = {"distributed_executor_backend": args.executor}
        scenarios = [replace(one, engine={**one.engine, **more}) for one in scenarios]
    if args.no_trace:  # nobody would see what hangs, and end it
        scenarios = [scenario for scenario in scenarios if scenario.stuck_after is None]
    output = Output(args.out.resolve())
    taken = [s.name for s in scenarios if output.run(s.name).exists() or output.store(s.name).exists()]
    if taken:
        print(f"run.py: {output.out} already holds {', '.join(taken)}: give a new --out", file=sys.stderr)
        return 2
    output.out.mkdir(parents=True, exist_ok=True)
    _use_clone_environment()
    os.environ.update(dict(pair.split("=", 1) for pair in args.env))
    model = str(args.model.resolve() if args.model else _tiny_model())
    trace = not args.no_trace
    here = [s for s in scenarios if s.shares_process and not args.apart]
    failed = [s.name for s in scenarios if s not in here and not run_outside(s, output, model, trace)]
    if here:
        failed += run_here(here, output, model, trace)
    if failed:
        say(f"did not run through: {', '.join(failed)}")
    wrong = check(scenarios, output) if args.check else 0
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
