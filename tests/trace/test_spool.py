"""The spool: what is written is read back, and no damage raises anything but SpoolError. All of it with the
recorder in Python and with the one in C."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace.trace import format as fmt
from kvtrace.trace import rows as row_parts
from kvtrace.trace.blocks import Blocks
from kvtrace.trace.facts import EngineArgsFact, Header
from kvtrace.trace.format import Kind, Stop
from kvtrace.trace.reader import Spool, SpoolError
from kvtrace.trace.rows import kind
from kvtrace.trace.writer import COMPILED, Recorder

HEADER = Header(pid=1, role="worker")
word = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = (Kind.NAME, Kind.BYTES, Kind.FACT)
fixed_kind = st.sampled_from([k for k in Kind if k not in (*TEXTS, Kind.END, Kind.SEAL)])
record = st.tuples(
    fixed_kind.filter(lambda k: k != Kind.TRAILER), st.lists(word, min_size=7, max_size=7)
).map(lambda pair: [fmt.pack_head(pair[0], 2, 5, 1, 3, 4), *pair[1]])
text = st.text(max_size=200)
json_object = st.dictionaries(text, st.one_of(st.integers(), text, st.booleans()), max_size=4)
item = st.one_of(
    record.map(lambda words: ("record", words)),
    text.map(lambda value: ("name", value)),
    json_object.map(lambda value: ("fact", value)),
)


class Which:
    """The recorder of the test that runs."""

    compiled = False


@pytest.fixture(scope="module", params=["python", "c"], autouse=True)
def _which(request: pytest.FixtureRequest) -> None:
    if request.param == "c" and COMPILED is None:
        pytest.skip("the recorder in C was not built here")
    Which.compiled = request.param == "c"


def make(path: Path, header: Header, limit: int) -> Recorder:
    made = Recorder(path, header, limit, Which.compiled)
    assert made.compiled == Which.compiled, "this file system keeps no space that was taken"
    return made


def write(path: Path, items: list[tuple[str, object]], close: bool = False) -> None:
    path.unlink(missing_ok=True)
    recorder = make(path, HEADER, 1 << 30)
    for what, value in items:
        if what == "record":
            recorder.add(value)  # type: ignore[arg-type]
        elif what == "name":
            recorder.name(value)  # type: ignore[arg-type]
        else:
            recorder.fact(EngineArgsFact(value))  # type: ignore[arg-type]
    if close:
        recorder.stop(Stop.CLEAN)
    else:
        recorder.flush()
        recorder.abandon()


def read(path: Path, chunk: int = 7) -> tuple[Spool, np.ndarray]:
    spool = Spool(path)
    parts = list(spool.chunks(chunk))
    return spool, np.concatenate(parts) if parts else np.empty((0, 8), dtype=np.int64)


@settings(max_examples=60)
@given(items=st.lists(item, max_size=30), chunk=st.integers(1, 40), close=st.booleans())
def test_what_is_written_is_read_back(tmp_path_factory, items, chunk, close):
    path = tmp_path_factory.mktemp("spool") / "a.kvt"
    write(path, items, close)
    spool, rows = read(path, chunk)
    expected = [value for what, value in items if what == "record"]
    data = rows[kind(rows[:, 0]) != Kind.TRAILER]
    assert data.tolist() == expected
    assert [value for _, _, value in spool.facts] == [
        {"given": value} for what, value in items if what == "fact"
    ]
    assert set(spool.names.values()) == {
        value.encode("utf-8", "replace").decode("utf-8", "replace") for what, value in items if what == "name"
    }
    assert spool.info().end == ("trailer" if close else "open")


@settings(max_examples=80)
@given(items=st.lists(item, min_size=1, max_size=20), data=st.data())
def test_any_truncation_point_yields_a_valid_prefix(tmp_path_factory, items, data):
    path = tmp_path_factory.mktemp("spool") / "a.kvt"
    write(path, items, close=True)
    spool, whole = read(path)
    head = spool._data_start
    raw = path.read_bytes()
    cut = data.draw(st.integers(0, len(raw)))
    path.write_bytes(raw[:cut])
    if cut < head:
        # Of a cut header only the padding may be missing.
        try:
            assert not len(read(path)[1])
        except SpoolError as error:
            assert "\n" not in str(error)
        return
    spool, rows = read(path)
    assert rows.tolist() == whole[: len(rows)].tolist()
    assert spool.info().end in ("open", "cut", "trailer")
    # A tail of zeros (preallocated, or a hole after a crash) is no record.
    path.write_bytes(raw[: cut - cut % 64] + bytes(256))
    assert read(path)[1].tolist() == whole[: len(read(path)[1])].tolist()


@settings(max_examples=150)
@given(items=st.lists(item, min_size=1, max_size=12), data=st.data())
def test_corrupted_bytes_raise_only_the_readers_own_error(tmp_path_factory, items, data):
    path = tmp_path_factory.mktemp("spool") / "a.kvt"
    write(path, items)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        spool, _ = read(path, data.draw(st.integers(1, 20)))
    except SpoolError as error:
        assert "\n" not in str(error)
        return
    assert spool.info().end in ("open", "cut", "trailer", "damaged")


@given(blob=st.binary(max_size=400))
@settings(max_examples=60)
def test_a_foreign_file_is_refused(tmp_path_factory, blob):
    path = tmp_path_factory.mktemp("spool") / "a.kvt"
    path.write_bytes(blob)
    with pytest.raises(SpoolError, match=r"a\.kvt"):
        Spool(path)


def test_an_existing_file_is_never_overwritten(tmp_path):
    path = tmp_path / "a.kvt"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        make(path, HEADER, 1 << 20)
    assert path.read_text() == "mine"


def test_words_out_of_range_are_clamped_not_raised(tmp_path):
    recorder = make(tmp_path / "a.kvt", HEADER, 1 << 20)
    recorder.add((fmt.pack_head(Kind.HOOK), 1 << 70, -(1 << 70), True, 0, 0, 0, 0))
    recorder.flush()
    _, rows = read(tmp_path / "a.kvt")
    assert rows[0].tolist()[1:4] == [(1 << 63) - 1, -(1 << 63), 1]


def test_names_forgotten_come_back_under_a_new_id(tmp_path):
    recorder = make(tmp_path / "a.kvt", HEADER, 1 << 20)
    first = recorder.name("req-1")
    assert recorder.name("req-1") == first
    recorder.forget_name("req-1")
    second = recorder.name("req-1")
    recorder.flush()
    spool, _ = read(tmp_path / "a.kvt")
    assert first != second
    assert spool.names[first] == spool.names[second] == "req-1"


def test_threads_do_not_tear_each_others_records(tmp_path):
    recorder = make(tmp_path / "a.kvt", HEADER, 1 << 30)

    def work(index: int) -> None:
        for n in range(300):
            recorder.add((fmt.pack_head(Kind.HOOK, thread=index), n, n, n, n, n, n, n))
            recorder.name(f"name {index} {n}")
            if n % 7 == 0:
                recorder.flush()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.flush()
    spool, rows = read(tmp_path / "a.kvt", 64)
    assert spool.info().end == "open"
    assert len(rows) == 1200
    assert (rows[:, 1] == rows[:, 7]).all()
    assert len(spool.names) == 1200


def test_a_failing_write_stops_the_recording_and_is_not_raised(tmp_path):
    code = textwrap.dedent(
        f"""
        import resource, signal
        from pathlib import Path
        from kvtrace.trace import format as fmt
        from kvtrace.trace.facts import Header
        from kvtrace.trace.writer import Recorder
        recorder = Recorder(Path({str(tmp_path / "a.kvt")!r}), {HEADER!r}, 1 << 30, {Which.compiled})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        most = recorder._store.size + 7000
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        for n in range(9000):
            recorder.add((fmt.pack_head(fmt.Kind.HOOK), n, n, n, n, n, n, n))
            recorder.flush()
        assert not recorder.alive and recorder._store.lost > 900, recorder._store.lost
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    spool, rows = read(tmp_path / "a.kvt")
    fixed = rows[kind(rows[:, 0]) == Kind.HOOK]
    assert 50 <= len(fixed) <= (fmt.WINDOW // 2 if Which.compiled else 62)
    assert fixed[:, 1].tolist() == list(range(len(fixed)))
    assert spool.info().end in ("trailer", "trailer" if Which.compiled else "cut")
    if Which.compiled:  # room for its last words was kept back
        assert spool.info().stop == Stop.WRITE_FAILED and (tmp_path / "a.kvt").stat().st_size < 1 << 19


def test_past_the_size_limit_it_says_full_and_past_twice_stops(tmp_path):
    recorder = make(tmp_path / "a.kvt", HEADER, 64 * 100)
    recorder._store.limit, recorder._store.ceiling = recorder._store.size + 6400, recorder._store.size + 12800
    for n in range(400):
        recorder.add((fmt.pack_head(Kind.HOOK), n, n, n, n, n, n, n))
        recorder.flush()
        if n == 60:
            assert recorder.full and recorder.alive
    spool, _ = read(tmp_path / "a.kvt")
    assert spool.info().end == "trailer"
    assert spool.info().stop == Stop.SIZE_LIMIT


@pytest.mark.parametrize("steps", [3, 100, 1000])
def test_what_was_recorded_survives_sigkill(tmp_path, steps):
    """Of the recorder in Python, what was flushed."""
    path = tmp_path / "a.kvt"
    code = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from kvtrace.trace import format as fmt
        from kvtrace.trace.facts import Header
        from kvtrace.trace.writer import Recorder
        recorder = Recorder(Path({str(path)!r}), {HEADER!r}, 1 << 30, {Which.compiled})
        for n in range(1, 10 * {steps} + 1):
            recorder.add((fmt.pack_head(fmt.Kind.HOOK), n, n, n, n, n, n, n))
            if n % 10 == 0:
                recorder.flush()
        for n in range(7):
            recorder.add((fmt.pack_head(fmt.Kind.HOOK), -n, 0, 0, 0, 0, 0, 0))  # the open step
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    spool, rows = read(path)
    expected = [*range(1, 10 * steps + 1), *(-n for n in range(7) if Which.compiled)]
    assert rows[:, 1].tolist() == expected
    assert spool.info().end == "open" and spool.info().open == (7 if Which.compiled else 0)
    again = np.concatenate(list(Spool(path).again(spool.info())))
    assert again[kind(again[:, 0]) == Kind.HOOK][:, 1].tolist() == expected


def test_after_fork_the_child_leaves_the_parents_file_alone(tmp_path):
    path = tmp_path / "a.kvt"
    recorder = make(path, HEADER, 1 << 30)
    recorder.add((fmt.pack_head(Kind.HOOK), 1, 1, 1, 1, 1, 1, 1))
    pid = os.fork()
    if pid == 0:
        recorder.abandon()
        recorder.add((fmt.pack_head(Kind.HOOK), 2, 2, 2, 2, 2, 2, 2))
        recorder.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    recorder.flush()
    _, rows = read(path)
    assert rows[:, 1].tolist() == [1]


def test_memory_while_reading_is_bounded_by_the_chunk(tmp_path):
    path = tmp_path / "big.kvt"
    recorder = make(path, HEADER, 1 << 30)
    block = [fmt.pack_head(Kind.HOOK), 1, 2, 3, 4, 5, 6, 7] * 4096
    for _ in range(200):
        recorder.add(block)
        recorder.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(len(chunk) for chunk in Spool(path).chunks())
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert total == 200 * 4096
    assert after - before < 40 * 1024, "KiB; the file has 52 MB"


def test_the_head_word_keeps_its_parts_apart():
    head = fmt.pack_head(Kind.HOOK, 2, 5, 129, 0xFFFF, 77)
    names = ("kind", "role", "code", "detail", "flags", "thread")
    parts = [int(getattr(row_parts, name)(np.array([head]))[0]) for name in names]
    assert parts == [Kind.HOOK, 2, 5, 129, 0xFFFF, 77]
    assert head > 0


def test_the_header_is_json_that_survives_odd_values(tmp_path):
    header = Header(argv=("é", "\n"), host=Path("/x"))  # type: ignore[arg-type]
    make(tmp_path / "a.kvt", header, 1 << 20).stop(Stop.CLEAN)
    assert Spool(tmp_path / "a.kvt").header == {**header.to_json(), "argv": ["é", "\n"], "host": "/x"}


# ------------------------------------------------------------------------------- damage


def blocks_of(path: Path, blocks: int = 6, records: int = 5) -> tuple[bytes, int]:
    """A spool of so many blocks, and where the first one begins."""
    recorder = Recorder(path, HEADER, 1 << 30, compiled=False)
    start = recorder._store.size
    for block in range(blocks):
        for n in range(records):
            recorder.add((fmt.pack_head(Kind.HOOK), block, n, 0, 0, 0, 0, 0))
        recorder.flush()
    recorder.abandon()
    return path.read_bytes(), start


@pytest.mark.parametrize("chunk", [3, 7, 65536])
def test_a_damaged_block_is_counted_and_the_others_are_read(tmp_path, chunk):
    path = tmp_path / "a.kvt"
    raw, start = blocks_of(path)
    size = 6 * 64  # five records and their seal
    for at in range(start, len(raw), 61):
        bad = bytearray(raw)
        bad[at] ^= 0x10
        path.write_bytes(bad)
        spool, rows = read(path, chunk)
        block = (at - start) // size
        assert set(rows[:, 1].tolist()) == set(range(6)) - {block}
        last = block == 5
        assert spool.info().end == ("cut" if last else "damaged")
        assert spool.info().left_out == 6 and "left out" in spool.info().detail


def test_blocks_missing_twice_or_of_another_spool_are_said(tmp_path):
    path, other = tmp_path / "a.kvt", tmp_path / "b.kvt"
    raw, start = blocks_of(path)
    size = 6 * 64
    parts = [raw[at : at + size] for at in range(start, len(raw), size)]
    foreign = Recorder(other, Header(pid=2), 1 << 30, compiled=False)
    before = foreign._store.size
    foreign.add((fmt.pack_head(Kind.HOOK), 99, 0, 0, 0, 0, 0, 0))
    foreign.flush()
    strange = other.read_bytes()[before:]

    def after(*blocks: bytes) -> tuple[list[int], str, str]:
        path.write_bytes(raw[:start] + b"".join(blocks))
        spool, rows = read(path)
        return sorted(set(rows[:, 1].tolist())), spool.info().end, spool.info().detail

    whole = list(range(6))
    assert after(*parts) == (whole, "open", "")
    assert after(*parts[:2], *parts[3:]) == ([0, 1, 3, 4, 5], "damaged", "1 block missing")
    said = after(*parts[:3], parts[1], *parts[3:])
    assert said == (whole, "damaged", "1 block left out that were there twice")
    said = after(*parts[:3], strange, *parts[3:])
    assert said[:2] == (whole, "damaged") and "2 records left out" in said[2]
    said = after(*parts[:3], b"x" * 64, *parts[3:])
    assert said[:2] == (whole, "damaged") and "1 record left out" in said[2]
    assert after(*parts, parts[5][:200])[:2] == (whole, "cut")


def test_a_file_of_seals_takes_no_time(tmp_path):
    """What a seal claims is hashed; a file that claims a lot many times is given up."""
    path = tmp_path / "a.kvt"
    raw, start = blocks_of(path, 1)
    seals = ((fmt.pack_head(Kind.SEAL), n, n, 5, 0, 0, 0, 0) for n in range(40_000))
    fake = b"".join(struct.pack("<8q", *words) for words in seals)
    path.write_bytes(raw + fake)
    with path.open("rb") as file:
        file.seek(start)
        found = Blocks(file, 0)
        assert not list(found.tables(65536))
        assert found._hashed < 6 * len(fake) + (1 << 27)


def test_a_block_is_never_longer_than_the_reader_keeps(tmp_path):
    recorder = make(tmp_path / "a.kvt", HEADER, 1 << 30)
    for n in range(3):
        recorder.add([fmt.pack_head(Kind.HOOK), n, 0, 0, 0, 0, 0, 0] * fmt.MOST_BLOCK)
    recorder.flush()
    assert recorder._store.blocks == -(-3 * fmt.MOST_BLOCK // (fmt.WINDOW - 3))
    spool, rows = read(tmp_path / "a.kvt", 100)
    assert len(rows) == 3 * fmt.MOST_BLOCK and spool.info().end == "open"


def test_a_spool_of_another_version_is_not_read(tmp_path):
    raw = bytearray(blocks_of(tmp_path / "b.kvt")[0])
    for version, said in ((1, "spool format 1"), (9, "spool format 9"), (2, "damaged header")):
        raw[8] = version
        (tmp_path / "b.kvt").write_bytes(raw)
        with pytest.raises(SpoolError, match=said):
            Spool(tmp_path / "b.kvt")


@pytest.mark.parametrize("what", ["fifo", "device", "directory", "loop", "socket"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, what):
    path = tmp_path / "a.kvt"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "directory":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    else:
        socket.socket(socket.AF_UNIX).bind(str(path))
    with pytest.raises(SpoolError, match="cannot be read") as caught:
        Spool(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=80)
@given(items=st.lists(item, max_size=30), data=st.data(), chunk=st.integers(1, 40))
def test_the_second_reading_is_the_first(tmp_path_factory, items, data, chunk):
    path = tmp_path_factory.mktemp("spool") / "a.kvt"
    write(path, items, close=True)
    raw = bytearray(path.read_bytes())
    assert read(path)[0].info().whole
    at = data.draw(st.integers(Spool(path)._data_start, len(raw)))
    if data.draw(st.booleans()):
        raw = raw[:at]
    elif at < len(raw):
        raw[at] ^= data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    spool, first = read(path, chunk)
    if spool.info().whole:
        with path.open("ab") as file:
            # What came after the first reading is not read. No zeros: a seal that was cut off may lack just
            # these.
            file.write(b"\1" * 64)
    tables = Spool(path).again(spool.info(), chunk)
    second = [row for table in tables for row in table.tolist() if row[0] & 0xFF not in (*TEXTS, Kind.SEAL)]
    assert second == first.tolist()
