"""One engine whose ranks are on two hosts: its two runs are put together on the clock of its scheduler."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from synth import Prompt, Rounding, Sim
from two_runs import SECOND, Moved

from kvtrace import ledger
from kvtrace.ledger.run import Run
from kvtrace.trace import format as fmt

Shell = Callable[..., tuple[int, str, str]]
OFF = 3600 * SECOND


def engine(folder: Path, other: Path, by: int, boot: str) -> Sim:
    """An engine of two ranks; the second one's spool is in `other`, on a clock that is `by` behind."""
    sim = Sim(folder, tp=2, layers=3, kv_blocks=64)
    header = {"kvtrace": "0.1.0", "pid": 100, "ppid": 1, "role": "worker", "host": "h2", "boot": boot,
              "perf_ns": SECOND, "wall_ns": 5 * SECOND}  # fmt: skip
    away = Moved(other, "worker-1-102-7", header)
    away.by = by
    away.data += sim.workers[1].data[len(_head(bytes(sim.workers[1].data))) :]
    away.names = sim.workers[1].names
    sim.workers[1] = away
    sim.serve([Prompt(f"r-{n}", n, n, output=2) for n in (100, 600, 900)], Rounding(256).policy())
    sim.write()
    return sim


def _head(data: bytes) -> bytes:
    _, _, length, _ = fmt.unpack_header_block(data[: fmt.RECORD_SIZE])
    return data[: fmt.RECORD_SIZE + length + (-length % fmt.RECORD_SIZE)]


def ledgers(run: Run) -> tuple[object, ...]:
    base = [one[1:] for one in run.base]
    return run.total, base, run.lost, dict(run.loads.accounts), [one.fired for one in run.hooks]


@pytest.mark.parametrize("by", [OFF, -OFF, 0])
def test_its_ledgers_are_those_of_one_host(tmp_path: Path, shell: Shell, by: int) -> None:
    engine(tmp_path / "whole", tmp_path / "whole", 0, "")
    engine(tmp_path / "a", tmp_path / "b", by, "boot-2")
    code, out, err = shell("merge", tmp_path / "b", tmp_path / "a", "-o", tmp_path / "m")
    assert (code, err) == (0, "") and "a, b hold parts of one engine and are joined-1" in " ".join(
        out.split()
    )
    together, whole = ledger.read_run(tmp_path / "m" / "joined-1"), ledger.read_run(tmp_path / "whole")
    assert [worker.rank for worker in together.workers()] == [0, 1]
    assert ledgers(together) == ledgers(whole)
    assert len({process.pid for process in together.processes}) == len(together.processes)
    for words in (("explain",), ("requests",), ("why", "--request", "r-600")):
        code, out, err = shell(words[0], tmp_path / "m" / "joined-1", *words[1:])
        assert (code, err) == (0, ""), words
    assert shell("explain", tmp_path / "m")[0] == 0


def test_nothing_is_copied_and_what_is_damaged_is_one_line(tmp_path: Path, shell: Shell) -> None:
    engine(tmp_path / "a", tmp_path / "b", OFF, "boot-2")
    shell("merge", tmp_path / "b", tmp_path / "a", "-o", tmp_path / "m")
    joined = tmp_path / "m" / "joined-1"
    assert all(path.is_symlink() for path in (joined / "spool").iterdir())
    clocks = json.loads((joined / "clocks.json").read_text())
    assert {one["ns"] > OFF // 2 for name, one in clocks["spools"].items() if "worker-1" in name} == {True}
    for text in ("{", "[]", '{"spools": {}}'):
        (joined / "clocks.json").write_text(text)
        code, out, err = shell("explain", joined)
        assert (code, out) == (2, "") and err.count("\n") == 1 and "merge the runs again" in err
    shutil.rmtree(tmp_path / "b")
    assert shell("why", tmp_path / "m", "--request", "r-600")[0] == 0


def test_of_runs_that_cannot_be_merged_nothing_is_left(tmp_path: Path, shell: Shell) -> None:
    engine(tmp_path / "a", tmp_path / "b", OFF, "boot-2")
    (tmp_path / "b" / "spool" / "worker-1-102-7.kvt").rename(tmp_path / "b" / "spool" / "worker-0-101-7.kvt")
    code, out, err = shell("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "m")
    assert (code, out) == (2, "") and "two spools of one name" in err and not (tmp_path / "m").exists()
