#!/usr/bin/env python3
"""What one traced hook call costs, as ratios to a wrapper that does nothing.

    python scripts/hook_cost.py [--rounds N]

A connector with hooks that do next to nothing is called in three ways in turn (plain
`functools.wraps` wrapper, traced, traced and sampled), a batch of calls at a time, so that a
drift of the machine meets all; the ratio is taken round by round, and its median and
quartiles are printed. The sampled call is also set against a hook that really copies 256 slots
of KV to a file. Needs torch, no vLLM. Only ratios: absolute times of a shared machine prove nothing.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "agent")]

import fakes  # noqa: E402
import torch  # noqa: E402

from kvtrace.agent.hooks.connector import traced  # noqa: E402
from kvtrace.agent.kv.caches import CACHES  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.trace.config import AgentConfig  # noqa: E402
from kvtrace.trace.format import Role  # noqa: E402

SLOTS = 256


class Idle(fakes.KVConnectorBase_V1):
    """Looks and finds nothing to do, as a connector does in nearly all steps."""

    _block_size = 32

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._connector_metadata is None:
            raise AssertionError

    def wait_for_save(self) -> None:
        if self._connector_metadata is None:
            raise AssertionError


class Storing(Idle):
    """Copies its slots and writes them to a file."""

    folder = Path()
    slots = torch.arange(SLOTS)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        rows = kv_layer[self.slots // 32, :, self.slots % 32].detach().cpu().contiguous()
        with open(self.folder / layer_name, "wb") as file:
            file.write(rows.numpy().tobytes())


HOOKS = ((Idle, "save_kv_layer", 2000), (Idle, "wait_for_save", 2000), (Storing, "save_kv_layer", 20))


def noop(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


def batch(call: Callable[[], Any], calls: int, sampled: bool = False) -> float:
    worker = AGENT.worker
    total = 0
    for _ in range(calls if sampled else 1):
        if sampled:
            worker.watch_store = True
        started = time.perf_counter_ns()
        for _ in range(1 if sampled else calls):
            call()
        total += time.perf_counter_ns() - started
    worker.watch_store = None
    AGENT.flush()
    return total / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        AGENT.open(AgentConfig(dir=Path(folder), salt=b"k" * 16, limit_bytes=1 << 30, run="cost"))
        AGENT.worker.step = 1
        measure(Path(folder), options.rounds)
        AGENT.close()


def measure(folder: Path, rounds: int) -> None:
    kv = torch.randn(64, 2, 32, 64)
    CACHES.register({f"layer.{n}": torch.randn(64, 2, 32, 64) for n in range(31)} | {"layer.31": kv})
    Storing.folder = folder
    print(f"{'call':52} {'median':>9}   quartiles")
    for cls, hook, calls in HOOKS:
        args = ("layer.31", kv, None) if hook == "save_kv_layer" else ()
        bare, ours = cls(), cls()
        ours = traced(ours, Role.WORKER, cls.__name__)
        for connector in (bare, ours):
            connector.bind_connector_metadata(fakes.WorkMetadata())
        plain = functools.partial(noop(getattr(bare, hook)), *args)
        method = functools.partial(getattr(ours, hook), *args)
        ways = {
            "plain": functools.partial(batch, plain, calls),
            "traced": functools.partial(batch, method, calls),
            "traced, sampled": functools.partial(batch, method, max(10, calls // 40), sampled=True),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 3):
            order = list(ways) if turn % 2 else list(ways)[::-1]
            for name in order:
                spent = ways[name]()
                if turn >= 3:  # the first three warm up
                    times[name].append(spent)
        what = "idle" if cls is Idle else f"stores {SLOTS} slots"
        for name in ("traced", "traced, sampled"):
            ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{f'{hook} ({what}), {name}':52} {middle:8.2f}x   {low:.2f} .. {high:.2f}")


if __name__ == "__main__":
    main()
