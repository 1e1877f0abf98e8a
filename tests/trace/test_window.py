"""Spools that are mapped: the recorder in C writes what the one in Python writes, and what a kill, a fork or
a full disk leaves of them is read as it was recorded."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace.live.tail import Tail
from kvtrace.trace import format as fmt
from kvtrace.trace.facts import Header
from kvtrace.trace.format import Flag, Kind, Stop
from kvtrace.trace.reader import Spool
from kvtrace.trace.rows import kind
from kvtrace.trace.writer import COMPILED, Recorder

pytestmark = pytest.mark.skipif(COMPILED is None, reason="the recorder in C was not built here")
HEADER = Header(pid=1, role="worker")
HOOK = fmt.pack_head(Kind.HOOK)
ROW = fmt.RECORD_SIZE


def numbered(n: int) -> tuple[int, ...]:
    return (HOOK, n, -n, n * n, 0, 0, 0, 0)


def mapped(path: Path, limit: int = 1 << 30) -> Recorder:
    made = Recorder(path, HEADER, limit)
    assert made.compiled
    return made


def read(path: Path) -> tuple[Spool, list[int]]:
    spool = Spool(path)
    parts = list(spool.chunks())
    rows = np.concatenate(parts) if parts else np.empty((0, 8), dtype=np.int64)
    again = [chunk for chunk in Spool(path).again(spool.info()) if len(chunk)]
    if again:
        table = np.concatenate(again)
        assert table[kind(table[:, 0]) == Kind.HOOK].tolist() == rows[kind(rows[:, 0]) == Kind.HOOK].tolist()
    return spool, rows[kind(rows[:, 0]) == Kind.HOOK][:, 1].tolist()


def start_of(path: Path) -> int:
    return Spool(path)._data_start


def behind(path: Path) -> bytes:
    """What stands behind the header, and the window that must be empty."""
    data, start = path.read_bytes(), start_of(path)
    window = fmt.window_of(data)
    assert not any(data[start : start + window])
    return data[start + window :]


def test_both_know_the_same_codes():
    assert (COMPILED.RECORD_SIZE, COMPILED.WINDOW, COMPILED.WINDOW_FULL) == (
        fmt.RECORD_SIZE, fmt.WINDOW, fmt.WINDOW_FULL,
    )  # fmt: skip
    for names in (Kind, Stop, Flag):
        for one in names:
            assert getattr(COMPILED, one.name, int(one)) == one
    assert COMPILED.SEAL == Kind.SEAL and COMPILED.SIZE_LIMIT == Stop.SIZE_LIMIT


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.one_of(
            st.integers(0, 300),
            st.integers(fmt.WINDOW - 10, fmt.WINDOW + 10),
            st.integers(2 * fmt.WINDOW, 3 * fmt.WINDOW),
            st.text(max_size=300),
        ),
        max_size=6,
    )
)
def test_both_write_the_same_bytes(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("same")
    for compiled in (False, True):
        recorder = Recorder(folder / f"{compiled}.kvt", HEADER, 1 << 30, compiled)
        for step in steps:
            if isinstance(step, str):
                recorder.name(step)
            else:
                for n in range(step):
                    recorder.add(numbered(n))
            recorder.flush()
        recorder.stop(Stop.CLEAN)
    python, c = behind(folder / "False.kvt"), behind(folder / "True.kvt")
    # The trailer holds the time, and its seal the checksum of that.
    assert python[: -2 * ROW] == c[: -2 * ROW] and len(python) == len(c)
    assert [python[-2 * ROW : -ROW][:8], python[-ROW:][:24]] == [c[-2 * ROW : -ROW][:8], c[-ROW:][:24]]


def test_the_checksums_are_zlibs(tmp_path):
    """The reader has them from zlib: of blocks of any length."""
    recorder = mapped(tmp_path / "a.kvt")
    total = 0
    for length in [*range(1, 40), 1000]:
        for _ in range(length):
            recorder.add(numbered(total))
            total += 1
        recorder.flush()
    recorder.stop(Stop.CLEAN)
    spool, seen = read(tmp_path / "a.kvt")
    assert seen == list(range(total)) and spool.info().end == "trailer" and not spool.info().left_out


@pytest.mark.parametrize("steps", [0, 1, 5, 700, 3000])
def test_what_stands_in_the_window_is_read(tmp_path, steps):
    recorder = mapped(tmp_path / "a.kvt")
    for step in range(steps):
        for n in range(7):
            recorder.add(numbered(7 * step + n))
        recorder.flush()
    for n in range(3):
        recorder.add(numbered(7 * steps + n))
    spool, seen = read(tmp_path / "a.kvt")
    info = spool.info()
    assert seen == list(range(7 * steps + 3))
    assert (info.end, info.open, info.left_out, info.whole) == ("open", 3, 0, True)
    assert info.size == (tmp_path / "a.kvt").stat().st_size


def windows(path: Path, steps: int) -> tuple[bytes, int]:
    """A spool with some blocks in its window and an open one of two records, and where the window begins."""
    recorder = mapped(path)
    for step in range(steps):
        for n in range(9):
            recorder.add(numbered(9 * step + n))
        recorder.flush()
    recorder.add(numbered(9 * steps))
    recorder.add(numbered(9 * steps + 1))
    recorder.abandon()
    return path.read_bytes(), start_of(path)


def test_damage_in_the_window_is_said(tmp_path):
    path = tmp_path / "a.kvt"
    raw, start = windows(path, 6)
    for at in range(start, start + 60 * ROW, 61):
        bad = bytearray(raw)
        bad[at] ^= 0x10
        path.write_bytes(bad)
        spool, seen = read(path)
        block = (at - start) // (10 * ROW)
        left_out = set(range(9 * block, 9 * block + 9)) if spool.info().open == 2 else set()
        assert set(seen) - {54, 55} == set(range(54)) - left_out
        damaged = spool.info().end == "damaged" and spool.info().left_out >= 1
        # Without its seal the last block is like an open one: it has no checksum, and that is said.
        assert damaged or (block == 5 and spool.info().open == 12), at


def test_a_write_that_was_cut_off_costs_nothing(tmp_path):
    """The window is cleared when its blocks stand in the file, and not before."""
    path = tmp_path / "a.kvt"
    raw, start = windows(path, 6)
    blocks = raw[start : start + 60 * ROW]
    for cut in range(0, len(blocks) + 1, 37):
        path.write_bytes(raw + blocks[:cut])
        spool, seen = read(path)
        assert seen == list(range(56)), cut
        assert (spool.info().end, spool.info().left_out) == ("open", 0), spool.info()


@settings(max_examples=60)
@given(data=st.data())
def test_any_truncation_is_a_valid_prefix_or_said(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "a.kvt"
    raw, start = windows(path, 500)
    whole = list(range(502 * 9))[: 9 * 500 + 2]
    cut = data.draw(st.integers(start, len(raw)))
    path.write_bytes(raw[:cut])
    spool, seen = read(path)
    assert seen == whole[: len(seen)] or spool.info().end in ("cut", "damaged")
    assert seen == whole or spool.info().end != "trailer"


def test_a_reader_beside_it_gets_each_block_once(tmp_path):
    recorder = mapped(tmp_path / "a.kvt")
    tail, seen = Tail(tmp_path / "a.kvt"), []
    total = 0
    for step in range(300):
        for _ in range(50):
            recorder.add(numbered(total))
            total += 1
        recorder.flush()
        recorder.add(numbered(total))  # of the step that is open when it is read
        total += 1
        if step % 7 == 0:
            seen += [n for table in tail.grown() for n in table[:, 1].tolist()]
            assert seen == list(range(len(seen))) and len(seen) >= total - 1
    assert recorder._store.blocks == 300 + total // fmt.WINDOW


def test_an_unannounced_fork_leaves_the_parents_pages_alone(tmp_path):
    code = f"""
        import ctypes, os
        from kvtrace.trace.writer import Recorder
        from pathlib import Path
        recorder = Recorder(Path({str(tmp_path / "a.kvt")!r}), {HEADER!r}, 1 << 30)
        recorder.use()
        recorder.add({numbered(1)})
        pid = ctypes.PyDLL(None).fork()
        if pid == 0:
            recorder.add({numbered(2)})
            recorder.flush()
            os._exit(0 if recorder._store.lost == 1 and not recorder.alive else 1)
        assert os.waitpid(pid, 0)[1] == 0
        recorder.add({numbered(3)})
        recorder.stop(1)
    """
    code = textwrap.dedent(code).replace("Header(", "__import__('kvtrace.trace.facts').trace.facts.Header(")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert read(tmp_path / "a.kvt")[1] == [1, 3]


def test_where_no_space_is_to_be_had_the_python_one_writes(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        recorder = Recorder(tmp_path / "a.kvt", HEADER, 1 << 30)
        recorder.add(numbered(5))
        recorder.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not recorder.compiled and read(tmp_path / "a.kvt")[1] == [5]


def test_a_file_system_that_promises_nothing_is_refused():
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="not supported"):
        COMPILED.Store(writing, "x", 64, 0, 1, 1)
    os.close(reading)
    os.close(writing)


def test_a_descriptor_that_was_closed_is_opened_anew(tmp_path):
    path = tmp_path / "a.kvt"
    recorder = mapped(path)
    os.close(recorder._store.descriptor)
    other = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
    recorder.path = path.rename(tmp_path / "b.kvt")
    for n in range(3 * fmt.WINDOW):
        recorder.add(numbered(n))
    recorder.stop(Stop.CLEAN)
    os.write(other, b"still open")
    os.close(other)
    assert read(tmp_path / "b.kvt")[1] == list(range(3 * fmt.WINDOW))
    assert (tmp_path / "mine").read_text() == "still open"


def test_words_of_any_kind_are_words(tmp_path):
    recorder = mapped(tmp_path / "a.kvt")
    recorder.add((HOOK, np.int64(7), True, 2.9, 1 << 70, -(1 << 70), Kind.OP, 0))
    for bad in (("x",) * 8, None, 5):
        with pytest.raises((TypeError, ValueError)):
            recorder.add(bad)  # type: ignore[arg-type]
    recorder.stop(Stop.CLEAN)
    table = np.concatenate(list(Spool(tmp_path / "a.kvt").chunks()))
    assert table[0].tolist() == [HOOK, 7, 1, 2, (1 << 63) - 1, -(1 << 63), Kind.OP, 0]


# --------------------------------------------------------------- steps of which sums are kept


def step_of(recorder: Recorder, number: int, odd: tuple[int, ...] | None = None) -> object:
    recorder.gather()
    for layer in range(4):
        recorder.add((HOOK | 5 << 16 | 1 << 24, 100, 150 + layer, number, layer, 0, 0, 0))
        recorder.add((fmt.pack_head(Kind.OP, 2, 1), 200, 210, number, layer, 8, 0, 0))
    if odd is not None:
        recorder.add(odd)
    recorder.add((fmt.pack_head(Kind.EXEC, 2), 90, 300, number, 8, 8, 0, 0))
    return recorder.settle()


@pytest.mark.parametrize(
    "odd",
    [
        None,
        (HOOK | 4 << 16, 1, 2, 3, 1, 5, 0, 0),
        (HOOK | int(Flag.RAISED) << 32, 1, 2, 3, 1, 0, 0, 0),
        (fmt.pack_head(Kind.FINISH), 1, 2, 3, 4, 5, 6, 7),
        (fmt.pack_head(Kind.EXEC, 2), 1, 2, 3, 4, 5, 6, 7),
    ],
)
def test_both_sum_up_the_same_steps_to_the_same_sums(tmp_path, odd):
    found = []
    for compiled in (False, True):
        recorder = Recorder(tmp_path / f"{compiled}.kvt", HEADER, 1 << 30, compiled)
        recorder.add((fmt.pack_head(Kind.STEP), 1, 2, 3, 4, 5, 6, 7))  # of the scheduler, before it
        calls = step_of(recorder, 7, odd)
        recorder.stop(Stop.CLEAN)
        rows = np.concatenate(list(Spool(tmp_path / f"{compiled}.kvt").chunks()))
        found.append((calls, rows[kind(rows[:, 0]) != Kind.TRAILER].tolist()))
    assert found[0] == found[1]
    calls, rows = found[0]
    if odd is None:
        assert [(one.kind, one.number, one.total_ns, one.least_ns, one.most_ns) for one in calls] == [
            (Kind.HOOK, 4, 206, 50, 53), (Kind.OP, 4, 40, 10, 10),
        ]  # fmt: skip
        assert np.frombuffer(calls[0].layers, "<i8").tolist() == [0, 1, 2, 3] and len(rows) == 2
    else:
        assert calls is None and len(rows) == 11


def test_a_step_that_was_sealed_in_the_middle_stays_as_it_is(tmp_path):
    recorder = mapped(tmp_path / "a.kvt")
    recorder.gather()
    recorder.add(numbered(0))
    recorder.flush()
    recorder.add(numbered(1))
    assert recorder.settle() is None
    recorder.stop(Stop.CLEAN)
    assert read(tmp_path / "a.kvt")[1] == [0, 1]
