#!/usr/bin/env python3
"""What tracing costs a real engine: a traced and an untraced vLLM, block by block in turn.

    python benchmarks/overhead.py [--layers 4 32 80] [--batch 1 8 64] [--shape prefill decode]
                                  [--graphs eager compiled] [--process in multi] [--pairs N] [--budget SHARE]
                                  [--control]

Each cell is one engine (layers of a tiny width, dummy weights; eager, or compiled; its core in the calling
process, or in one of its own) under one load: long prompts and short answers, or the other way round, so many
requests at a time. The connector does nothing, so that what is measured is what kvtrace adds, and no disk.
Two engines are alive at a time, one under `kvtrace run --budget`; they work in turn (A B, B A), a block
of requests each, and the ratio of their throughput is taken pair by pair, from the first block on. They must
make the same tokens. Absolute times of a shared machine prove nothing and are not printed. With the engine's
core in the calling process a second ratio is that of its thread's CPU time, untraced over traced: what
others do to the machine changes it less. With --control a third engine works beside them, untraced too: how
far two processes differ that do the same.

The last line has the worst and the median of the cells' medians, and the share of the steps that were watched
for what they read and wrote. Exit codes: 0, 1 where a cell is under its target (0.99 of the untraced
throughput at 32 layers and more, 0.97 below), 2 usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from engines_in_turn import Engine, answers, one_turn  # noqa: E402

OUT = ROOT / ".cache" / "overhead-grid"
RUN = OUT / "run"
SHAPES = {"prefill": (256, 2), "decode": (16, 48)}
"""Tokens of a prompt, and of an answer."""
LAYERS, TARGETS = 32, (0.97, 0.99)
"""From so many layers on the second target holds."""
CONNECTOR = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Metadata(KVConnectorMetadata):
    def __init__(self):
        self.requests = []


class Nothing(KVConnectorBase_V1):
    def start_load_kv(self, forward_context, **kwargs):
        for request in self._get_connector_metadata().requests:
            raise AssertionError(request)

    def wait_for_layer_load(self, layer_name):
        return

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        for request in self._get_connector_metadata().requests:
            raise AssertionError(request)

    def wait_for_save(self):
        return

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        return

    def build_connector_meta(self, scheduler_output):
        return Metadata()
"""


def child(layers: int, eager: bool) -> None:
    """One engine: a line on stdin is one block's load, a line on stdout its figures."""
    figures_go_to = answers()
    from tiny_model import make_tiny_model
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(make_tiny_model(ROOT / ".cache" / "tiny-model")),
        load_format="dummy",
        hf_overrides={"num_hidden_layers": layers},
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=64,
        block_size=32,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "Nothing",
            "kv_connector_module_path": "kvtrace_overhead_connector",
            "kv_role": "kv_both",
        },
    )
    rng = random.Random(0)
    for line in sys.stdin:
        prompt, answer, batch = json.loads(line)
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, 500) for _ in range(prompt)]} for _ in range(batch)
        ]
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        began, busy = time.perf_counter(), time.thread_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        took, busy = time.perf_counter() - began, time.thread_time() - busy
        figures = {"took": took, "busy": busy, "tokens": [list(one.outputs[0].token_ids) for one in outputs]}
        print(json.dumps(figures), file=figures_go_to, flush=True)


def start(name: str, layers: int, graphs: str, process: str) -> Engine:
    from vllm_env import vllm_env

    env = vllm_env() | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(process == "multi")),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "PYTHONPATH": os.pathsep.join([str(OUT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, "--child", str(layers), "--graphs", graphs]
    traced = ["-o", str(RUN), "--budget", given.budget] if name == "traced" else None
    return Engine(command, env, OUT / f"{name}.log", traced)


def pair(engines: Mapping[str, Engine], load: tuple[int, int, int], turn: int) -> tuple[float, ...]:
    """The traced throughput over the untraced one; that for each second of CPU time; and the two of the
    control, where there is one."""
    figures = one_turn(engines, turn, json.dumps(load))
    untraced = figures.pop("untraced")
    others = (figures[name] for name in ("traced", "control") if name in figures)
    return tuple(float(untraced[what] / one[what]) for one in others for what in ("took", "busy"))


def watched_share(run: Path) -> float:
    from kvtrace.trace import rows
    from kvtrace.trace.format import Flag, Kind
    from kvtrace.trace.reader import Spool, spool_paths

    watched = steps = 0
    for path in spool_paths(run):
        for chunk in Spool(path).chunks():
            heads = chunk[:, 0][rows.kind(chunk[:, 0]) == Kind.EXEC]
            steps += len(heads)
            watched += int((rows.flags(heads) & (Flag.STORE | Flag.LOAD) != 0).sum())
    return watched / max(1, steps)


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    (OUT / "kvtrace_overhead_connector.py").write_text(CONNECTOR)
    medians: list[float] = []
    shares: list[float] = []
    under = 0
    print(f"{'layers':>6} {'graphs':9} {'process':8} {'load':8} {'batch':>5}  traced / untraced throughput")
    for layers, graphs, process in itertools.product(given.layers, given.graphs, given.process):
        shutil.rmtree(RUN, ignore_errors=True)
        names = ("untraced", "traced", "control")[: 3 if given.control else 2]
        engines = {name: start(name, layers, graphs, process) for name in names}
        for shape, batch in itertools.product(given.shape, given.batch):
            load = (*SHAPES[shape], batch)
            turns = (pair(engines, load, turn) for turn in range(given.pairs))
            ratios, of_cpu, *control = zip(*turns, strict=True)
            low, middle, high = statistics.quantiles(ratios, n=4)
            cpu = f"  CPU {statistics.median(of_cpu):.3f}" if process == "in" else ""
            alike = f"  control {statistics.median(control[0]):.3f}" if control else ""
            medians.append(middle)
            under += middle < TARGETS[layers >= LAYERS]
            what = f"{layers:6} {graphs:9} {process:8} {shape:8} {batch:5}"
            print(f"{what}  {middle:.3f} [{low:.3f} .. {high:.3f}]{cpu}{alike}", flush=True)
        for engine in engines.values():
            engine.end()
        shares.append(watched_share(RUN))
    print(
        f"overhead: worst={min(medians):.3f}x median={statistics.median(medians):.3f}x "
        f"watched_share={statistics.mean(shares):.3f}"
    )
    return int(under > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32, 80])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--graphs", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--process", nargs="+", choices=["in", "multi"], default=["in", "multi"])
    parser.add_argument("--pairs", type=int, default=30, help="of blocks in each cell [30]")
    parser.add_argument("--budget", default="2%", help="as of kvtrace run [2%%]")
    parser.add_argument("--control", action="store_true", help="a third engine, untraced too")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.pairs < 2:
        parser.error("quartiles need at least 2 pairs")
    if given.child:
        child(given.child, given.graphs == ["eager"])
        sys.exit(0)
    sys.exit(main())
