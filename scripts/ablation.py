#!/usr/bin/env python3
"""What each rule of the ledger and of the causes is worth, on runs that were kept.

    python scripts/ablation.py --keep DIR [--traces DIR ...] [--only TEXT] [--jobs K] [--page FILE]

One rule is switched off at a time, and every kept run is explained anew. A rule earns its place where its
absence is felt: a verdict, a saved number, a false alarm. CONTRIBUTING.md says what follows for one that
changes nothing.

    --keep DIR     what `scripts/accuracy.py --keep DIR` left: runs with their truth
    --traces DIR   folders of run directories without one (scenarios, real connectors): there it counts
                   whether the findings, the ledger of saves, or a grade, are others without the rule

Exit codes: 0 done, 2 usage.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tests" / "accuracy"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import score as scoring  # noqa: E402
from kvgen.plan import draw  # noqa: E402

from kvtrace.causes import diagnose  # noqa: E402
from kvtrace.causes.registry import ORDER  # noqa: E402
from kvtrace.causes.rules.key_mismatch import _finding as key_mismatch  # noqa: E402
from kvtrace.ledger import read_run  # noqa: E402
from kvtrace.ledger.run import Run, RunError  # noqa: E402
from kvtrace.ledger.saves.positions import _not_saved as not_saved  # noqa: E402
from kvtrace.report.build import assemble, build_report  # noqa: E402
from kvtrace.report.model import Report  # noqa: E402


@dataclass(frozen=True)
class Rule:
    """One rule that can be switched off. ``place``: ``module:name`` or ``module:Class.name``, where it is
    looked up; ``off``: what stands there instead."""

    name: str
    place: str
    off: Any

    @property
    def is_cause(self) -> bool:
        return self.name.startswith("cause ")

    def switch_off(self) -> None:
        module, _, name = self.place.partition(":")
        owner: Any = import_module(module)
        *outer, last = name.split(".")
        for one in outer:
            owner = getattr(owner, one)
        if not hasattr(owner, last):
            raise AttributeError(f"{self.place}: no such rule")
        setattr(owner, last, self.off)


def _none(*_: Any, **__: Any) -> None:
    return None


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def _no_table(*_: Any, **__: Any) -> dict[Any, Any]:
    return {}


def _false(*_: Any, **__: Any) -> bool:
    return False


def _proved_alone(token: Any, grade: Any) -> Any:
    return type(grade).PROVED if token.proved else grade


def _never_back(token: Any) -> Any:
    return not_saved(token._replace(proved=False))


def _always_fault(*given: Any, **more: Any) -> Any:
    return key_mismatch(*given, **{**more, "declines": False})


def _no_files(*_: Any, **__: Any) -> tuple[dict[Any, Any], Any]:
    return {}, import_module("kvtrace.ledger.run").Trust()


def _made(place: str) -> Callable[..., Any]:
    """An empty value of a class that is named ``module:Class``."""

    def empty(*_: Any, **__: Any) -> Any:
        module, _, name = place.partition(":")
        return getattr(import_module(module), name)()

    return empty


def _beside(place: str, change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A method, and then ``change`` of (self, its result)."""
    module, _, name = place.partition(":")
    cls, _, method = name.partition(".")
    original = getattr(getattr(import_module(module), cls), method)

    def changed(self: Any, *given: Any, **more: Any) -> Any:
        return change(self, original(self, *given, **more))

    return changed


def _understood(calls: Any, _: None) -> None:
    calls._understood = True


def _nobody_s_name(_: Any, why: Any) -> Any:
    return why and why._replace(whose=None)


_ENDS = property(lambda request: request.last_step)
_LEDGER = "kvtrace.ledger"
_RULES = "kvtrace.causes.rules"
_CALLS, _ANOTHER_S = (
    f"{_LEDGER}.saves.calls:WorkerCalls.__init__",
    f"{_LEDGER}.contents.judge:Judge._another_s",
)
RULES: tuple[Rule, ...] = (
    *(
        Rule(name, f"{_LEDGER}.{place}", off)
        for name, place, off in (
            ("metadata: what it names", "requests:Request.entries", None),
            ("requests: what a store was made to forget", "requests:_reset", _none),
            ("slots: all reads begin within blocks", "slots.resolve:_Resolver._off", lambda *_: set()),
            ("slots: reads after the blocks went to another", "slots.late:LateReads.gone", _no_table),
            ("slots: work that came too late", "slots.too_late:TooLate._gone_since_asked", _no_table),
            ("slots: reads of what a load fills", "slots.owners:Owners._filled", lambda *_: ()),
            ("slots: what is out of a window", "slots.resolve:_outside_windows", _no_table),
            (
                "saves: reads of no use",
                "saves.pairs:other_slots",
                _made(f"{_LEDGER}.saves.useless_reads:OtherSlots"),
            ),
            ("slots: read in part", "slots.resolve:_Resolver._in_part", lambda *_: set()),
            ("saves: other KV that came in time", "loads.outcome:Arrived.other_kv", True),
            ("saves: other slots than named", "saves.calls:read_elsewhere", _false),
            ("saves: what came back, whoever read it", "saves.positions:_not_saved", _never_back),
            ("saves: exceptions in calls", "saves.calls:WorkerCalls._by_exception", lambda *_: frozenset()),
            ("saves: reads of requests that are over", "requests:Request.gave_back", _false),
            ("saves: copies that come later", "saves.calls:WorkerCalls._lag", 0),
            ("saves: metadata behind its end", "requests:Request.named_until", _ENDS),
            ("saves: windows", "saves.pairs:windows_of", _no_table),
            ("saves: ranks in one file", "saves.pairs:overwritten_by_rank", _no_files),
            ("saves: overwritten by other prompts", "saves.files:_apart", _false),
            ("saves: written over by the same tokens", "saves.files:_alike", _false),
            ("saves: files that are written over", "slots.accounts:_StoreFile.keeps", True),
            ("saves: files that were compacted", "slots.accounts:_moved", _false),
            ("saves: what came back as other KV", "saves.positions:_by_return", _proved_alone),
            ("saves: asynchronous ends", "read:settle", lambda *_: ()),
            ("saves: read and not named", "read:unnamed", _made(f"{_LEDGER}.saves.unnamed:Unnamed")),
            ("saves: sizes at rest", "read:accounts", _made(f"{_LEDGER}.slots.accounts:Accounts")),
            ("saves: given away", "reported:given_away", lambda *_: frozenset()),
            ("loads: of resumed requests", "read:follow_resumed", _nothing),
            ("contents: fingerprints", "read:compare", _made(f"{_LEDGER}.contents.compare:Contents")),
            (
                "contents: layers of loaded blocks",
                "contents.judge:Judge.differing",
                lambda *_: import_module("kvtrace.ledger.contents.by_layer").Differing(None),
            ),
            ("contents: layers of other groups and ranks", "contents.by_layer:ByLayer._in_others", {}),
            ("requests: what a step computed in vain", "requests:Request.computed_anew", _nothing),
            ("contents: engines of other weights", "contents.judge:Judge._never_alike", _no_table),
            ("loads: nobody's KV beside what did not come", "loads.decide:_may_be_older_kv", _false),
            (
                "saves: last blocks that are not full",
                "saves.positions:_InPair._meant",
                lambda _, early: early,
            ),
            ("contents: the same KV before", "contents.compare:remaining", lambda *_: set()),
            ("contents: unwritten blocks", "contents.compare:unwritten_blocks", _no_table),
            ("contents: zeroes that were written", "contents.unwritten:_zeroed", lambda *_: set()),
            ("contents: what came to the next request", "contents.later:_owed", lambda *_: ()),
            ("contents: looked at later", "contents.compare:held_later", _no_table),
            ("contents: altered alike", "contents.compare:_altered", _none),
            ("contents: how far numbers are", "contents.compare:_far", lambda *_: set()),
            ("contents: fewer bits in some layers", "contents.compare:_near", lambda *_: set()),
            ("saves: where the agent failed", "reported:agent_failed", _false),
            ("contents: given back by nobody", "contents.judge:Judge._nobody_s", _none),
            ("contents: one KV in two places", "contents.judge:Judge._twice", _none),
            ("contents: another's KV", "contents.judge:Judge._another_s", _none),
            ("contents: in a block that was theirs", "contents.judge:Judge._had_it_before", _false),
            ("contents: changed, and not theirs", "contents.judge:Judge.is_its_own", _none),
            ("slots: metadata in part, too late", "slots.too_late:TooLate._may_be_named", _false),
        )
    ),
    Rule("saves: metadata in part, other slots", _CALLS, _beside(_CALLS, _understood)),
    Rule("contents: under another's name", _ANOTHER_S, _beside(_ANOTHER_S, _nobody_s_name)),
    Rule("causes: the unit", "kvtrace.causes.case:infer_unit", _none),
    Rule("saves: what orders nothing", f"{_LEDGER}.topology:_names_no_order", _false),
    Rule("causes: the unit, of so many blocks", "kvtrace.causes.evidence.unit:_of_blocks", _none),
    Rule("contents: across salts", f"{_LEDGER}.contents.judge:Judge.of_another_salt", _false),
    Rule("causes: what workers take back", "kvtrace.causes.evidence.unstored:answered", _false),
    Rule("causes: the unit, of own entries", "kvtrace.causes.case:_own", lambda _, taken: taken),
    Rule("causes: keys beside hits", "kvtrace.causes.rules.key_mismatch:_finding", _always_fault),
    *(Rule(f"cause {name.replace('_', '-')}", f"kvtrace.causes.rules.{name}:rule", None) for name in ORDER),
)


@dataclass(frozen=True)
class Answer:
    """What a report says of a run."""

    verdict: str  # of scoring, "" where there is no truth
    wrong: str
    said: str  # findings with their severities, the accounts of saves, and the grades in both ledgers


@dataclass(frozen=True)
class Kept:
    """A run that was kept. ``seed``: None where there is no truth."""

    trace: Path
    seed: int | None = None
    fault: str | None = None

    def answer(self, report_of: Callable[[Path], Report] = build_report) -> Answer:
        try:
            report = report_of(self.trace)
        except (RunError, AssertionError, KeyError, ValueError) as error:
            return Answer("broken" if self.seed is not None else "", "", f"{type(error).__name__}: {error}")
        said = json.dumps(
            [
                [(one["id"], one["severity"]) for one in report["findings"]],
                report["ledger"]["saves"]["accounts"],
                [report["ledger"][which]["grades"] for which in ("saves", "loads")],
            ]
        )
        if self.seed is None:
            return Answer("", "", said)
        truth = json.loads((self.trace.parent / "outcome.json").read_text(encoding="utf-8"))["truth"]
        plan = draw(self.seed, self.fault)
        one = scoring.score(self.seed, plan.planted, report, truth, plan.shows)
        return Answer(one.verdict, one.wrong_number, said)


def kept_runs(keep: Path) -> Iterator[Kept]:
    """Those whose truth is what was planned."""
    for outcome in sorted(keep.glob("*/outcome.json")):
        document = json.loads(outcome.read_text(encoding="utf-8"))
        seed, _, fault = outcome.parent.name.partition("-")
        if "truth" in document and not document["truth"]["problem"]:
            yield Kept(outcome.parent / "trace", int(seed), fault or None)


def traces(folder: Path) -> Iterator[Kept]:
    yield from (Kept(path.parent) for path in sorted(folder.rglob("run.json")))


def answers(task: tuple[int | None, Sequence[Kept]]) -> list[Answer]:
    """In a process of its own, which has one rule switched off: its number; None: all stand."""
    rule, runs = task
    if rule is not None:
        _switch_off(RULES[rule])
    return [one.answer() for one in runs]


def answers_of_causes(task: tuple[Sequence[int], Kept]) -> list[Answer]:
    """Of one run, with one cause after the other switched off. No cause changes what is read of a trace: that
    is done once."""
    numbers, kept = task
    module = import_module("kvtrace.causes.diagnose")
    every, found = module.RULES, []
    report_of = functools.partial(_diagnosed, functools.cache(read_run))
    for number in numbers:
        off = import_module(RULES[number].place.partition(":")[0]).rule
        module.RULES = tuple(one for one in every if one is not off)
        found.append(kept.answer(report_of))
    module.RULES = every
    return found


def _diagnosed(read: Callable[[Path], Run], trace: Path) -> Report:
    run = read(trace)
    return assemble(run, diagnose(run))


def _switch_off(rule: Rule) -> None:
    if rule.place.endswith("Request.entries"):
        requests = import_module(f"{_LEDGER}.requests")
        read, collect = import_module(f"{_LEDGER}.read"), requests.collect
        from dataclasses import replace

        def without_entries(*given: Any) -> Any:
            found = collect(*given)
            return replace(found, requests=tuple(replace(one, entries=()) for one in found.requests))

        read.collect = without_entries
        return
    rule.switch_off()


def row(rule: Rule, base: Sequence[Answer], off: Sequence[Answer]) -> tuple[int, list[str]]:
    """How much is felt, and the cells of the table."""
    pairs = list(zip(base, off, strict=True))
    lost = sum(one.verdict == scoring.RIGHT != two.verdict for one, two in pairs)
    gained = sum(two.verdict == scoring.RIGHT != one.verdict for one, two in pairs)
    alarms = sum(
        (two.verdict == scoring.FALSE_ALARM) - (one.verdict == scoring.FALSE_ALARM) for one, two in pairs
    )
    numbers = sum(bool(two.wrong) - bool(one.wrong) for one, two in pairs)
    said = sum(one.said != two.said for one, two in pairs)
    return lost + gained + abs(alarms) + abs(numbers), [
        rule.name, f"{lost}", f"{gained}", f"{alarms:+d}" if alarms else "0",
        f"{numbers:+d}" if numbers else "0", f"{said}",
    ]  # fmt: skip


def table(rows: Mapping[str, tuple[int, list[str]]], runs: int) -> str:
    head = [
        "rule switched off",
        "right verdicts lost",
        "gained",
        "false alarms",
        "wrong numbers",
        "runs that say something else",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for _, cells in sorted(rows.values(), key=lambda one: (-one[0], -int(one[1][-1]), one[1][0])):
        lines.append("| " + " | ".join(cells) + " |")
    return f"{runs} kept runs.\n\n" + "\n".join(lines) + "\n"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--traces", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--only", metavar="TEXT", default="", help="rules with this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table there, as Markdown")
    return parser.parse_args()


def main() -> int:
    args = options()
    runs = [one for folder in args.keep for one in kept_runs(folder)]
    runs += [one for folder in args.traces for one in traces(folder)]
    if not runs:
        print("ablation: no kept run there: make some with scripts/accuracy.py --keep DIR", file=sys.stderr)
        return 2
    wanted = [at for at, one in enumerate(RULES) if args.only in one.name]
    of_causes = [at for at in wanted if RULES[at].is_cause]
    numbers = [at for at in wanted if not RULES[at].is_cause]
    found: dict[str, tuple[int, list[str]]] = {}

    def felt(at: int, base: Sequence[Answer], off: Sequence[Answer]) -> None:
        found[RULES[at].name] = row(RULES[at], base, off)
        print(" | ".join(found[RULES[at].name][1]), flush=True)

    context = multiprocessing.get_context("fork")
    with context.Pool(args.jobs, maxtasksperchild=1) as pool:
        results = pool.imap(answers, [(task, runs) for task in (None, *numbers)], chunksize=1)
        base = next(results)
        for at, off in zip(numbers, results, strict=True):
            felt(at, base, off)
    with context.Pool(args.jobs) as pool:
        by_run = pool.map(answers_of_causes, [(of_causes, one) for one in runs], chunksize=8)
        for at, offs in zip(of_causes, zip(*by_run, strict=True), strict=True):
            felt(at, base, offs)
    page = table(found, len(runs))
    if args.page:
        args.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
