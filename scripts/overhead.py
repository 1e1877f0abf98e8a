#!/usr/bin/env python3
"""Measure what tracing costs: a traced and an untraced vLLM, block by block in turn.

    python scripts/overhead.py [--first N] [--pairs N] [--batch N] [--watch MODE] [--fingerprints | --profile]

Two engines of the same model are kept alive, one under `kvtrace run`. The driver lets them
work in turn (A B, B A, A B, ...), one block of requests at a time, so that a drift of the
machine meets both; the ratio is taken pair by pair. Only ratios are reported: absolute times
of a shared machine prove nothing.

With `--fingerprints` three traced engines work in turn instead: one without fingerprints of KV, one with
hashes of blocks and layers, one with a sketch of each block beside them. There no budget stops them.

With `--profile` one traced engine works alone, and the agent's time of a step is told by its parts
(`scripts/step_parts.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from engines_in_turn import Engine, answers, one_turn  # noqa: E402

OUT = ROOT / ".cache" / "overhead"
PROMPT, OUTPUT = 96, 24
WARM, FIRST = 3, 20
"""Pairs of blocks that warm up, then pairs that are counted apart: in these the first steps with work are
watched, with ``--watch full`` as many as its account allows."""


PARTS = "parts"
WITHOUT, HASHES, SKETCHES = "without fingerprints", "of hashes", "of hashes and sketches"
BLOCK_TOKENS, LONG_PROMPT = 32, 480


def fingerprints(how: str) -> None:
    """In an engine's process: take them so, whatever the budget says."""
    from kvtrace.agent.budget import BudgetAccount
    from kvtrace.agent.prints.prints import PRINTS

    if not any(PRINTS._sizes) or not any(PRINTS._own) or PRINTS._signs is None:
        raise SystemExit("this engine takes no fingerprints: nothing to measure")
    PRINTS.account = BudgetAccount("full", 0.0)
    if how == WITHOUT:
        PRINTS._sizes = []
    if how == HASHES:
        PRINTS._signs = None
    for name in ("begins", "plan", "take"):
        setattr(PRINTS, name, clocked(getattr(PRINTS, name)))


TAKEN = [0.0]
"""Seconds of CPU time that this process's fingerprints took so far."""


def clocked(method: Callable[..., None]) -> Callable[..., None]:
    def call(*args: object) -> None:
        began = time.thread_time()
        method(*args)
        TAKEN[0] += time.thread_time() - began

    return call


def child(model: str, store: str, batch: int, how: str) -> None:
    """One engine: a line on stdin is one block, a line on stdout its figures. ``how``: its fingerprints, or
    that its parts are clocked."""
    figures_go_to = answers()
    if how == PARTS:
        import step_parts

        step_parts.clock_parts()
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        enforce_eager=True,
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": store},
        },
    )
    if how and how != PARTS:
        fingerprints(how)
    long = bool(how) and how != PARTS
    rng, length = random.Random(0), LONG_PROMPT if long else PROMPT
    prompts = [{"prompt_token_ids": [rng.randrange(10, 500) for _ in range(length)]} for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=1 if long else OUTPUT, ignore_eos=True)
    for _ in sys.stdin:
        wall, cpu, taken = time.perf_counter(), time.process_time(), TAKEN[0]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        figures = {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "taken": TAKEN[0] - taken,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }
        print(json.dumps(figures), file=figures_go_to, flush=True)
    if how == PARTS:
        (OUT / "parts.txt").write_text("\n".join(step_parts.table(step_parts.medians())) + "\n")


def start(name: str, model: Path, batch: int, watch: str, how: str = "") -> Engine:
    from vllm_env import vllm_env

    env = vllm_env() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    plain = name.replace(" ", "-")
    command = [
        sys.executable, __file__, "--child", str(model), "--store", str(OUT / f"store-{plain}"),
        "--batch", str(batch), "--how", how,
    ]  # fmt: skip
    run = OUT / ("run" if name == "traced" else f"run-{plain}")
    traced = None if name == "untraced" else ["-o", str(run), "--watch", watch]
    return Engine(command, env, OUT / f"{plain}.log", traced)


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} [{low:.3f} - {high:.3f}], min {min(values):.3f}, max {max(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=FIRST, help=f"pairs that are counted apart [{FIRST}]")
    parser.add_argument("--pairs", type=int, default=60, help="after these [60]")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--watch", default="full", help="as of kvtrace run [full]")
    parser.add_argument("--fingerprints", action="store_true", help="what fingerprints cost")
    parser.add_argument("--profile", action="store_true", help="where the agent's time of a step goes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--how", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.store, options.batch, options.how)
        return
    from tiny_model import make_tiny_model

    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    model = make_tiny_model(ROOT / ".cache" / "tiny-model")
    if options.fingerprints:
        ways = (WITHOUT, HASHES, SKETCHES)
        engines = {way: start(way, model, options.batch, options.watch, way) for way in ways}
        report_fingerprints(options, in_turn(engines, options.pairs))
        return
    if options.profile:
        in_turn({"traced": start("traced", model, options.batch, options.watch, PARTS)}, options.pairs)
        tracer = json.loads((OUT / "run" / "report.json").read_text())["limits"]["tracer"]
        print(f"{tracer['records']} records; blocks of {options.batch} requests, --watch {options.watch}")
        print((OUT / "parts.txt").read_text(), end="")
        return
    engines = {name: start(name, model, options.batch, options.watch) for name in ("untraced", "traced")}
    report(options, in_turn(engines, options.first + options.pairs))


def in_turn(engines: dict[str, Engine], count: int) -> dict[str, list[dict[str, object]]]:
    """The figures of `count` blocks of each, after those that warm up."""
    results: dict[str, list[dict[str, object]]] = {name: [] for name in engines}
    for turn in range(-WARM, count):
        figures = one_turn(engines, turn)
        for name in engines if turn >= 0 else ():
            results[name].append(figures[name])
    for engine in engines.values():
        engine.end()
    return results


def report_fingerprints(options: argparse.Namespace, results: dict[str, list[dict[str, object]]]) -> None:
    reports = {
        name: json.loads((OUT / f"run-{name.replace(' ', '-')}" / "report.json").read_text())
        for name in results
    }
    run = reports[SKETCHES]["run"]
    print(
        f"{'machine':42} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"vLLM {run['vllm']} (CPU build)"
    )
    print(
        f"{'workload':42} {run['engines'][0]['kv_layers']} KV layers, batch {options.batch}, {LONG_PROMPT} "
        f"prompt tokens a request, all loaded but the last block after the first time, 1 output token, "
        f"{options.pairs} rounds, no budget"
    )
    for name in results:
        tracer = reports[name]["limits"]["tracer"]
        print(f"{'records, ' + name:42} {tracer['records']}, {tracer['spool_bytes']} bytes of spool")
    for name in (HASHES, SKETCHES):
        shares = [float(one["taken"]) / float(one["cpu"]) * 100 for one in results[name]]  # type: ignore[arg-type]
        print(f"{'% of the CPU time, ' + name:42} median {quartiles(shares)}")
    pairs = zip(results[SKETCHES], results[HASHES], strict=True)
    ratios = [float(one["taken"]) / float(other["taken"]) for one, other in pairs]  # type: ignore[arg-type]
    print(f"{'their CPU time, with sketches / without':42} median {quartiles(ratios)}")


def report(options: argparse.Namespace, results: dict[str, list[dict[str, object]]]) -> None:
    report_json = json.loads((OUT / "run" / "report.json").read_text())
    engine = report_json["run"]["engines"][0]
    run, tracer = report_json["run"], report_json["limits"]["tracer"]
    lines = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"vLLM {run['vllm']} (CPU build)",
        "workload": f"{engine['kv_layers']} KV layers, batch {options.batch}, {PROMPT} prompt and "
        f"{OUTPUT} output tokens a request, {options.pairs} pairs of blocks, in-process engine, eager, "
        f"--watch {options.watch}",
        "records": f"{tracer['records']} in {engine['steps']} steps, {tracer['spool_bytes']} bytes of spool",
    }
    for what, line in lines.items():
        print(f"{what:30} {line}")
    pairs = list(zip(results["traced"], results["untraced"], strict=True))
    a_block = tracer["records"] / engine["steps"] * OUTPUT
    more = [(float(t["wall"]) - float(u["wall"])) / a_block * 1e6 for t, u in pairs[options.first :]]  # type: ignore[arg-type]
    print(f"{'time more, µs a record':30} after the first pairs: median {quartiles(more)}")
    first, rest = pairs[: options.first], pairs[options.first :]
    for when, part in ((f"first {options.first} pairs", first), ("after them", rest)):
        for clock, what in (
            ("wall", "throughput, untraced / traced"),
            ("cpu", "CPU time, traced / untraced"),
        ):
            ratios = [float(traced[clock]) / float(untraced[clock]) for traced, untraced in part]  # type: ignore[arg-type]
            print(f"{what:30} {when}: median {quartiles(ratios)}")


if __name__ == "__main__":
    main()
