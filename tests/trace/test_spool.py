"""The spool: what is written is read back, and no damage raises anything but SpoolError."""

from __future__ import annotations

import os
import resource
import signal
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
from kvtrace.trace import hooks, ops
from kvtrace.trace.facts import EngineArgs, Header
from kvtrace.trace.format import Kind, Stop
from kvtrace.trace.reader import Spool, SpoolError
from kvtrace.trace.rows import kind
from kvtrace.trace.writer import Recorder

HEADER = Header(pid=1, role="worker")
word = st.integers(-(1 << 63), (1 << 63) - 1)
fixed_kind = st.sampled_from([k for k in Kind if k not in (Kind.END, Kind.NAME, Kind.BYTES, Kind.FACT)])
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


def write(path: Path, items: list[tuple[str, object]], close: bool = False) -> None:
    path.unlink(missing_ok=True)
    recorder = Recorder(path, HEADER, 1 << 30)
    for what, value in items:
        if what == "record":
            recorder.add(value)  # type: ignore[arg-type]
        elif what == "name":
            recorder.name(value)  # type: ignore[arg-type]
        else:
            recorder.fact(EngineArgs(value))  # type: ignore[arg-type]
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
def test_corrupted_bytes_raise_nothing_but_the_readers_own_error(tmp_path_factory, items, data):
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


def test_a_newer_format_says_which_kvtrace_to_use(tmp_path):
    path = tmp_path / "a.kvt"
    write(path, [])
    raw = bytearray(path.read_bytes())
    raw[8] = 99
    path.write_bytes(raw)
    with pytest.raises(SpoolError, match="format 99"):
        Spool(path)


def test_an_existing_file_is_never_overwritten(tmp_path):
    path = tmp_path / "a.kvt"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        Recorder(path, HEADER, 1 << 20)
    assert path.read_text() == "mine"


def test_words_out_of_range_are_clamped_not_raised(tmp_path):
    recorder = Recorder(tmp_path / "a.kvt", HEADER, 1 << 20)
    recorder.add((fmt.pack_head(Kind.HOOK), 1 << 70, -(1 << 70), True, 0, 0, 0, 0))
    recorder.flush()
    _, rows = read(tmp_path / "a.kvt")
    assert rows[0].tolist()[1:4] == [(1 << 63) - 1, -(1 << 63), 1]


def test_names_forgotten_come_back_under_a_new_id(tmp_path):
    recorder = Recorder(tmp_path / "a.kvt", HEADER, 1 << 20)
    first = recorder.name("req-1")
    assert recorder.name("req-1") == first
    recorder.forget_name("req-1")
    second = recorder.name("req-1")
    recorder.flush()
    spool, _ = read(tmp_path / "a.kvt")
    assert first != second
    assert spool.names[first] == spool.names[second] == "req-1"


def test_threads_do_not_tear_each_others_records(tmp_path):
    recorder = Recorder(tmp_path / "a.kvt", HEADER, 1 << 30)

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
        recorder = Recorder(Path({str(tmp_path / "a.kvt")!r}), {HEADER!r}, 1 << 30)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        for n in range(1000):
            recorder.add((fmt.pack_head(fmt.Kind.HOOK), n, n, n, n, n, n, n))
            recorder.flush()
        assert not recorder.alive and recorder.lost > 900, recorder.lost
        assert not recorder._buffer
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    _, rows = read(tmp_path / "a.kvt")
    assert 50 <= len(rows) <= 62
    assert rows[:, 1].tolist() == list(range(len(rows)))


def test_past_the_size_limit_it_says_full_and_past_twice_that_it_stops(tmp_path):
    recorder = Recorder(tmp_path / "a.kvt", HEADER, 64 * 100)
    recorder._ceiling = 64 * 200
    for n in range(400):
        recorder.add((fmt.pack_head(Kind.HOOK), n, n, n, n, n, n, n))
        recorder.flush()
        if n == 120:
            assert recorder.full and recorder.alive
    spool, _ = read(tmp_path / "a.kvt")
    assert spool.info().end == "trailer"
    assert spool.info().stop == Stop.SIZE_LIMIT


def test_what_was_flushed_survives_sigkill(tmp_path):
    path = tmp_path / "a.kvt"
    code = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from kvtrace.trace import format as fmt
        from kvtrace.trace.facts import Header
        from kvtrace.trace.writer import Recorder
        recorder = Recorder(Path({str(path)!r}), {HEADER!r}, 1 << 30)
        for n in range(1, 1001):
            recorder.add((fmt.pack_head(fmt.Kind.HOOK), n, n, n, n, n, n, n))
            if n % 10 == 0:
                recorder.flush()
        recorder.add((fmt.pack_head(fmt.Kind.HOOK), 0, 0, 0, 0, 0, 0, 0))  # the open step
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    _, rows = read(path)
    assert len(rows) == 1000


def test_after_fork_the_child_leaves_the_parents_file_alone(tmp_path):
    path = tmp_path / "a.kvt"
    recorder = Recorder(path, HEADER, 1 << 30)
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
    recorder = Recorder(path, HEADER, 1 << 30)
    block = [fmt.pack_head(Kind.HOOK), 1, 2, 3, 4, 5, 6, 7] * 4096
    for _ in range(200):
        recorder.add(block)
        recorder.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(len(chunk) for chunk in Spool(path).chunks())
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert total == 200 * 4096
    assert after - before < 40 * 1024, "KiB; the file has 52 MB"


def test_every_code_fits_a_byte():
    assert max(hooks.CODES, ops.CODES, *Kind) < 128


def test_the_head_word_keeps_its_parts_apart():
    head = fmt.pack_head(Kind.HOOK, 2, 5, 129, 0xFFFF, 77)
    rows = np.array([[head] + [0] * 7])
    from kvtrace.trace import rows as parts_of

    parts = [parts_of.kind, parts_of.role, parts_of.code, parts_of.detail, parts_of.flags, parts_of.thread]
    assert [int(part(rows[:, 0])[0]) for part in parts] == [Kind.HOOK, 2, 5, 129, 0xFFFF, 77]
    assert head > 0


def test_the_header_is_json_that_survives_odd_values(tmp_path):
    header = Header(argv=("é", "\n"), host=Path("/x"))  # type: ignore[arg-type]
    Recorder(tmp_path / "a.kvt", header, 1 << 20).stop(Stop.CLEAN)
    assert Spool(tmp_path / "a.kvt").header == {**header.to_json(), "argv": ["é", "\n"], "host": "/x"}
