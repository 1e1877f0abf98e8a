#!/usr/bin/env python3
"""Measures kvtrace on connectors that nobody has seen: written from seeds, run on the real engine.

    python scripts/accuracy.py --seed N --count M [--jobs K] [--keep DIR] [--only NAME] [--json FILE]
                               [--page FILE] [--verify] [--device-memory] [--cuda]
    python scripts/accuracy.py --seed N --count M --keep DIR --again
    python scripts/accuracy.py --show SEED [--only NAME]

With ``--again`` no engine runs: the traces that an earlier run kept in DIR are explained by the code of now.

Every fourth seed is healthy, half of these with a deliberate choice (tests/accuracy/kvgen/designs.py); the
others go in turn through the catalogue of faults (tests/accuracy/kvgen/catalogue.py). Truth comes from the
plan and is checked against what lies in the connector's store, never from kvtrace. A run whose truth is not
what was planned proves nothing: it is reported, not counted, and makes the exit code 1.

Exit codes: 0 every run was scored, 1 not, 2 usage. The last line of the output is the score.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ACCURACY = ROOT / "tests" / "accuracy"
for folder in (ROOT, ROOT / "scripts", ACCURACY):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import score as scoring  # noqa: E402
from kvgen.catalogue import BY_NAME, FAULTS  # noqa: E402
from kvgen.designs import DESIGN_BY_NAME, DESIGNS  # noqa: E402
from kvgen.plan import draw, nth_design  # noqa: E402
from kvgen.source import generate  # noqa: E402
from vllm_env import CACHE, vllm_env  # noqa: E402

from kvtrace.trace.config import AgentConfig  # noqa: E402

ENGINES = 15
"""Engines of one process: more would save imports, and lose more to a crash."""

ASKS = ("verify", "device_memory", "cuda")
"""Options that a run's process is told of."""

SILENCE_SECONDS = 240
"""A process that says nothing for so long is given up."""


@dataclass(frozen=True)
class Run:
    """One run to make. ``fault``: None takes the seed's own."""

    seed: int
    fault: str | None

    @property
    def name(self) -> str:
        return f"{self.seed}" if self.fault is None else f"{self.seed}-{self.fault or 'healthy'}"


@dataclass(frozen=True)
class Result:
    """What became of a run: scored, or (``unproven``) why it proves nothing."""

    run: Run
    plan: str
    scored: scoring.Scored | None
    unproven: str
    seconds: float


class Measure:
    """Makes runs in processes of their own, and scores them."""

    def __init__(self, out: Path, keep: bool, trace: bool = True, **asks: bool) -> None:
        """``asks``: of harness/runner.py: ``verify``, ``device_memory``, ``cuda``."""
        self.out, self.keep, self.trace = out, keep, trace
        self.asks = {"trace": trace, **asks}
        self.model = CACHE / "tiny-model"
        self._number = 0
        self._lock = threading.Lock()

    def all(self, runs: list[Run], jobs: int) -> Iterator[Result]:
        """Results as they come; the runs of one process together."""
        subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "tiny_model.py"), str(self.model)],
            check=True, stdout=subprocess.DEVNULL, env=vllm_env(),
        )  # fmt: skip
        each = min(ENGINES, -(-len(runs) // max(1, jobs)))
        groups = [runs[i : i + each] for i in range(0, len(runs), each)]
        with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
            waiting: set[Future[list[Run]]] = {pool.submit(self._group, group) for group in groups}
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    for run in future.result():
                        yield self._result(run)

    def again(self, runs: list[Run]) -> Iterator[Result]:
        """Results of what an earlier call kept."""
        yield from map(self._result, runs)

    def _group(self, group: list[Run]) -> list[Run]:
        """Runs a group in one process. The run that ends the process early is tried once more, alone."""
        left = list(group)
        while left:
            self._process(left)
            left = [one for one in left if not self._outcome(one).exists()]
            if left:
                self._process(left[:1])
                left = left[1:]
        return group

    def _outcome(self, run: Run) -> Path:
        return self.out / run.name / "outcome.json"

    def _process(self, runs: list[Run]) -> None:
        with self._lock:
            self._number += 1
            spec, log = (self.out / f"process-{self._number}{end}" for end in (".json", ".log"))
        document = {
            "out": str(self.out),
            "model": str(self.model),
            **self.asks,
            "runs": [{"seed": one.seed, "fault": one.fault} for one in runs],
        }
        spec.write_text(json.dumps(document), encoding="utf-8")
        environment = vllm_env()
        if self.asks.get("cuda"):  # what the machine's own set-up says of vLLM must hold here too
            environment |= {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(
            ":"
        )
        with log.open("w") as file:
            child = subprocess.Popen(
                [sys.executable, str(ACCURACY / "harness" / "runner.py"), str(spec)],
                stdout=file, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip
            last, size = time.monotonic(), 0
            while child.poll() is None:
                time.sleep(0.2)
                if log.stat().st_size != size:
                    last, size = time.monotonic(), log.stat().st_size
                elif time.monotonic() - last > SILENCE_SECONDS:
                    child.kill()
                    child.wait()

    def _result(self, run: Run) -> Result:
        folder = self.out / run.name
        plan = draw(run.seed, run.fault)
        try:
            document = json.loads(self._outcome(run).read_text(encoding="utf-8"))
        except OSError:
            return Result(run, "", None, "the process died, twice", 0.0)
        if "broken" in document:
            return Result(run, "", None, document["broken"], 0.0)
        truth, seconds = document["truth"], sum(document["seconds"].values())
        scored = None
        if not truth["problem"] and self.trace:
            verified = scoring.verify_verdict(
                plan.planted, document.get("verified"), plan.unpromised, plan.breaks
            )
            report = self._report(folder / "trace")
            scored = scoring.score(run.seed, plan.planted, report, truth, plan.shows, verified)
        if not self.keep:
            shutil.rmtree(folder, ignore_errors=True)
        return Result(run, document["plan"], scored, truth["problem"], seconds)

    def _report(self, trace: Path) -> dict[str, Any] | None:
        from kvtrace.report.build import build_report

        try:
            report = build_report(trace)
        except Exception:
            traceback.print_exc()
            return None
        kept = trace.parent / "report.json"
        if self.keep and not kept.exists():
            kept.write_text(json.dumps(report, indent=1), encoding="utf-8")
        return report


def line(result: Result) -> str:
    """One line of a run: seed, what was planted, what was found first, the verdict, the connector."""
    plan = draw(result.run.seed, result.run.fault)
    fault = plan.fault or (f"choice {plan.design}" if plan.design else "healthy")
    head = f"{result.run.seed:>7} {fault:<24}"
    if result.unproven:
        return f"{head} UNPROVEN: {result.unproven}  [{result.plan}]"
    if result.scored is None:
        return f"{head} proven  [{result.plan}]"
    one = result.scored
    numbers = f"  ({one.wrong_number})" if one.wrong_number else ""
    verify = (
        f"verify {one.verify or '-'}: {' '.join(one.failed) or 'none fails'}  "
        if one.verify or one.failed
        else ""
    )
    return f"{head} {one.shows or '-':<12}{one.verdict:<12}{one.first:<28}{verify}[{result.plan}]{numbers}"


def show(seed: int, fault: str | None) -> None:
    plan = draw(seed, fault)
    made = generate(plan)
    print(made.text())
    print("# --- plan")
    print(f"# fault: {plan.fault or 'none'}" + (f": {plan.planted.title}" if plan.planted else ""))
    if plan.chosen is not None:
        print(f"# deliberate choice: {plan.design}: {plan.chosen.title}")
    print(f"# right: {', '.join(sorted(plan.planted.right)) if plan.planted else 'no fault'}")
    if plan.planted is not None:
        print(f"# breaks: {', '.join(sorted(plan.breaks)) or 'nothing'}; shows in: {plan.shows}")
    print(f"# {plan.describe()}")
    print(f"# {plan.kv_role}, settings {made.settings}, max_num_batched_tokens {plan.budget}")
    for number, part in enumerate(plan.rounds):
        how = "together" if part.together else "one by one"
        lengths = [len(prompt) for prompt in part.prompts]
        print(f"# round {number}: prompts of {lengths}, {how}, {part.max_tokens} tokens each")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds from there on")
    parser.add_argument("--jobs", type=int, default=1, help="engine processes at a time")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep sources, stores, traces and reports there"
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        help="this fault or deliberate choice in all of them ('healthy': none; 'choices': each in turn)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument(
        "--show", type=int, metavar="SEED", help="print a seed's source and plan, and run nothing"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and their right findings")
    parser.add_argument(
        "--no-trace", action="store_true", help="prove the plans without kvtrace, score nothing"
    )
    parser.add_argument(
        "--verify", action="store_true", help="ask for what is stored as well, in engines of its own"
    )
    parser.add_argument(
        "--device-memory", action="store_true", help="the agent takes every KV tensor for device memory"
    )
    parser.add_argument("--cuda", action="store_true", help="vLLM's KV lies on this machine's GPU")
    parser.add_argument(
        "--again", action="store_true", help="no engine: explain what --keep DIR has by the code of now"
    )
    args = parser.parse_args()
    if args.only not in (None, "healthy", "choices", *BY_NAME, *DESIGN_BY_NAME):
        parser.error(f"no fault and no choice named {args.only!r}; --list shows them")
    if args.seed is None and args.show is None and not args.list:
        parser.error("give --seed, --show or --list")
    if args.verify and not (ACCURACY / "harness" / "verified.py").exists():
        print("verify: not run: tests/accuracy/harness/verified.py is missing", file=sys.stderr)
        args.verify = False
    if args.device_memory and not hasattr(AgentConfig, "as_device"):
        parser.error("this agent has no such mode: AgentConfig has no field 'as_device'")
    if args.count < 1 or args.jobs < 1:
        parser.error("--count and --jobs start at 1")
    kept = args.keep is not None and args.keep.exists() and any(args.keep.iterdir())
    if args.again and not kept:
        parser.error("--again needs --keep DIR with what an earlier call kept")
    if kept and not args.again:
        parser.error(f"{args.keep} is not empty")
    return args


def main() -> int:
    args = options()
    fault = {"healthy": "", "choices": None}.get(args.only, args.only)
    if args.list:
        for one in FAULTS:
            breaks = ", ".join(sorted(one.breaks)) or "-"
            right = ", ".join(sorted(one.right)) or "none"
            print(f"{one.name:<26}{one.grade:<7}{one.shows:<12} {right:<60} {breaks:<40} {one.title}")
        for choice in DESIGNS:
            print(f"{choice.name:<26}choice {'-':<12} {'no fault':<60} {'-':<40} {choice.title}")
        return 0
    if args.show is not None:
        show(args.show, fault)
        return 0
    seeds = range(args.seed, args.seed + args.count)
    runs = [Run(seed, nth_design(seed) if args.only == "choices" else fault) for seed in seeds]
    out = args.keep.resolve() if args.keep else Path(tempfile.mkdtemp(prefix="kvtrace-accuracy-"))
    out.mkdir(parents=True, exist_ok=True)
    results = []
    try:
        asks = {name: vars(args)[name] for name in ASKS}
        measure = Measure(out, args.keep is not None, not args.no_trace, **asks)
        for result in measure.again(runs) if args.again else measure.all(runs, args.jobs):
            results.append(result)
            print(line(result), flush=True)
    finally:
        if args.keep is None:
            shutil.rmtree(out, ignore_errors=True)
    code = conclude(results, args.json)
    if args.page is not None:
        args.page.write_text(page(results, args), encoding="utf-8")
    return code


def page(results: list[Result], args: argparse.Namespace) -> str:
    """The measurement as a page of reports/."""
    scores = [result.scored for result in results if result.scored is not None]
    unproven = [result for result in results if result.unproven]
    only = f" --only {args.only}" if args.only else ""
    only += "".join(f" --{name.replace('_', '-')}" for name in ASKS if vars(args)[name])
    lines = [
        "# Accuracy on connectors that nobody has seen",
        "",
        f"`python scripts/accuracy.py --seed {args.seed} --count {args.count}{only}` with vLLM "
        f"{version('vllm')}. Each run is a connector written from a seed, healthy or with one planted fault; "
        "what is true of it comes from the plan and from what lies in its store, never from kvtrace. "
        "These seeds were not used in development. What the columns mean: `tests/accuracy/score.py`.",
        "",
        "Where a fault shows says whose it is: at the KV cache (`cache`), in names and sizes of files "
        "(`sizes`) and in `exceptions` a traced run has to name it; `return-only` is for `kvtrace verify`: "
        "there the right passive answer is no fault and no number above grade `read`. `verify`: how many "
        "it judged right of those that it has to judge. A deliberate choice is healthy: right is no fault.",
        "",
        "Of KV that left for a server out of sight a report says that it was sent, not that it is stored. "
        f"In {len(scoring.not_kept(scores))} of {len(scores)} runs the server did not keep all of what was "
        "sent. That is no wrong number: what a report says is at rest is held against what is at rest, and "
        "what it says was sent against what was taken from the KV cache.",
        "",
        "```text",
        *scoring.places(scores),
        "",
        *scoring.table(scores),
        "",
        *scoring.notes(scores),
        *(f"not counted, as the plan did not come true: {len(unproven)} runs" for _ in unproven[:1]),
        scoring.last_line(scores),
        "```",
        "",
        "Runs in which the first finding was not right, or a number was wrong:",
        "",
        "```text",
        *(
            line(result).strip()
            for result in sorted(results, key=lambda one: one.run.seed)
            if result.scored is not None
            and (
                result.scored.verdict != scoring.RIGHT
                or result.scored.wrong_number
                or result.scored.verify not in ("", scoring.RIGHT)
            )
        ),
        "```",
    ]
    return "\n".join(lines) + "\n"


def conclude(results: list[Result], file: Path | None) -> int:
    scores = [result.scored for result in results if result.scored is not None]
    unproven = [result for result in results if result.unproven]
    print()
    print("\n".join([*scoring.table(scores), "", *scoring.places(scores), "", *scoring.notes(scores)]))
    print(f"seconds of engines and truth: {sum(result.seconds for result in results):.0f}")
    for result in unproven:
        print(f"NOT COUNTED: {line(result).strip()}")
    if file is not None:
        file.write_text(json.dumps([asdict(one) for one in scores], indent=1), encoding="utf-8")
    print(scoring.last_line(scores))
    return 1 if unproven else 0


def run() -> int:
    """main(), where whoever reads the output may have enough of it."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    raise SystemExit(run())
