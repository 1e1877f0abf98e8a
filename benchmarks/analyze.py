#!/usr/bin/env python3
"""How long the analysis of `kvtrace explain` takes, in which memory, beside a numpy read of the same bytes.

    python benchmarks/analyze.py [--record | --run RUN] [--records 1e5 1e6 1e7] [--spools 1] [--pairs 3]

Runs of so many records have the shape of a short one, repeated (`benchmarks/repeat.py`): of one that is
recorded now on a real vLLM (`--record`: 32 layers, batches of 8, prompts of 60 to 220 tokens, a third of them
asked again, 96 to 160 tokens of output), of a run directory of yours (`--run`), or, without either, of one
that is made up (prompts of 96 tokens one after the other and hardly a decode step: far more requests a
record than real traffic has). The report's outcomes must be those of the short run, so many times.

For each size, in turn, in processes of their own: numpy reads all spools and sums their columns;
`build_report` reads them; of each the fastest of `--pairs`. Ratio and exponent are of CPU time, with that
of helper processes and without the start of Python: on a busy machine wall time, beside it, says little.
Memory is what the process and its helpers hold together (Pss) at most. The last line has the ratio from
10^7 records on, the exponent between the sizes from 10^6 on, and the greatest memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "scripts"), str(ROOT / "tests" / "ledger")]

from repeat import repeat  # noqa: E402
from soak import descendants  # noqa: E402
from vllm_env import CACHE, vllm_env  # noqa: E402

_SPENT = """
import resource, time
def spent():
    told = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in told)
"""
_READ = (
    _SPENT
    + """
import sys, numpy, pathlib
paths = sorted(pathlib.Path(sys.argv[1]).rglob("*.kvt"))
began = spent()
for path in paths:
    with open(path, "rb") as file:
        while len(table := numpy.fromfile(file, "<i8", 1 << 20)):
            table.reshape(-1, 8).sum(axis=0)
print(*(now - then for now, then in zip(spent(), began)))
"""
)
_ANALYSE = (
    _SPENT
    + """
import json, sys
from kvtrace.report.build import build_report
began = spent()
report = build_report(sys.argv[1])
print(*(now - then for now, then in zip(spent(), began)))
print(json.dumps({name: one["accounts"] for name, one in report["ledger"].items()}))
"""
)


class Row(NamedTuple):
    """One size. Times: (wall, CPU) seconds; memory in MiB."""

    records: int
    requests: int
    spools: int
    size: int  # bytes
    read: tuple[float, float]
    analysis: tuple[float, float]
    peak: float

    @property
    def ratio(self) -> float:
        return self.analysis[1] / self.read[1]


# ------------------------------------------------------------------------ the short run


def made_up(folder: Path) -> None:
    """One engine with 32 KV layers, a request a step, each of 96 tokens and stored."""
    from synth import Prompt, Rounding, Sim, run_json

    sim = Sim(folder, layers=32)
    sim.serve([Prompt(f"r{at}", 96, digest=1 + at) for at in range(64)], Rounding(32).policy())
    sim.write()
    run_json(folder)


def serve(store: str) -> None:
    """In the engine's own process: the requests of `--record`."""
    from tiny_model import make_tiny_model
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        str(make_tiny_model(CACHE / "tiny-model")), hf_overrides={"num_hidden_layers": 32},
        load_format="dummy", enforce_eager=True, max_model_len=512, block_size=32, max_num_seqs=8,
        max_num_batched_tokens=2048, enable_prefix_caching=False, disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector", kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": store},
        ),
    )  # fmt: skip
    prompts = [[5 + (at * 31 + place * 7) % 500 for place in range(60 + at * 37 % 161)] for at in range(24)]
    asked = [*prompts, *prompts[::2]]
    params = [
        SamplingParams(max_tokens=96 + at * 11 % 65, temperature=0, ignore_eos=True)
        for at in range(len(asked))
    ]
    llm.generate([{"prompt_token_ids": one} for one in asked], params, use_tqdm=False)


def record(folder: Path) -> None:
    """Raises subprocess.CalledProcessError: the engine failed."""
    env = {**vllm_env(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "kvtrace", "run", "-o", str(folder), "--"]
    command += [sys.executable, __file__, "--serve", str(folder.parent / "store")]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)


# --------------------------------------------------------------------------- measuring


def _held(pid: int) -> float:
    """MiB that a process and its helpers hold."""
    total = 0
    for one in descendants(pid):
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def _timed(code: str, folder: Path, watch: bool) -> tuple[tuple[float, float], float, str]:
    """((wall, CPU) seconds, greatest memory, the rest of what it said) of Python code.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(folder)]
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        while watch and process.poll() is None:
            peak = max(peak, _held(process.pid))
            time.sleep(0.05)
        told = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command[:2])
    first, _, rest = told.partition("\n")
    wall, cpu = map(float, first.split())
    return (wall, cpu), peak, rest


def _check(short: dict[str, Any], long: dict[str, Any], times: int) -> None:
    """Raises SystemExit: the outcomes are not those of the short run, so many times."""
    want = {book: {name: n * times for name, n in of.items()} for book, of in short.items()}
    if want != long:
        raise SystemExit(f"analyze.py: the outcomes of the long run are wrong: {long}, not {want}")


def measure(source: Path, folder: Path, records: int, engines: int, pairs: int) -> Row:
    short = json.loads(_timed(_ANALYSE, source, False)[2])
    once = repeat(source, folder / "once", 1, 1)[0]
    made, requests, spools = repeat(source, folder / "run", records, engines)
    size = sum(path.stat().st_size for path in (folder / "run").rglob("*.kvt"))
    reads, analyses = [], []
    for _ in range(pairs):
        reads.append(_timed(_READ, folder / "run", False)[0])
        times, _, rest = _timed(_ANALYSE, folder / "run", False)
        _check(short, json.loads(rest), made // once)
        analyses.append(times)
    peak = _timed(_ANALYSE, folder / "run", True)[1]  # looking costs time
    return Row(made, requests, spools, size, _least(reads), _least(analyses), peak)


def _least(times: list[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = (min(column) for column in zip(*times, strict=True))
    return wall, cpu


def exponent(rows: list[Row]) -> float:
    """Of the line through the logarithms of times over records, from 10^6 on if there are two such."""
    long = [row for row in rows if row.records > 9e5]
    points = [(math.log(row.records), math.log(row.analysis[1])) for row in (long if len(long) > 1 else rows)]
    if len({x for x, _ in points}) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def last_line(rows: list[Row]) -> str:
    long = [row.ratio for row in rows if row.records > 9e6]
    ratio = f"{max(long):.1f}" if long else "none"
    peak = max(row.peak for row in rows)
    return f"analyze: ratio_1e7={ratio} exponent={exponent(rows):.2f} peak_mb={peak:.0f}"


def table(rows: list[Row], shape: str) -> str:
    lines = [
        f"Shape: {shape}; {os.cpu_count()} cores.", "",
        "| records | requests | spools | bytes | numpy: wall, CPU | analysis: wall, CPU | ratio | memory |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines += [
        f"| {row.records:,} | {row.requests:,} | {row.spools} | {row.size / 1e6:,.0f} MB "
        f"| {row.read[0]:.2f} s, {row.read[1]:.2f} s | {row.analysis[0]:.2f} s, {row.analysis[1]:.2f} s "
        f"| {row.ratio:.1f} | {row.peak:,.0f} MiB |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record the short run on a real vLLM")
    parser.add_argument("--run", type=Path, help="a recorded run directory")
    parser.add_argument("--records", type=float, nargs="+", default=[1e5, 1e6, 1e7])
    parser.add_argument("--spools", type=int, nargs="+", default=[1], help="engines side by side")
    parser.add_argument("--pairs", type=int, default=3, help="reads and analyses of each size")
    parser.add_argument("--out", type=Path, help="where the runs are made, and removed again")
    parser.add_argument("--keep", type=Path, help="with --record: where the short run stays")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return 0
    rows = []
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvtrace-analyze-", dir=given.out) as folder:
        source, shape = Path(folder, "short", "run"), "made up"
        source.parent.mkdir()
        if given.run:
            source, shape = given.run, f"recorded, {given.run.name}"
        elif given.record:
            record(source)
            shape = "recorded on a real vLLM"
            if given.keep:
                shutil.copytree(source, given.keep)
        else:
            made_up(source)
        for records in given.records:
            for engines in given.spools:
                with tempfile.TemporaryDirectory(dir=folder) as here:
                    rows.append(measure(source, Path(here), int(records), engines, given.pairs))
                print(table(rows[-1:], shape).splitlines()[-1], flush=True)
    print(table(rows, shape))
    print(last_line(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
