"""No change to an input changes a number without a word: damage, copies, cuts, what is missing."""

from __future__ import annotations

import json
import os
import random
import resource
import runpy
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from synth import SpoolFile

from kvtrace.errors import KvtraceError
from kvtrace.report.build import build_report
from kvtrace.trace import format as fmt
from kvtrace.trace.reader import spool_paths

FUZZ = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "fuzz_inputs.py"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    FUZZ["small_run"](tmp_path / "run")
    return tmp_path / "run"


def numbers(run: Path) -> tuple[Any, Any]:
    """The ledgers, and what is said of the recording."""
    report: Any = build_report(run)
    return report["ledger"], [*report["limits"]["notes"], *report["limits"]["damaged"]]


def test_a_copied_spool_is_left_out_with_a_word(run: Path) -> None:
    ledger, said = numbers(run)
    assert said == []
    for path in spool_paths(run):
        shutil.copy(path, path.with_name(f"a-copy-of-{path.name}"))
    again, said = numbers(run)
    assert again == ledger and len(said) == 2
    assert all(" is a copy of " in line for line in said)


def test_of_two_spools_of_a_process_the_longer_is_read(run: Path) -> None:
    """A copy that was made while the run went on."""
    ledger, _ = numbers(run)
    for path in spool_paths(run):
        path.with_name("0.kvt").write_bytes(path.read_bytes()[:-1000])
    again, said = numbers(run)
    assert again == ledger and any("0.kvt is a copy of" in line for line in said)


def test_a_cut_at_the_end_of_a_block_is_not_a_run_that_goes_on(run: Path) -> None:
    """run.json holds how long each spool was when the run had ended."""
    worker = next(path for path in spool_paths(run) if "worker" in path.name)
    data = worker.read_bytes()
    length = fmt.unpack_header_block(data)[2]
    head = fmt.RECORD_SIZE + length + (-length % fmt.RECORD_SIZE)
    block = 10 * fmt.RECORD_SIZE
    worker.write_bytes(data[: head + (len(data) - head) // block // 2 * block])
    _, said = numbers(run)
    (one,) = [one for one in said if isinstance(one, dict)]
    assert one["spool"] == f"spool/{worker.name}"
    assert "bytes shorter than when the run had ended" in one["detail"]
    value = json.loads((run / "run.json").read_text())
    value.update(ended_wall_ns=None, exit_code=None, spools={})
    (run / "run.json").write_text(json.dumps(FUZZ["summed"](value)))
    _, said = numbers(run)
    assert len(said) == 1 and "still goes on" in said[0]


def test_a_spool_that_is_missing_is_said(run: Path) -> None:
    worker = next(path for path in spool_paths(run) if "worker" in path.name)
    worker.unlink()
    assert f"the recording is incomplete: {worker.name}: its spool is missing" in numbers(run)[1]


@pytest.mark.parametrize(("name", "key"), [("run.json", "wall_ns"), ("rest.json", "files")])
def test_a_changed_json_file_is_left_out(run: Path, name: str, key: str) -> None:
    text = (run / name).read_text()
    assert '"crc32"' in text and key in text
    (run / name).write_text(text.replace(key, "changed", 1))
    assert any(f"{name} " in line and "left out" in line for line in numbers(run)[1])


def test_records_of_a_damaged_block_count_as_lost(run: Path) -> None:
    worker = next(path for path in spool_paths(run) if "worker" in path.name)
    data = bytearray(worker.read_bytes())
    data[len(data) // 2] ^= 1
    worker.write_bytes(data)
    report: Any = build_report(run)
    assert report["limits"]["lost_records"] > 0
    (one,) = report["limits"]["damaged"]
    assert "do not match their checksum" in one["detail"]


@pytest.mark.parametrize("name", ["run.json", "rest.json", "spool"])
@pytest.mark.parametrize("what", ["fifo", "zeros", "loop", "directory"])
def test_what_is_no_file_is_said_and_not_waited_for(run: Path, name: str, what: str) -> None:
    path = spool_paths(run)[-1] if name == "spool" else run / name
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if what == "zeros" else path)
    assert any(path.name in str(line) for line in numbers(run)[1])


def test_damaged_inputs_change_no_number_without_a_word() -> None:
    """The same cases in every run; scripts/fuzz_inputs.py has as many as one likes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert list(FUZZ["failures"](2000, 1, 50)) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024, "KiB"


def test_facts_of_wrong_types_are_never_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid by their checksums, as a connector's odd settings may make them."""
    odd: list[Any] = [None, [], {}, {"a": 1}, "x", -1, 0, 2**70, -(2**70), 1.5, True, [[]], [None], ["a"]]
    plain = SpoolFile.fact
    rng = random.Random(5)

    def changed(value: dict[str, Any]) -> dict[str, Any]:
        if not value or rng.random() < 0.75:
            return value
        key = rng.choice(sorted(value))
        inner = value[key]
        return {**value, key: changed(inner) if isinstance(inner, dict) else rng.choice(odd)}

    def fact(self: SpoolFile, kind: Any, value: dict[str, Any], t: int = 0) -> None:
        plain(self, kind, changed(value), t)

    monkeypatch.setattr(SpoolFile, "fact", fact)
    for number in range(25):
        run = tmp_path / str(number)
        FUZZ["small_run"](run)
        with suppress(KvtraceError):
            build_report(run)
