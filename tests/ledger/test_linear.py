"""explain is linear in requests and records: counted by lines of kvtrace that run, not by a clock."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from synth import Chunk, Entry, Policy, Prompt, Rounding, Sim, nothing, run_json

import kvtrace
from kvtrace.report.build import build_report

PACKAGE = os.path.dirname(kvtrace.__file__)
SMALL, TIMES = 40, 4


def same_prompt(run: Path, n: int) -> None:
    """A benchmark: one prompt again and again, stored once."""
    sim = Sim(run, layers=1)
    prompts = [Prompt(f"r{i}", 96, digest=1, prefix=2, prefixes=(2, 3, 4)) for i in range(n)]
    sim.serve(prompts, Rounding(32, keep=True).policy())
    sim.write()


def alike(run: Path, n: int) -> None:
    """Prompts that begin alike, half of which is loaded; some are left out, some are aborted."""
    sim = Sim(run, layers=1)
    for i in range(n):
        prompt = Prompt(f"r{i}", 100 + i % 9, digest=10 + i, prefix=2, output=2, prefixes=(2, 3, 10_000 + i))
        policy = Policy(nothing, lambda p, local: 32) if i % 3 else Rounding(32).policy()
        sim.serve([prompt], policy)
        sim.arrive(Prompt(f"a{i}", 80, digest=100_000 + i))
        sim.step([Chunk(f"a{i}", 0, 40, first=True)], prompts={f"a{i}": 80})
        sim.finish(f"a{i}", 40, 0, "FINISHED_ABORTED")
    sim.write()


def watched(run: Path, n: int) -> None:
    """Slots that were read, of requests that run at the same time, some of them in the place of others."""
    sim = Sim(run, layers=1, kv_blocks=40 * n + 20)
    for i in range(n):
        name = f"r{i}"
        own = (2, 10000 + i, 20000 + i, 30000 + i)
        sim.one_step(name, 128, [Entry(name, 96, 96, 0)], digest=10 + i, prefixes=own, ends=False)
        sim.read(name, 0, 64 if i % 2 else 96)
        if i % 4 == 0:
            sim.touch({0: [32 * (40 * n + 10) + i]})
    for i in range(n):
        sim.finish(f"r{i}", 128)
    sim.write()


def silent(run: Path, n: int) -> None:
    """Nothing is offered, and the same is looked up again; preempted now and then."""
    sim = Sim(run, layers=1)
    for i in range(n):
        name = f"r{i}"
        sim.serve([Prompt(name, 64, digest=1 + i % 5, prefix=1 + i % 5)], Policy(nothing))
        sim.arrive(Prompt(f"p{i}", 96, digest=9))
        sim.step([Chunk(f"p{i}", 0, 64, first=True)], [Entry(f"p{i}", 64, 64, 0)], prompts={f"p{i}": 96})
        sim.preempt(f"p{i}", 64)
        sim.step([Chunk(f"p{i}", 0, 96, resumed=True)], prompts={f"p{i}": 96}, unreadable=i % 7 == 0)
        sim.finish(f"p{i}", 96)
    sim.write()


def lines_of(work: Callable[[], object]) -> Counter[str]:
    """Lines of kvtrace that ran, by function. A comprehension counts a line an item."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            file = frame.f_code.co_filename.removeprefix(PACKAGE)
            found[f"{file}:{frame.f_code.co_firstlineno}:{frame.f_code.co_name}"] += 1
        return count

    def called(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename  # "<string>": comparisons of dataclasses
        return count if name.startswith(PACKAGE) or name == "<string>" else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("kind", [same_prompt, alike, watched, silent])
def test_the_work_grows_with_requests_not_with_their_square(
    kind: Callable[[Path, int], None], tmp_path: Path
) -> None:
    counts = []
    for n in (SMALL, SMALL * TIMES):
        run = tmp_path / str(n)
        kind(run, n)
        run_json(run)
        counts.append(lines_of(lambda run=run: build_report(run)))  # type: ignore[misc]
    small, large = counts
    steep = {
        name: (small[name], large[name])
        for name in large
        if large[name] > 1.3 * TIMES * small[name] and large[name] - TIMES * small[name] > 40 * SMALL
    }
    assert not steep, steep
    assert sum(large.values()) < 1.2 * TIMES * sum(small.values())
