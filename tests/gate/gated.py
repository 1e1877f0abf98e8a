"""A healthy TP 2 run as a trace, with one place for each way to break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from synth import Fate, Policy, Prompt, Rounding, Sim, run_json

from kvtrace.gate.contract import baseline_text, make_baseline
from kvtrace.gate.judge import judge
from kvtrace.gate.outcome import GateOutcome
from kvtrace.gate.read_baseline import BaselineFile, parse_baseline
from kvtrace.gate.rules import Rules
from kvtrace.report.build import build_report
from kvtrace.trace.format import Fact

RANKS, LAYERS, UNIT = 2, 4, 32
PAIRS = frozenset((rank, layer) for rank in range(RANKS) for layer in range(LAYERS))
TARGETS = ("attention-decorator", "connector-factory", "scheduler", "worker")


class LossySim(Sim):
    """Leaves out calls of one hook on the workers, as a vLLM that no longer makes them."""

    lost: tuple[str, Callable[[int], bool]] = ("", lambda step: False)

    def hook(self, rank: int, name: str, step: int, *more: Any, **words: Any) -> None:
        which, gone = self.lost
        if name != which or not gone(self.n):
            super().hook(rank, name, step, *more, **words)


@dataclass
class Plan:
    """One run; everything that a mutation changes."""

    prompts: list[int] = field(default_factory=lambda: [64, 128, 256, 96, 640, 512])
    output: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    policy: Policy | None = None
    fate: Fate = field(default_factory=Fate)
    fate_from: int = 0  # the step from which on things go wrong
    lost: tuple[str, Callable[[int], bool]] = ("", lambda step: False)
    targets: dict[str, str] = field(default_factory=dict)
    without_spool: int | None = None  # rank
    before: Callable[[Sim], None] | None = None
    facts: Callable[[Sim], None] | None = None


def trace(where: Path, plan: Plan) -> Path:
    """Writes the run directory of a plan."""
    settings: dict[str, Any] = {"tp": RANKS, "layers": LAYERS, "batched": 256, "ints": {"unit": UNIT}}
    sim = LossySim(where, **{**settings, **plan.settings})
    sim.lost = plan.lost
    for name in TARGETS:
        status = plan.targets.get(name, "found")
        row = {"id": name, "module": "vllm.some.module", "attr": name, "status": status, "detail": ""}
        for spool in (sim.scheduler, *sim.workers):
            spool.fact(Fact.TARGET, {**row, "versions": ""})
    if plan.before:
        plan.before(sim)
    prompts = [Prompt(f"req-{i}", n, digest=i + 1, output=plan.output) for i, n in enumerate(plan.prompts)]
    sim.serve(
        prompts,
        plan.policy or Rounding(UNIT).policy(),
        fate=lambda n: plan.fate if n >= plan.fate_from else Fate(),
    )
    if plan.facts:
        plan.facts(sim)
    sim.write()
    rows = [{"pid": 100, "ppid": 1, "name": "VLLM::EngineCore", "command": "", "vllm": True}]
    rows += [
        {"pid": 101 + rank, "ppid": 100, "name": f"VLLM::Worker_TP{rank}", "command": "", "vllm": True}
        for rank in range(sim.tp)
    ]
    run_json(where, rows)
    if plan.without_spool is not None:
        sim.workers[plan.without_spool].path.unlink()
    return where


def report_of(where: Path, plan: Plan | None = None) -> Any:
    return build_report(trace(where, plan or Plan()))


def contract(report: Any, name: str = "kvtrace-baseline.json") -> BaselineFile:
    """The baseline of a report, through its file."""
    return parse_baseline(baseline_text(make_baseline(report)).encode(), name)


def check(report: Any, baseline: BaselineFile | None, rules: Rules | None = None) -> GateOutcome:
    return judge(report, "run", baseline, rules or Rules())


def failures(outcome: GateOutcome) -> list[tuple[str, str, int | None, str | None]]:
    """(what, layers, rank, cause) of each failure."""
    return [(one.subject, one.layers, one.rank, one.cause) for one in outcome.failed]


def loading(prompt: Prompt, local: int) -> int:
    """A store that holds the first half of every prompt."""
    return prompt.length // 2 // UNIT * UNIT
