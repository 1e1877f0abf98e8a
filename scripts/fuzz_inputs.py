#!/usr/bin/env python3
"""Damage the inputs of a run in every way that is cheap to think of, and see what kvtrace makes of them.

    python scripts/fuzz_inputs.py [--count 100000] [--seed 0]

Each case takes a small run, changes one of its files, and reads it again. It fails where a number changes
without a word, or where anything but kvtrace's own one-line error is raised. Most cases change a spool and
compare what is read of it; every 50th makes the whole report.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ledger")]

from synth import Prompt, Rounding, Sim, run_json  # noqa: E402

from kvtrace.errors import KvtraceError  # noqa: E402
from kvtrace.launch.rest import write_rest  # noqa: E402
from kvtrace.report.build import build_report  # noqa: E402
from kvtrace.trace import format as fmt  # noqa: E402
from kvtrace.trace.reader import Spool, SpoolError, spool_paths  # noqa: E402
from kvtrace.trace.sums import summed  # noqa: E402

WHOLE_REPORT_EVERY = 50
NUMBERS = ("ledger", "stages", "coverage", "requests", "findings")
Mutation = Callable[[random.Random, bytearray], bytearray]


# ------------------------------------------------------------------------------- the run


def small_run(folder: Path) -> None:
    """A run of two processes with checksums, sizes and a look at what came to rest."""
    sim = Sim(folder, layers=1)
    sim.serve([Prompt("a", 64, digest=1), Prompt("b", 96, digest=2, output=3)], Rounding(32).policy())
    sim.write()
    for path in spool_paths(folder):
        path.write_bytes(in_blocks(path.read_bytes(), 9))
    run_json(folder)
    value = json.loads((folder / "run.json").read_text())
    value["spools"] = {path.name: path.stat().st_size for path in spool_paths(folder)}
    (folder / "run.json").write_text(json.dumps(summed(value), indent=1))
    assert write_rest(folder)


def in_blocks(data: bytes, records: int) -> bytes:
    """The spool with so many records a block, with the time of its start."""
    length = fmt.unpack_header_block(data)[2]
    at = fmt.RECORD_SIZE + length + (-length % fmt.RECORD_SIZE)
    header = json.loads(data[fmt.RECORD_SIZE : fmt.RECORD_SIZE + length])
    head = fmt.pack_header({**header, "host": "h", "wall_ns": 1, "perf_ns": header["pid"]})
    seed = fmt.unpack_header_block(head)[3]
    rows = [data[i : i + fmt.RECORD_SIZE] for i in range(at, len(data), fmt.RECORD_SIZE)]
    rows = [row for row in rows if row[0] != fmt.Kind.SEAL]
    blocks = [b"".join(rows[i : i + records]) for i in range(0, len(rows), records)]
    return head + b"".join(block + fmt.seal(block, n, seed) for n, block in enumerate(blocks))


# ------------------------------------------------------------------------------ mutations


def flip(rng: random.Random, data: bytearray) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def noise(rng: random.Random, data: bytearray) -> bytearray:
    at = rng.randrange(len(data))
    part = rng.randbytes(rng.randint(1, 200))
    data[at : at + len(part)] = part
    return data


def word(rng: random.Random, data: bytearray) -> bytearray:
    """One column of one record: small, large, negative."""
    at = rng.randrange(len(data) // 8) * 8
    value = rng.choice([0, 1, -1, 2**31, 2**62, -(2**63), 2**63 - 1, rng.getrandbits(62)])
    data[at : at + 8] = value.to_bytes(8, "little", signed=True)
    return data


def cut(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data))]


def cut_records(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data) // 64 + 1) * 64]


def drop(rng: random.Random, data: bytearray) -> bytearray:
    at, size = rng.randrange(len(data) // 64) * 64, rng.choice([64, 640, rng.randint(1, 999)])
    del data[at : at + size]
    return data


def insert(rng: random.Random, data: bytearray) -> bytearray:
    at, begin = rng.randrange(len(data) // 64) * 64, rng.randrange(len(data))
    data[at:at] = data[begin : begin + rng.choice([64, 640, rng.randint(1, 999)])]
    return data


def swap(rng: random.Random, data: bytearray) -> bytearray:
    one, two = (rng.randrange(len(data) // 64) * 64 for _ in range(2))
    data[one : one + 64], data[two : two + 64] = data[two : two + 64], data[one : one + 64]
    return data


def zeros(rng: random.Random, data: bytearray) -> bytearray:
    at, size = rng.randrange(len(data)), rng.randint(1, 2000)
    data[at : at + size] = bytes(len(data[at : at + size]))
    return data


MUTATIONS: tuple[Mutation, ...] = (flip, noise, word, cut, cut_records, drop, insert, swap, zeros)


# --------------------------------------------------------------------------------- cases


def read(path: Path) -> tuple[list[Any], str]:
    """All that a spool gives, and what is said of damage in it; ([], why) where it is refused."""
    try:
        spool = Spool(path)
        rows = [row for chunk in spool.chunks() for row in chunk.tolist()]
    except SpoolError as error:
        return [], one_line(str(error))
    info = spool.info()
    said = info.detail if info.end in ("cut", "damaged") else ""
    return [spool.header, spool.names, spool.facts, rows], said


def one_line(text: str) -> str:
    assert text and "\n" not in text, repr(text)
    return text


Good = dict[str, tuple[bytes, list[Any]]]
"""Name of a spool -> its bytes, and what is read of them."""


def spool_case(rng: random.Random, at: Path, good: Good) -> str | None:
    """A changed spool, read: what is wrong, or None."""
    name = rng.choice(sorted(good))
    mutation = rng.choice(MUTATIONS)
    data, whole = good[name]
    changed = mutation(rng, bytearray(data))
    path = at / name
    path.write_bytes(changed)
    found, said = read(path)
    if found == whole or said:
        return None
    shorter = len(changed) < len(data)  # run.json knows how long it was
    return None if shorter else f"{mutation.__name__} of {name}: other records, and nothing is said"


def report_case(rng: random.Random, folder: Path, at: Path, whole: dict[str, Any]) -> str | None:
    """A changed run directory, as a report: what is wrong, or None."""
    run = at / "run"
    shutil.copytree(folder, run)
    try:
        what = change(rng, run)
        try:
            report = dict(build_report(run))
        except KvtraceError as error:
            one_line(str(error))
            return None
    finally:
        shutil.rmtree(run)
    same = all(report[part] == whole[part] for part in NUMBERS)
    limits: Any = report["limits"]
    before = whole["limits"]
    words = limits["damaged"] or limits["lost_records"] or limits["notes"] != before["notes"]
    return None if same or words else f"{what}: other numbers, and nothing is said"


def change(rng: random.Random, run: Path) -> str:
    """One change to a file of the run; what it was."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    path = rng.choice(files)
    spool = path.suffix == fmt.SPOOL_SUFFIX
    kind = rng.randrange(8)
    if kind == 0 and spool:
        shutil.copy(path, path.with_name("another.kvt"))
        return f"a copy of {path.name}"
    if kind == 1:
        path.unlink()
        return f"{path.name} is missing"
    if kind == 2:
        path.unlink()
        os.mkfifo(path)
        return f"{path.name} is a FIFO"
    if kind == 3:
        path.unlink()
        path.symlink_to(rng.choice([path, Path("/dev/zero"), run]))
        return f"{path.name} is a link"
    mutation = rng.choice(MUTATIONS)
    path.write_bytes(mutation(rng, bytearray(path.read_bytes())))
    return f"{mutation.__name__} of {path.name}"


def failures(count: int, seed: int, reports: int) -> Iterator[str]:
    """What went wrong in so many cases; every `reports`-th makes a whole report."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, at = Path(scratch) / "good", Path(scratch) / "work"
        at.mkdir()
        small_run(folder)
        whole: dict[str, Any] = dict(build_report(folder))
        good = {path.name: (path.read_bytes(), read(path)[0]) for path in spool_paths(folder)}
        for number in range(count):
            rng = random.Random(f"{seed}:{number}")
            try:
                if number % reports:
                    wrong = spool_case(rng, at, good)
                else:
                    wrong = report_case(rng, folder, at, whole)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                yield f"seed {seed} case {number}: {wrong}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--reports", type=int, default=WHOLE_REPORT_EVERY, help="every N-th is a whole report"
    )
    args = parser.parse_args()
    bad = 0
    for wrong in failures(args.count, args.seed, args.reports):
        bad += 1
        print(wrong, flush=True)
    print(f"{args.count} cases, {bad} failed")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
