#!/usr/bin/env python3
"""Cuts traced runs of a real vLLM short in every way that happens, and checks what kvtrace makes of them.

    python scripts/kills.py [--seed N] [--count M] [--only NAME] [--jobs K] [--keep DIR] [--page FILE]

With the DIR of an earlier call the runs that it made are kept, and the rest is made.

A run is one engine that is killed, signalled, or loses its disk or its run directory, under requests, when
its connector has made a number of calls that the seed draws. Checked each time: the exit code and the
processes left (as of an untraced run that is cut short in the same way: one is made of each setup and kind),
the tokens given out until then (the same as untraced), the records against a
log that the connector itself keeps (at most one step lost, none invented), the saved tokens against the same
log, and what ``explain`` says. ``--only``: a setup (script, family, server, pair) or a kind (front, core,
worker, all, term, int, int-twice, launcher, disk-full, deleted; of forked engines also kill).

Exit codes: 0 all as it must be, 1 not, 2 usage. The last line of the output is the score.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count as numbers
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "scripts", ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from killing.engines import Engine, Place, Setup  # noqa: E402
from killing.judge import problems  # noqa: E402
from killing.kinds import FAMILY, KINDS, PAIR, SCRIPT, SERVER, SETUPS, cut_short  # noqa: E402
from killing.twins import Twins  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402
from vllm_env import CACHE, vllm_env  # noqa: E402

WHAT = {
    "script": "a script with an engine in its process",
    "family": "engines one after the other, each in a forked process",
    "server": "`vllm serve`: API server, engine core, worker",
    "pair": "`vllm serve` with two workers (TP 2)",
}
_IN_A_FAMILY = ("kill", "kill", "kill", "term", "kill", "int", "kill", "int-twice")
_OF_A_SCRIPT = tuple(name for name, kind in KINDS.items() if "script" in kind.setups)


@dataclass(frozen=True)
class Go:
    """One command, cut short in one way; with forks once each."""

    setup: Setup
    kinds: tuple[str, ...]
    seed: int


def plan(seed: int, count: int, only: str) -> list[Go]:
    """The first goes of the seed that make ``count`` runs; of a setup or kind alone where one is named."""
    chosen: list[Go] = []
    left = count
    for go in _goes(seed):
        kinds = go.kinds if only in ("", go.setup.name) else tuple(kind for kind in go.kinds if kind == only)
        if kinds[:left]:
            setup = replace(go.setup, forks=len(kinds[:left])) if go.setup.forks else go.setup
            chosen.append(Go(setup, kinds[:left], go.seed))
            left -= len(kinds[:left])
        if not left:
            return chosen
    return chosen


def _goes(seed: int) -> Iterator[Go]:
    """Without end: rounds of every setup and kind, in which the goes of a family hold many runs each."""
    at = numbers(seed * 1000)
    while True:
        yield _family(next(at))
        yield from (Go(SERVER, (name,), next(at)) for name in KINDS)
        yield from (Go(PAIR, (name,), next(at)) for name in ("worker", "core"))
        yield from (Go(SCRIPT, (name,), next(at)) for name in _OF_A_SCRIPT)
        yield _family(next(at))


def _family(seed: int) -> Go:
    return Go(FAMILY, tuple(random.Random(seed).sample(_IN_A_FAMILY, len(_IN_A_FAMILY))), seed)


class Runs:
    """Makes them, and keeps what they showed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tiny_model(CACHE / "tiny-model")
        self.results: list[tuple[Go, list[str], float]] = []
        self.answers: dict[int, list[int]] = {}
        self._done = folder / "results.jsonl"
        self.twins = Twins(lambda name: self._place(f"untraced/{name}"))
        self.resumed = False

    def untraced(self) -> None:
        """All answers, to the end, from an engine without kvtrace."""
        with Engine(SCRIPT, self._place("untraced/whole"), 0, traced=False) as engine:
            if engine.wait():
                raise SystemExit(f"kills: the untraced engine failed: {engine.tail()}")
            self.answers = dict(engine.given())

    def resume(self) -> None:
        """What an earlier call with the same folder has made."""
        if self._done.is_file():
            for line in self._done.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                setup = replace(SETUPS[row["setup"]], forks=row["forks"])
                go = Go(setup, tuple(row["kinds"]), row["seed"])
                self.results.append((go, row["found"], row["seconds"]))
                self.resumed = True
                self.twins.load(setup, row["twins"])

    def left_to_do(self, goes: list[Go]) -> list[Go]:
        """Those that were not made yet."""
        done = {(go.setup.name, go.kinds, go.seed) for go, _, _ in self.results}
        return [go for go in goes if (go.setup.name, go.kinds, go.seed) not in done]

    def _place(self, name: str) -> Place:
        shutil.rmtree(self.folder / name, ignore_errors=True)  # of a call that was stopped
        return Place(self.folder / name, self.model, vllm_env())

    def make(self, go: Go) -> tuple[Go, list[str], float]:
        began = time.monotonic()
        place = self._place(f"{go.seed}-{go.setup.name}-{go.kinds[0]}")
        try:
            twin = self.twins.of(go.setup, go.kinds, go.seed)[0]
            seen = cut_short(go.setup, go.kinds, place, go.seed, twin=twin)
            found = problems(seen, self.answers, self.twins.ends(seen, go.seed))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if not found:
            shutil.rmtree(place.folder, ignore_errors=True)
        return go, found, time.monotonic() - began

    def add(self, result: tuple[Go, list[str], float]) -> None:
        go, found, seconds = result
        self.results.append(result)
        row = {
            "setup": go.setup.name, "forks": go.setup.forks, "kinds": go.kinds, "seed": go.seed,
            "found": found, "seconds": seconds, "twins": self.twins.stored(go.setup, go.kinds),
        }  # fmt: skip
        with self._done.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        state = "; ".join(found) or "ok"
        print(f"{go.setup.name:7} {' '.join(go.kinds):60} {seconds:5.0f} s  {state}", flush=True)

    def score(self) -> tuple[int, int]:
        """Runs, and how many of them failed; of a go with several all fail where one check does."""
        runs = sum(len(go.kinds) for go, _, _ in self.results)
        return runs, sum(len(go.kinds) for go, found, _ in self.results if found)


def _ends(runs: Runs) -> list[str]:
    """How the untraced runs ended, as lines of a table."""
    return [
        f"| {WHAT[setup]} | {kind} | {', '.join(sorted(codes))} | {', '.join(left) or 'none'} |"
        for setup, kind, codes, left in runs.twins.seen()
    ]


def page(runs: Runs, args: argparse.Namespace) -> str:
    """What was seen, as Markdown."""
    total, failed = runs.score()
    tried: Counter[tuple[str, str]] = Counter()
    bad: Counter[tuple[str, str]] = Counter()
    for go, found, _ in runs.results:
        for kind in go.kinds:
            tried[go.setup.name, kind] += 1
            bad[go.setup.name, kind] += bool(found)
    vllm = version("vllm")
    several = ["Made in several calls, not all of them with the newest kvtrace."] if runs.resumed else []
    lines = [
        "# Runs of a real vLLM that were cut short",
        "",
        f"Made by `scripts/kills.py --seed {args.seed}` on vLLM {vllm}, CPU: {total} runs, {failed} failed.",
        "The connector saves to files and keeps an fsynced log of its own; each run was cut short after a",
        "number of its calls that the seed draws. Checked each time: exit code and processes left (as of the",
        "untraced runs below), tokens the same as untraced, at most one step lost and none invented, saved",
        "tokens against the connector's log, and what `explain` says. Who stops a server with a signal takes",
        "its clients away with it.",
        *several,
        "",
        "| setup | cut short by | runs | failed |",
        "|---|---|---:|---:|",
        *(
            f"| {WHAT[name]} | {kind} | {n} | {bad[name, kind]} |"
            for (name, kind), n in sorted(tried.items())
        ),
    ]
    if failed:
        lines += ["", "What failed:", ""]
        lines += [
            f"- {go.setup.name}, {', '.join(go.kinds)}: {one}"
            for go, found, _ in runs.results
            for one in found
        ]
    lines += [
        "",
        "How untraced runs end that are cut short in the same way (goes on: nothing is done to the engine):",
        "",
        "| setup | cut short by | exit code | processes left after a minute |",
        "|---|---|---|---|",
        *_ends(runs),
    ]
    return "\n".join(lines) + "\n"


def write_page(runs: Runs, args: argparse.Namespace) -> None:
    if args.page:
        args.page.write_text(page(runs, args), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="runs [40]")
    parser.add_argument("--only", default="", choices=["", *WHAT, *KINDS, "kill"], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="engines at once [1]")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; those that fail stay there")
    parser.add_argument("--page", type=Path, help="where the results go as Markdown, after each go")
    args = parser.parse_args()
    # A job in the background of a shell ignores Ctrl-C, and so would the engines.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kills-", dir=CACHE) as scratch:
        runs = Runs((args.keep or Path(scratch)).resolve())
        runs.resume()
        goes = runs.left_to_do(plan(args.seed, args.count, args.only))
        if goes:
            runs.untraced()
        with ThreadPoolExecutor(args.jobs) as pool:
            # An engine in one process starts in a third of a server's time: what is stopped has made more.
            quick = sorted(goes, key=lambda go: go.setup.server)
            for done in as_completed([pool.submit(runs.make, go) for go in quick]):
                runs.add(done.result())
                write_page(runs, args)
        write_page(runs, args)
    total, failed = runs.score()
    print(f"kills: runs={total} failed={failed} goes={len(runs.results)}")
    return int(failed > 0)


if __name__ == "__main__":
    os.umask(0o077)
    raise SystemExit(main())
