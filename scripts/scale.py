#!/usr/bin/env python3
"""How long `kvtrace explain` takes, and how much memory, on made-up runs of so many records.

python scripts/scale.py --records 100000 1000000 [--out FOLDER] [--write reports/scale.md]

A run is one engine with 32 KV layers, a request a step, each of 96 tokens and stored. Times are CPU seconds
of a process of its own (on a busy machine too), memory is its peak. Beside them, what numpy takes to read the
same bytes once.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ledger")]
LAYERS = 32
_BATCH = 64
_READ = (
    "import sys, numpy, pathlib\n"
    "for path in pathlib.Path(sys.argv[1]).rglob('*.kvt'):\n"
    "    with open(path, 'rb') as file:\n"
    "        while len(table := numpy.fromfile(file, '<i8', 1 << 20)):\n"
    "            table.sum()\n"
)


class Row(NamedTuple):
    """One run. Times in CPU seconds, memory in MiB."""

    records: int
    requests: int
    size: int  # bytes of the spools
    explain: float
    peak: float
    read: float


def make(folder: Path, records: int) -> tuple[int, int]:
    """Write a run of about so many records; how many it has, and of how many requests."""
    from synth import Prompt, Rounding, Sim, run_json

    sim = Sim(folder, layers=LAYERS)
    spools = [sim.scheduler, *sim.workers]
    policy, requests = Rounding(32).policy(), 0
    while sum(len(spool.data) for spool in spools) < records * 64:
        prompts = [Prompt(f"r{requests + i}", 96, digest=1 + requests + i) for i in range(_BATCH)]
        sim.serve(prompts, policy)
        requests += _BATCH
    found = sum(len(spool.data) for spool in spools) // 64
    sim.write()
    run_json(folder)
    return found, requests


def measured(*command: str) -> tuple[float, float]:
    """(CPU seconds, peak memory in MiB) of a command.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss)\n"
    )
    told = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    seconds, kib = told.stdout.split()
    return float(seconds), int(kib) / 1024


def measure(folder: Path, records: int) -> Row:
    began = time.monotonic()
    found, requests = make(folder, records)
    size = sum(path.stat().st_size for path in folder.rglob("*.kvt"))
    print(f"made {found} records in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    read, _ = measured(sys.executable, "-c", _READ, str(folder))
    start, _ = measured(sys.executable, "-c", "import numpy")
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kvtrace.cli.app import main; main()"
    explain, peak = measured(sys.executable, "-c", script, "explain", str(folder))
    return Row(found, requests, size, explain, peak, max(0.0, read - start))


def page(rows: list[Row]) -> str:
    """The rows as Markdown, and the exponent between the last two."""
    lines = [
        "# Scale",
        "",
        "Made by `python scripts/scale.py`: `kvtrace explain` of made-up runs (one engine, 32 KV layers, a",
        "request a step), in CPU seconds and peak memory of its process; then numpy reads the bytes.",
        "",
        "| records | requests | spools | explain | peak memory | numpy's read |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {row.records:,} | {row.requests:,} | {row.size / 1e6:,.0f} MB | {row.explain:.1f} s "
            f"| {row.peak:,.0f} MiB | {row.read:.2f} s |"
            for row in rows
        ),
        "",
    ]
    if len(rows) > 1:
        first, last = rows[-2:]  # in the smallest ones the start of the process counts most
        power = math.log(last.explain / first.explain) / math.log(last.records / first.records)
        lines += [f"Between the last two the time grows with the records to the power {power:.2f}.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--out", type=Path, help="where the runs are made, and removed again")
    parser.add_argument("--write", type=Path, help="a file for the table")
    given = parser.parse_args()
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for records in given.records:
        folder = Path(tempfile.mkdtemp(prefix="kvtrace-scale-", dir=given.out))
        try:
            rows.append(measure(folder / "run", records))
        finally:
            shutil.rmtree(folder)
        print(page(rows[-1:]).splitlines()[-1], flush=True)
    text = page(rows)
    print(text)
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
