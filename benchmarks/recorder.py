#!/usr/bin/env python3
"""What one call of a layer's hook costs with a recorder around it, and what a killed process loses of it.

    python benchmarks/recorder.py [--rounds 40] [--calls 4096] [--kill 20000] [--hook bare] [--arms otel,...]

The hook is ``save_kv_layer`` of a connector that has nothing to do: it looks at its metadata and finds no
request to store, as vLLM's ExampleConnector does (``--hook bare``: it compares one attribute). Around it,
in turn: a wrapper that does nothing (the measure: all numbers are ratios to it), kvtrace's proxy with the
recorder in C and with the one in Python, viztracer, cProfile, torch's ``record_function`` under a running
profiler, and a span of OpenTelemetry with a batch processor that writes JSON lines to a file. Each keeps
what it keeps by default of a call (cProfile sums alone); kvtrace's step is sealed after every 128 calls.
Each arm is measured right behind the measure, the arms take turns in another order each round; medians and
quartiles over the rounds, which are short and many, of the CPU time of the calling thread (``--wall``: of the
time that passes): so the numbers hold still on a machine that does other work.

Lost: a process of its own makes a known number of calls, the last 50 of a step that does not end, and kills
itself with SIGKILL; counted is what can be read afterwards.

The last line has the ratios, kvtrace's with the recorder in C (in Python where there is no other).
Exit codes: 0, 1 where kvtrace is not ahead of every peer or lost anything, 2 usage.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "agent")]

import fakes  # noqa: E402

from kvtrace.agent.hooks.connector import traced  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.trace import hooks, rows  # noqa: E402
from kvtrace.trace.config import AgentConfig  # noqa: E402
from kvtrace.trace.format import Role  # noqa: E402
from kvtrace.trace.reader import Spool, spool_paths  # noqa: E402
from kvtrace.trace.writer import COMPILED  # noqa: E402

LAYER = "model.layers.31.self_attn.attn"
STEP = 128
"""Calls of a step."""
WARM = 5000
"""Calls before those that count: pages that are used again and again have been used once."""
Method = Callable[..., Any]


class Metadata(fakes.KVConnectorMetadata):
    def __init__(self) -> None:
        self.requests: list[Any] = []


class Example(fakes.KVConnectorBase_V1):
    """Looks and finds nothing to do, as a connector does in nearly all steps."""

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        for request in metadata.requests:
            if request.is_store:
                raise AssertionError


class Bare(fakes.KVConnectorBase_V1):
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._connector_metadata is None:
            raise AssertionError


HOOKS = {"example": Example, "bare": Bare}


def idle() -> Any:
    connector = HOOKS[given.hook]()
    connector.bind_connector_metadata(Metadata())
    return connector


@dataclass
class Arm:
    """A recorder: ``holder`` has the method that is called, ``step`` ends a step."""

    holder: Any
    step: Callable[[], None] = lambda: None


# --- what stands around the hook ----------------------------------------------------------------------


class Holder:
    """Something with the method in an attribute, as vLLM's object has it."""

    def __init__(self, method: Method) -> None:
        self.save_kv_layer = method


@contextmanager
def noop(folder: Path) -> Iterator[Arm]:
    method = idle().save_kv_layer

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    yield Arm(Holder(wrapper))


def kvtrace(compiled: bool) -> Callable[[Path], Any]:
    @contextmanager
    def arm(folder: Path) -> Iterator[Arm]:
        # One agent a process: each arm has the one that the others left open closed first.
        config = AgentConfig(dir=folder, salt=b"k" * 16, limit_bytes=1 << 40, run="r", compiled=compiled)
        AGENT.close()
        AGENT.open(config)
        assert AGENT.recorder is not None and AGENT.recorder.compiled == compiled
        connector = traced(idle(), Role.WORKER, "Example")
        AGENT.worker.step = 1 << 32 | 1
        yield Arm(connector, AGENT.flush)
        AGENT.close()

    return arm


@contextmanager
def viztracer(folder: Path) -> Iterator[Arm]:
    from viztracer import VizTracer

    tracer = VizTracer(output_file=str(folder / "viztracer.json"), verbose=0, tracer_entries=1 << 20)
    tracer.start()
    try:
        yield Arm(idle())
    finally:
        tracer.stop()


@contextmanager
def cprofile(folder: Path) -> Iterator[Arm]:
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    try:
        yield Arm(idle())
    finally:
        profile.disable()


@contextmanager
def record_function(folder: Path) -> Iterator[Arm]:
    import torch

    method, name = idle().save_kv_layer, f"save_kv_layer {LAYER}"

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return method(*args, **kwargs)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield Arm(Holder(wrapper))


@contextmanager
def otel(folder: Path) -> Iterator[Arm]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    provider = TracerProvider(resource=Resource.create({}), shutdown_on_exit=False)
    with open(folder / "spans.jsonl", "a", encoding="utf-8") as file:
        exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = provider.get_tracer("connector")
        method = idle().save_kv_layer

        @functools.wraps(method)
        def wrapper(layer_name: str, *args: Any, **kwargs: Any) -> Any:
            with tracer.start_as_current_span("save_kv_layer", attributes={"layer": layer_name}):
                return method(layer_name, *args, **kwargs)

        yield Arm(Holder(wrapper))
        provider.shutdown()


ARMS: dict[str, Callable[[Path], Any]] = {
    "noop": noop,
    "kvtrace": kvtrace(True),
    "kvtrace-python": kvtrace(False),
    "viztracer": viztracer,
    "cprofile": cprofile,
    "record_function": record_function,
    "otel": otel,
}
if COMPILED is None:
    ARMS["kvtrace"] = ARMS.pop("kvtrace-python")


# --- measuring ----------------------------------------------------------------------------------------


def calls(arm: Arm, number: int, clock: Callable[[], int]) -> float:
    """Nanoseconds a call."""
    holder, spent = arm.holder, 0
    for at in range(0, number, STEP):
        count = min(STEP, number - at)
        began = clock()
        for _ in range(count):
            holder.save_kv_layer(LAYER, None, None)
        arm.step()
        spent += clock() - began
    return spent / number


def measure(names: list[str], rounds: int, number: int, clock: Callable[[], int]) -> dict[str, list[float]]:
    """The ratios to the wrapper that does nothing, one of each round, by arm."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        times: dict[str, float] = {}
        for name in order:
            # Made anew each time: what a profiler keeps grows, and it slows down all that runs beside it.
            with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
                bare = stack.enter_context(noop(Path(folder)))
                calls(bare, 500, clock)
                least = calls(bare, number, clock)
                arm = stack.enter_context(ARMS[name](Path(folder)))
                calls(arm, WARM, clock)
                times[name] = calls(arm, number, clock) / least
        if turn >= 2:  # the first ones warm up
            for name, ratio in times.items():
                found[name].append(ratio)
    return found


# --- what a kill leaves -------------------------------------------------------------------------------


def killed(name: str, number: int) -> int:
    """How many of so many calls can be read after SIGKILL."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--die", name, "--kill", str(number), "--folder", folder]
        command += ["--hook", given.hook]
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != -signal.SIGKILL:
            raise SystemExit(f"{name}: the process ended before it was killed: {done.stderr[-300:]}")
        return readable(name, Path(folder))


def die(name: str, number: int, folder: Path) -> None:
    with ARMS[name](folder) as arm:
        calls(arm, number - 50, time.perf_counter_ns)
        for _ in range(50):  # of a step that does not end
            arm.holder.save_kv_layer(LAYER, None, None)
        os.kill(os.getpid(), signal.SIGKILL)


def readable(name: str, folder: Path) -> int:
    if name.startswith("kvtrace"):
        found = 0
        for path in spool_paths(folder):
            for table in Spool(path).chunks():
                ours = rows.of_kind(rows.HookCall, table)
                found += int((rows.code(ours.head) == hooks.SAVE_LAYER.code).sum())
        return found
    if name == "otel":
        lines = (folder / "spans.jsonl").read_text(encoding="utf-8").splitlines()
        return sum(1 for line in lines if line.endswith("}") and json.loads(line)["name"] == "save_kv_layer")
    # The others write when they are told to, at the end: a killed process never is.
    return sum(path.read_text(errors="replace").count("save_kv_layer") for path in folder.iterdir())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=4096, help="of each arm in a round")
    parser.add_argument("--kill", type=int, default=20_000, help="calls before SIGKILL; 0: kill nobody")
    parser.add_argument("--hook", choices=HOOKS, default="example")
    parser.add_argument("--arms", default=",".join(ARMS), help="which, with commas")
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--die", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args()
    if unknown := set(found.arms.split(",")) - set(ARMS):
        parser.error(f"no such arm: {', '.join(sorted(unknown))}")
    return found


def main() -> int:
    if given.die:
        die(given.die, given.kill, given.folder)
    names = given.arms.split(",")
    if COMPILED is None:
        print("the recorder in C was not built: kvtrace is the recorder in Python")
    clock = time.perf_counter_ns if given.wall else time.thread_time_ns
    ratios = measure(names, given.rounds, given.calls, clock)
    lost = {name: given.kill - killed(name, given.kill) for name in names if given.kill and name != "noop"}
    print(f"{'':18}{'ratio':>8}   quartiles       lost of {given.kill} calls")
    middle = {}
    for name in names:
        low, middle[name], high = statistics.quantiles(ratios[name], n=4)
        said = f"{lost[name]:>12}" if name in lost else ""
        print(f"{name:18}{middle[name]:7.2f}x   {low:.2f} .. {high:.2f} {said}")
    told = {name: ratio for name, ratio in middle.items() if name not in ("noop", "kvtrace-python")}
    print("recorder: " + " ".join(f"{name}={ratio:.2f}" for name, ratio in told.items()))
    ours = told.pop("kvtrace", None)
    behind = ours is None or any(ratio <= ours for ratio in told.values())
    return int(behind or lost.get("kvtrace", 0) > (0 if COMPILED else STEP))


given = arguments() if __name__ == "__main__" else argparse.Namespace(hook="example")
if __name__ == "__main__":
    raise SystemExit(main())
