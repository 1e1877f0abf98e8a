"""What leaves the process in watched calls and background work, and KV that is found again in it."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import zlib
from multiprocessing import shared_memory
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.connector import traced  # noqa: E402
from kvtrace.agent.left import databases, leaving, paths, sockets  # noqa: E402
from kvtrace.agent.left.keys import Gone, Held, Keys  # noqa: E402
from kvtrace.agent.left.pieces import POOL, Op  # noqa: E402
from kvtrace.agent.left.unpack import WORTH, Unpacker  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.agent.watch.caches import CACHES  # noqa: E402
from kvtrace.agent.watch.call import FIRST_CALLS  # noqa: E402
from kvtrace.launch.rest import look, write_rest, write_rest_soon  # noqa: E402
from kvtrace.ledger.rest_file import read_rest_file  # noqa: E402
from kvtrace.trace import rows  # noqa: E402
from kvtrace.trace.format import Flag, Form, Kind, Role, Way  # noqa: E402
from kvtrace.trace.sqlite_file import HEAD, page_size  # noqa: E402

from . import fakes  # noqa: E402

BLOCKS, BLOCK = 10, 4
SLOTS = torch.tensor([20, 21, 22, 23, 8, 9, 10, 11])
KEY = b"k" * 16


@pytest.fixture
def kv():
    CACHES.__init__()
    POOL.__init__()
    paths.PLACES.__init__()
    WORTH.forget()
    return torch.randn(BLOCKS, BLOCK, 8)


def pick(kv, slots=SLOTS):
    return kv[slots // BLOCK, slots % BLOCK]


def data_of(tensor):
    return tensor.contiguous().numpy().tobytes()


def saves(kv, how, steps=1):
    """``how(number of the step, KV)`` is what the connector does in its save hook."""
    number = [0]
    connector = fakes.Copying(lambda connector, layer, slots: how(number[0], layer))
    traced(connector, Role.WORKER, "Copying")
    connector.register_kv_caches({"layer.0": kv})
    for number[0] in range(1, steps + 1):
        AGENT.worker.step = AGENT.worker.latest = number[0]
        connector.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(SLOTS)))
        with torch.inference_mode():
            connector.save_kv_layer("layer.0", kv, None)
            connector.wait_for_save()
        connector.clear_connector_metadata()
    AGENT.worker.step = 0


def left(trace):
    """[(way, last part of the target, bytes, calls, errors)], removed files as way None."""
    spool, table = trace.read()
    found = []
    for words in table[rows.kind(table[:, 0]) == Kind.LEFT].tolist():
        row = rows.decode(words)
        way = None if rows.flags(row.head) & Flag.REPLACED else Way(rows.code(row.head))
        name = spool.names[row.target].rsplit("/", 1)[-1]
        found.append((way, name, row.bytes, row.calls, row.errors))
    return found


def found(trace):
    """[(form, set of slots, whether all pieces were found)]"""
    spool, table = trace.read()
    made = []
    for words in table[rows.kind(table[:, 0]) == Kind.FOUND].tolist():
        row = rows.decode(words)
        whole = row.pieces >> 32 == row.pieces & 0xFFFFFFFF
        made.append((Form(rows.code(row.head)), spool.names[row.slot_set], whole))
    return made


VERBATIM = (Form.VERBATIM, "8+4,20+4", True)


def test_a_file_its_bytes_and_the_kv_in_it(trace, kv, tmp_path):
    def how(step, layer):
        part = tmp_path / "a.part"
        part.write_bytes(b"header" + data_of(pick(layer)))
        part.rename(tmp_path / "a.kv")

    saves(kv, how)
    assert left(trace) == [(Way.FILE, "a.kv", 6 + 256, 1, 0)]
    assert found(trace) == [VERBATIM]


def test_it_is_found_in_whatever_order_and_layout_it_is_written(trace, kv, tmp_path):
    saves(kv, lambda step, layer: np.save(tmp_path / "a.npy", np.ascontiguousarray(pick(layer).numpy().T)))
    assert found(trace) == [], "element by element in another order: nothing to be found, and no fault"
    saves(kv, lambda step, layer: np.save(tmp_path / "b.npy", pick(layer).flip(0).numpy()))
    assert VERBATIM in found(trace)


def test_kv_that_is_written_in_a_later_call(trace, kv, tmp_path):
    kept = []

    def how(step, layer):
        if step == 1:
            kept.append(pick(layer))
        if step == 3:
            (tmp_path / "late").write_bytes(data_of(kept.pop()))

    saves(kv, how, steps=3)
    assert found(trace) == [VERBATIM]


def test_a_file_that_is_held_open_and_grows(trace, kv, tmp_path):
    file = (tmp_path / "log").open("ab")
    handles = {1: file}

    def how(step, layer):
        if step == 1:
            handles[2] = (tmp_path / "data").open("ab")
        pick(layer)
        handles[2].write(b"x" * step + data_of(pick(layer)))
        handles[2].flush()

    saves(kv, how, steps=2)
    for handle in handles.values():
        handle.close()
    assert left(trace) == [(Way.FILE, "data", 257, 1, 0), (Way.FILE, "data", 258, 0, 0)]
    assert len(found(trace)) == 4


def test_a_file_that_had_its_size_before_it_was_written_is_looked_at_again(trace, kv, tmp_path):
    """Some writers give a file its size first; another call may end meanwhile, and look at it."""

    def how(step, layer):
        data = data_of(pick(layer))
        with (tmp_path / "data").open("wb") as file:
            file.write(data[: len(data) // 2])
            file.truncate(len(data))
            file.flush()
            (place,) = [place for place in paths.PLACES.still_open() if place.path.endswith("data")]
            paths.PLACES.look(place)
            file.write(data[len(data) // 2 :])

    saves(kv, how)
    assert found(trace) == [VERBATIM]


def test_a_file_is_looked_at_again_where_it_changed_or_its_writer_is_done(trace, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(64))
    os.utime(path, ns=(0, 1))
    place = paths.PLACES.opened(path, os.O_WRONLY | os.O_TRUNC)
    assert [(one.written, one.again) for one in (paths.PLACES.look(place), paths.PLACES.look(place))] == [
        (64, False),
        (0, False),
    ]
    assert paths.PLACES.look(place, own=True).again
    os.utime(path, ns=(0, 2))
    assert paths.PLACES.look(place).again and not paths.PLACES.look(place).again


def test_a_file_that_stays_empty_and_one_that_cannot_be_opened(trace, kv, tmp_path):
    def how(step, layer):
        pick(layer)
        (tmp_path / "empty").open("wb").close()
        with pytest.raises(OSError):
            (tmp_path / "no" / "folder").write_bytes(b"x")

    saves(kv, how)
    assert sorted(left(trace)) == [(Way.FILE, "empty", 0, 1, 0), (Way.FILE, "folder", 0, 1, 1)]
    assert found(trace) == []


def test_files_that_are_removed_again(trace, kv, tmp_path):
    def how(step, layer):
        (tmp_path / f"{step}").write_bytes(data_of(pick(layer)))
        if step == 2:
            (tmp_path / "1").unlink()

    saves(kv, how, steps=2)
    assert [row[:2] for row in left(trace)] == [(Way.FILE, "1"), (None, "1"), (Way.FILE, "2")]


def test_a_database_keeps_its_locks_and_its_open_transaction_is_seen(trace, kv, tmp_path):
    """A handle that is opened and closed beside SQLite's own would take its locks away."""
    path = tmp_path / "kv.sqlite"
    handles = []

    def how(step, layer):
        if step == 1:
            handles.append(sqlite3.connect(path))
            handles[0].execute("CREATE TABLE kv (value BLOB)")
        handles[0].execute("INSERT INTO kv VALUES (?)", (data_of(pick(layer)),))
        if step == 1:
            handles[0].commit()
            return
        with sqlite3.connect(path, timeout=0.01) as other, pytest.raises(sqlite3.OperationalError):
            other.execute("INSERT INTO kv VALUES (1)")  # still locked

    saves(kv, how, steps=3)
    assert [(row[0], row[1], row[4]) for row in left(trace) if row[0]][:2] == [
        (Way.SQLITE, "kv.sqlite", 0),
        (Way.SQLITE, "kv.sqlite", 1),
    ]
    AGENT.flush()
    rest = {os.path.basename(one.path): one.exists for one in look(trace.run_dir, KEY).files}
    assert rest == {"kv.sqlite": True, "kv.sqlite-journal": True, "kv.sqlite-wal": False}
    handles[0].close()


def test_kv_in_a_database_is_found_and_whether_its_row_is_there_at_the_end(trace, kv, tmp_path):
    handles = []

    def how(step, layer):
        if not handles:
            handles.append(sqlite3.connect(tmp_path / "kv.sqlite"))
            handles[0].execute("CREATE TABLE kv (step INTEGER PRIMARY KEY, value BLOB)")
        value = bytes(9000) + data_of(pick(layer, SLOTS - 8 * (step - 1))) + bytes(9000)
        handles[0].execute("INSERT INTO kv VALUES (?, ?)", (step, value))
        handles[0].commit()

    saves(kv, how, steps=2)
    assert [form for form, _, whole in found(trace) if whole] == [Form.VERBATIM] * 2
    AGENT.flush()
    (still,) = look(trace.run_dir, AGENT.config.salt).pieces.values()
    assert set(still) == {"1"} and len(still) == 4, "the first piece and the last of each"
    handles[0].execute("DELETE FROM kv WHERE step = 2")
    handles[0].commit()
    (still,) = look(trace.run_dir, AGENT.config.salt).pieces.values()
    assert still == "1100", "its pages are free"
    handles[0].execute("INSERT INTO kv VALUES (3, ?)", (b"x" * 18000,))
    handles[0].commit()
    (still,) = look(trace.run_dir, AGENT.config.salt).pieces.values()
    assert still == "1100", "another value stands on its pages"
    handles[0].execute("DELETE FROM kv WHERE step = 1")
    handles[0].commit()
    handles[0].execute("VACUUM")
    (still,) = look(trace.run_dir, AGENT.config.salt).pieces.values()
    assert still == "????", "packed anew: nothing stands where it stood, and may stand elsewhere"
    handles[0].close()


def test_values_that_lie_on_several_pages_of_a_database(tmp_path):
    path = str(tmp_path / "kv.sqlite")
    value = np.arange(1, 20_001, dtype="<u4").tobytes()
    with sqlite3.connect(path) as handle:
        handle.execute("CREATE TABLE kv (value BLOB)")
        handle.execute("INSERT INTO kv VALUES (?)", (value,))
    handle.close()
    data = databases.read(path, 0, os.path.getsize(path))
    page = page_size(data[:HEAD])
    middle = value[8192:-8192]
    assert middle not in data
    whole = databases.joined(data, page)
    assert middle in whole
    at = databases.place_of(whole.index(middle), page)
    assert data.index(middle[:64]) == at


def test_a_file_on_which_the_connector_holds_a_lock_is_not_opened(trace, kv, tmp_path):
    child = "import fcntl,sys; fcntl.lockf(open(sys.argv[1],'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    handle = (tmp_path / "locked").open("wb")

    def how(step, layer):
        fcntl.lockf(handle, fcntl.LOCK_EX)
        handle.write(data_of(pick(layer)))
        handle.flush()

    saves(kv, how)
    assert subprocess.run([sys.executable, "-c", child, tmp_path / "locked"], stderr=-3).returncode == 1
    handle.close()


def test_a_segment_of_shared_memory(trace, kv):
    made = []

    def how(step, layer):
        made.append(shared_memory.SharedMemory(create=True, size=256))
        made[0].buf[:256] = data_of(pick(layer))

    saves(kv, how)
    assert [row[0] for row in left(trace)] == [Way.SHARED_MEMORY] and found(trace) == [VERBATIM]
    made[0].close()
    made[0].unlink()


def test_a_segment_that_is_opened_by_its_name_and_written_anew(trace, kv):
    first = shared_memory.SharedMemory(create=True, size=256)
    first.unlink()

    def how(step, layer):
        segment = shared_memory.SharedMemory(first.name, create=step == 1, size=256 if step == 1 else 0)
        segment.buf[:256] = data_of(pick(layer, SLOTS + 8 * (step - 1)))
        how.made.append(segment)

    how.made = []
    saves(kv, how, steps=2)
    assert [row[0] for row in left(trace)] == [Way.SHARED_MEMORY] * 2
    assert [slots for _, slots, _ in found(trace)] == ["8+4,20+4", "16+4,28+4"]
    for segment in how.made:
        segment.close()
    how.made[0].unlink()
    first.close()


def answering(answer):
    """A server that reads 262 bytes and answers; its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        link, _ = server.accept()
        with link, server:
            got = 0
            while got < 262:
                got += len(link.recv(1000))
            link.sendall(answer)

    threading.Thread(target=serve).start()
    return server.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "form", "errors"),
    [
        (b"OK 0\r\n", Form.VERBATIM, 0),
        (b"HTTP/1.1 507 Insufficient Storage\r\n", Form.REFUSED, 1),
        (b"-ERR out of memory\r\n", Form.REFUSED, 1),
        (b"", Form.REFUSED, 1),
    ],
)
def test_a_socket_and_what_is_answered(trace, kv, answer, form, errors):
    port = answering(answer)

    def how(step, layer):
        with socket.create_connection(("127.0.0.1", port)) as link:
            data = data_of(pick(layer))
            link.sendall(b"header")
            link.sendall(data[:99])
            with link.makefile("rwb") as pipe:
                pipe.write(data[99:])
                pipe.flush()
                assert pipe.readline() == answer

    saves(kv, how)
    assert left(trace) == [(Way.SOCKET, f"tcp 127.0.0.1:{port}", 262, 1, errors)]
    assert [row[0] for row in found(trace)] == [form]


def serving(sizes, answer):
    """A server that reads so many bytes of each connection, one after the other, and answers; its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server:
            for size in sizes:
                link, _ = server.accept()
                with link:
                    while size > 0:
                        size -= len(link.recv(size))
                    link.sendall(answer)

    threading.Thread(target=serve).start()
    return server.getsockname()[1]


def test_several_messages_of_one_call_are_found_each(trace, kv):
    port = serving([256, 256], b"OK")

    def how(step, layer):
        for moved in (0, 8):
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(data_of(pick(layer, SLOTS - moved)))
                assert link.recv(100) == b"OK"

    saves(kv, how)
    assert found(trace) == [VERBATIM, (Form.VERBATIM, "0+4,12+4", True)]


PACKING = [zlib.compress, gzip.compress, lambda data: zlib.compress(data, 1)]


@pytest.mark.parametrize("pack", PACKING)
def test_kv_that_is_compressed_is_found_in_files_and_still_there_at_the_end(trace, kv, tmp_path, pack):
    def how(step, layer):
        with (tmp_path / "log").open("ab") as file:
            file.write(b"header x\x9c")
            file.write(pack(data_of(pick(layer, SLOTS - 8 * (step - 1)))))

    saves(kv, how, steps=2)
    assert found(trace) == [VERBATIM, (Form.VERBATIM, "0+4,12+4", True)]
    AGENT.flush()
    (still,) = look(trace.run_dir, AGENT.config.salt).pieces.values()
    assert set(still) == {"1"}
    (tmp_path / "log").write_bytes(os.urandom(os.path.getsize(tmp_path / "log")))
    (still,) = look(trace.run_dir, AGENT.config.salt).pieces.values()
    assert set(still) == {"0"}


@pytest.mark.parametrize("pack", PACKING)
def test_kv_that_another_thread_packs_is_found_when_a_call_ends_amid_its_file(trace, kv, tmp_path, pack):
    """The rest of a stream has no begin of its own: it goes on where the last look at its file ended."""
    handles = []

    def how(step, layer):
        if step == 1:
            packed = pack(bytes(2000) + data_of(pick(layer)))
            handles.append((tmp_path / "a").open("ab", buffering=0))
            handles.extend((packed[:-40], packed[-40:]))
        handles[0].write(handles[step])

    saves(kv, how, steps=2)
    handles[0].close()
    assert [row[0] for row in found(trace)] == [Form.CUT, Form.VERBATIM]


def test_few_files_are_kept_whose_stream_goes_on(trace, kv, tmp_path):
    def how(step, layer):
        for number in range(50):
            (tmp_path / f"{number}").write_bytes(zlib.compress(bytes(2000) + data_of(pick(layer)))[:-40])

    saves(kv, how)
    assert len(leaving._packing) == leaving._MOST_PACKING
    open_ones = [place for place in paths.PLACES._places.values() if place.packed]
    assert open_ones == leaving._packing


def test_kv_that_is_compressed_and_cut_is_cut(trace, kv, tmp_path):
    saves(kv, lambda step, layer: (tmp_path / "a").write_bytes(zlib.compress(data_of(pick(layer)))[:160]))
    assert [row[0] for row in found(trace)] == [Form.CUT]


def test_kv_that_is_compressed_is_found_in_the_parts_of_a_message(trace, kv):
    packed = zlib.compress(data_of(pick(kv)))
    port = serving([len(packed) + 6], b"OK")

    def how(step, layer):
        pick(layer)
        with socket.create_connection(("127.0.0.1", port)) as link:
            for part in (b"header", packed[:90], packed[90:91], packed[91:]):
                link.sendall(part)
            assert link.recv(100) == b"OK"

    saves(kv, how)
    assert VERBATIM in found(trace)


@pytest.mark.parametrize("database", [False, True])
def test_kv_that_is_compressed_is_found_beside_a_piece_that_stands_there_as_it_is(
    trace, kv, tmp_path, database
):
    """Where compression gives nothing some of it stays as it is."""

    def how(step, layer):
        data = data_of(pick(layer))
        packed = zlib.compress(os.urandom(9000).hex().encode() + data) + data[:32]
        if not database:
            (tmp_path / "a").write_bytes(packed)
            return
        with contextlib.closing(sqlite3.connect(tmp_path / "kv.sqlite")) as table:
            table.execute("CREATE TABLE kv (value BLOB)")
            table.execute("INSERT INTO kv VALUES (?)", (packed,))
            table.commit()

    saves(kv, how)
    assert found(trace) == [VERBATIM]


def test_kv_that_is_compressed_is_found_in_a_database(trace, kv, tmp_path):
    handles = []

    def how(step, layer):
        if not handles:
            handles.append(sqlite3.connect(tmp_path / "kv.sqlite"))
            handles[0].execute("CREATE TABLE kv (name TEXT PRIMARY KEY, value BLOB)")
        data = zlib.compress(os.urandom(9000) + data_of(pick(layer, SLOTS - 8 * (step - 1))))
        handles[0].execute("INSERT INTO kv VALUES (?, ?)", (f"{step}", data))
        handles[0].commit()

    saves(kv, how, steps=2)
    handles[0].close()
    assert found(trace) == [VERBATIM, (Form.VERBATIM, "0+4,12+4", True)]
    AGENT.flush()
    (still,) = look(trace.run_dir, AGENT.config.salt).pieces.values()
    assert set(still) == {"1"}


@pytest.mark.parametrize(("flipped", "form"), [(False, Form.VERBATIM), (True, Form.TURNED)])
def test_heads_in_another_order_are_seen_in_a_database(trace, kv, tmp_path, flipped, form):
    heads, handles = torch.randn(2, BLOCKS, BLOCK, 3, 16), []

    def how(step, layer):
        if not handles:
            handles.append(sqlite3.connect(tmp_path / "kv.sqlite"))
            handles[0].executescript(
                "PRAGMA page_size = 512; CREATE TABLE kv (name TEXT PRIMARY KEY, value BLOB)"
            )
            CACHES._blocks["layer.0"], CACHES._hints["layer.0"] = (BLOCKS, BLOCK), {5: None}
        block = layer[:, step]
        handles[0].execute(
            "INSERT INTO kv VALUES (?, ?)", (f"{step}", data_of(block.flip(2) if flipped else block))
        )
        handles[0].commit()

    saves(heads, how, steps=3)
    handles[0].close()
    assert [said[0] for said in found(trace)] == [form] * 3


def test_streams_are_left_alone_where_nothing_is_ever_found_in_them():
    WORTH.forget()
    packed = zlib.compress(os.urandom(2000))
    looked = [len(Unpacker().streams(packed)) for _ in range(100)]
    assert looked == [1] * 64 + [0] * 36
    WORTH.forget()
    WORTH.found()
    assert all(Unpacker().streams(packed) for _ in range(100))
    WORTH.forget()


def test_what_comes_out_of_many_streams_is_bounded():
    WORTH.forget()
    packed = b"".join(zlib.compress(bytes(4 << 20)) for _ in range(9))
    assert sum(len(one.data) for one in Unpacker().streams(packed)) == 16 << 20


def test_a_stream_that_never_ends_and_what_only_looks_like_one():
    WORTH.forget()
    unpacker = Unpacker()
    bomb = zlib.compress(bytes(64 << 20))
    assert sum(len(one.data) for one in unpacker.streams(bomb)) == 16 << 20
    assert unpacker.streams(b"x\x9c" * 5000 + b"\x1f\x8b\x08" * 5000) == []


OK = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("heads", "moved", "answer", "gone"),
    [
        ((b"PUT /a HTTP/1.1\r\n\r\n", b"PUT /a HTTP/1.1\r\n\r\n"), 8, OK, [Form.REPLACED]),
        ((b"set a 0 0 256\r\n", b"delete a\r\n"), None, b"STORED\r\n", [Form.DELETED]),
        ((b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n", b"*2\r\n$3\r\nDEL\r\n$1\r\na\r\n"), None, b"+OK\r\n",
         [Form.DELETED]),
        ((b"PUT /a HTTP/1.1\r\n\r\n", b"PUT /a HTTP/1.1\r\n\r\n"), 0, OK, []),
        ((b"PUT /a HTTP/1.1\r\n\r\n", b"PUT /b HTTP/1.1\r\n\r\n"), 8, OK, []),
        ((b"PUT /a HTTP/1.1\r\n\r\n", b"PUT /a HTTP/1.1\r\n\r\n"), 8, b"HTTP/1.1 507 Full\r\n", []),
        ((b"aaaa", b"aaaa"), 8, OK, []),
    ],
    ids=["http", "memcached", "redis", "the same KV again", "another key", "refused", "no key that is known"],
)  # fmt: skip
def test_kv_whose_key_is_put_again_or_deleted(trace, kv, heads, moved, answer, gone):
    data = [0 if moved is None and number else 256 for number in range(2)]
    port = serving([len(head) + size for head, size in zip(heads, data, strict=True)], answer)

    def how(step, layer):
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(heads[step - 1])
            if data[step - 1]:
                link.sendall(data_of(pick(layer, SLOTS - (moved or 0) * (step - 1))))
            assert link.recv(100)

    saves(kv, how, steps=2)
    said = [(form, slots) for form, slots, _ in found(trace) if form in (Form.REPLACED, Form.DELETED)]
    assert said == [(form, "8+4,20+4") for form in gone]


@pytest.mark.parametrize(
    ("heads", "moved", "gone"),
    [
        (b"key-of-1 key-of-2 key-of-1", 8, ["8+4,20+4"]),
        (b"key-of-1 key-of-1 key-of-2", 8, ["8+4,20+4"]),
        (b"key-of-1 key-of-2 key-of-3", 8, []),
        (b"key-of-1 key-of-1 key-of-1", 8, []),
        (b"key-of-1 key-of-2 key-of-1", 0, []),
        (b"a b a", 8, []),
    ],
    ids=["again", "before another one", "others", "all alike", "the same KV", "too short"],
)
def test_kv_that_is_sent_behind_the_same_first_bytes_may_have_been_replaced(trace, kv, heads, moved, gone):
    """Of a protocol that is not known: what stands before the KV may be its key, where it differs."""
    names = heads.split()
    port = serving([len(name) + 256 for name in names], b"\0\0\0\0\1")

    def how(step, layer):
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(names[step - 1] + data_of(pick(layer, (SLOTS + moved * (step - 1)) % (4 * BLOCKS))))
            assert link.recv(100)

    saves(kv, how, steps=3)
    assert [slots for form, slots, _ in found(trace) if form == Form.COVERED] == gone


@pytest.mark.parametrize(
    ("heads", "behind", "form"),
    [
        ("5a8f02c713 91e6bd40f8 5a8f02c713", b"", Form.REPLACED),
        ("5a8f02c713 5a8f02c713 91e6bd40f8", b"", Form.REPLACED),
        ("record-001 record-002 record-001", b"", Form.COVERED),
        ("5a8f02c713 91e6bd40f8 5a8f02c713", b"key-of-it", Form.COVERED),
    ],
    ids=["a name", "before another name", "a number", "more behind the KV"],
)
def test_kv_behind_a_name_that_is_sent_with_other_kv_was_replaced(trace, kv, heads, behind, form):
    names = [name.encode() for name in heads.split()]
    port = serving([len(name) + 256 + len(behind) for name in names], b"\0\0\0\0\1")

    def how(step, layer):
        data = data_of(pick(layer, (SLOTS + 8 * (step - 1)) % (4 * BLOCKS)))
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(names[step - 1] + data + behind)
            assert link.recv(100)

    saves(kv, how, steps=3)
    said = [(how, slots) for how, slots, _ in found(trace) if how in (Form.COVERED, Form.REPLACED)]
    assert said == [(form, "8+4,20+4")]


def test_a_name_behind_which_one_call_sends_other_kv_twice_names_no_kv():
    keys = Keys()
    ops = [operation(bytes([number]) * 32) for number in range(4)]
    for number, op in enumerate(ops):
        op.call, op.bytes = number // 2, 32
    said = []
    names = b"5a8f02c713", b"91e6bd40f8", b"5a8f02c713", b"5a8f02c713"
    for name, op in zip(names, ops, strict=True):
        said += keys.put_behind("peer", name, [Held(op, True)], 42)
    assert [one.replaced for one in said] == [True, False]


def test_kv_of_another_layer_behind_the_same_name_replaces_nothing():
    keys = Keys()
    ops = [operation(bytes([number]) * 32) for number in range(3)]
    for number, op in enumerate(ops):
        op.call, op.bytes, op.layer = number, 32, f"layer.{number}"
    names = b"5a8f02c713", b"91e6bd40f8", b"5a8f02c713"
    said = [keys.put_behind("peer", name, [Held(op, True)], 42) for name, op in zip(names, ops, strict=True)]
    assert said == [[], [], [Gone(ops[0], False)]]


def test_what_was_seen_with_the_message_before_is_not_found_again_in_the_next_one(trace, kv):
    """The last bytes that went out are kept for pieces that go on in the next; each message has its key."""
    names = [b"5a8f02c713", b"91e6bd40f8", b"5a8f02c713", b"5a8f02c713"]
    link, peer = socket.socketpair()

    def how(step, layer):
        for name in names[2 * step - 2 : 2 * step]:
            link.sendall(name + data_of(pick(layer, (SLOTS + 4 * how.at) % (4 * BLOCKS))))
            peer.send(b"\0")
            assert link.recv(1)
            how.at += 1

    how.at = 0
    with link, peer:
        saves(kv, how, steps=2)
    said = [(how, slots) for how, slots, _ in found(trace) if how in (Form.COVERED, Form.REPLACED)]
    assert said[0] == (Form.REPLACED, "8+4,20+4")


def test_packed_kv_that_is_sent_behind_the_same_key_and_another_length(trace, kv):
    packed = [zlib.compress(bytes(2000 * n) + data_of(pick(kv, SLOTS + 8 * (n - 1)))) for n in (1, 2)]
    heads = [b"P" + len(data).to_bytes(4, "big") + b"one-key" for data in packed]
    other = b"P" + bytes(4) + b"another"
    sizes = [len(head) + len(data) for head, data in zip(heads, packed, strict=True)]
    port = serving([*sizes, len(other) + 256], b"\0\0\0\0\1")

    def how(step, layer):
        with socket.create_connection(("127.0.0.1", port)) as link:
            data = data_of(pick(layer, SLOTS + 8 * (step - 1)))
            link.sendall(heads[step - 1] + packed[step - 1] if step < 3 else other + data)
            assert link.recv(100)

    saves(kv, how, steps=3)
    assert len(packed[0]) != len(packed[1])
    assert [slots for form, slots, _ in found(trace) if form == Form.COVERED] == ["8+4,20+4"]


def operation(*pieces):
    op = Op(0, 0, "layer")
    op.pieces.extend(pieces)
    return op


def test_kv_is_under_the_key_of_the_message_that_holds_all_of_it():
    """A piece of it may stand under another key too: the same token in another place."""
    keys, first, other, again = Keys(), operation(b"a", b"b"), operation(b"a", b"c"), operation(b"d", b"e")
    keys.put(("peer", b"1"), [Held(first, True), Held(other, False)])
    keys.put(("peer", b"2"), [Held(other, True), Held(first, False)])
    assert keys.put(("peer", b"1"), [Held(again, True)]) == [first]
    assert keys.delete(("peer", b"2")) == [other]


def test_kv_that_is_under_two_keys_is_there_until_both_are_gone():
    for whole in (True, False):
        keys, op = Keys(), operation(b"a", b"b")
        keys.put(("peer", b"1"), [Held(op, whole)])
        keys.put(("peer", b"2"), [Held(op, whole)])
        assert keys.delete(("peer", b"1")) == []
        assert keys.delete(("peer", b"2")) == [op]


def test_a_server_that_is_not_there(trace, kv):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def how(step, layer):
        pick(layer)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1)

    saves(kv, how)
    assert left(trace) == [(Way.SOCKET, f"tcp 127.0.0.1:{port}", 0, 0, 1)]
    assert found(trace) == []


def cut(data):
    return data[:160]


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (cut, Form.CUT),
        (lambda data: np.frombuffer(data, dtype=np.float32).astype(np.float16).tobytes(), Form.CAST),
        (
            lambda data: (
                torch.frombuffer(bytearray(data), dtype=torch.float32).bfloat16().float().numpy().tobytes()
            ),
            Form.ALTERED,
        ),
    ],
)
def test_what_is_cut_or_cast(trace, kv, tmp_path, change, form):
    saves(kv, lambda step, layer: (tmp_path / "a").write_bytes(change(data_of(pick(layer)))))
    assert [row[0] for row in found(trace)] == [form]


@pytest.mark.parametrize(
    ("found", "room", "is_cut"),
    [
        ({0, 1}, 800, True),
        ({0, 2}, 800, False),
        ({0, 2}, 500, True),
        ({0, 2, 3}, 300, False),
        ({2, 3}, 500, False),
        ({0, 1, 2, 3}, 500, False),
    ],
    ids=["in order", "compressed", "too little room", "more than fits in", "the begin is elsewhere", "all"],
)
def test_what_is_cut_is_there_up_to_a_place_or_in_a_file_that_is_too_short_for_it(found, room, is_cut):
    op = operation(*(bytes([number]) * 32 for number in range(4)))
    op.order = [((0, number, 0), (0, number, 0)) for number in range(4)]
    op.found, op.bytes, op.room = found, 800, {"/store/a": room}
    assert op.cut == is_cut


def test_numbers_that_went_through_eight_bits_are_known_again(trace, kv, tmp_path):
    def how(step, layer):
        out = pick(layer)
        scale = out.abs().max() / 127
        out = (out / scale).round().to(torch.int8).float() * scale
        (tmp_path / f"{step}").write_bytes(b"odd" + data_of(out))

    saves(kv, how, steps=3)
    assert [row[0] for row in found(trace)] == [Form.ALTERED] * 3


def test_a_large_file_with_few_places_in_use(trace, kv, tmp_path):
    places = []

    def how(step, layer):
        if not places:
            with (tmp_path / "arena").open("wb") as file:
                file.truncate(1 << 30)
            places.append(np.memmap(tmp_path / "arena", dtype=np.uint8, mode="r+"))
        places[0][step << 20 : (step << 20) + 256] = np.frombuffer(data_of(pick(layer)), dtype=np.uint8)

    saves(kv, how, steps=2)
    assert found(trace) == [VERBATIM] * 2


def test_what_is_written_and_removed_in_one_call_is_found(trace, kv, tmp_path):
    def how(step, layer):
        (tmp_path / "a").write_bytes(data_of(pick(layer)))
        (tmp_path / "a").unlink()

    saves(kv, how)
    assert [row[0] for row in left(trace)] == [None] and found(trace) == [VERBATIM]


def test_files_that_the_scheduler_s_side_removes(trace, kv, tmp_path):
    """In a call that is watched there, and in one that is not."""

    class Removing(fakes.KVConnectorBase_V1):
        def request_finished(self, request, block_ids):
            (tmp_path / request.request_id).unlink()
            return False, None

    connector = Removing()
    traced(connector, Role.SCHEDULER, "Removing")
    for number in range(FIRST_CALLS + 2):
        (tmp_path / f"{number}").write_bytes(b"x")
        connector.request_finished(SimpleNamespace(request_id=f"{number}"), [])
    assert [row[:2] for row in left(trace)] == [(None, f"{number}") for number in range(FIRST_CALLS + 2)]


def test_half_of_each_slot_is_zero(trace, tmp_path):
    CACHES.__init__()
    POOL.__init__()
    kv = torch.randn(BLOCKS, BLOCK, 32)

    def how(step, layer):
        out = pick(layer)
        out[..., 16:] = 0
        (tmp_path / "a").write_bytes(data_of(out))

    saves(kv, how)
    assert [row[0] for row in found(trace)] == [Form.ZEROED]


def test_zeros_where_the_rest_is_yet_to_be_written(trace, tmp_path):
    """What is looked at while it is written may have no more than its size."""
    CACHES.__init__()
    POOL.__init__()
    kv = torch.randn(BLOCKS, BLOCK, 32)
    picked = []

    def how(step, layer):
        if step == 1:
            picked.append(pick(layer))
        out = picked[0].clone()
        if step == 1:
            out[..., 16:] = 0
        (tmp_path / "a").write_bytes(data_of(out))

    saves(kv, how, steps=2)
    assert [row[0] for row in found(trace)] == [Form.ZEROED, Form.VERBATIM]


def test_memory_stays_bounded_and_what_is_given_up_is_said(trace, kv, monkeypatch):
    monkeypatch.setattr("kvtrace.agent.left.pieces._MOST_WAITING", 3)
    POOL.ever_found = True
    saves(kv, lambda step, layer: pick(layer), steps=5)
    assert len(POOL) == 3
    assert [row[0] for row in found(trace)] == [Form.GIVEN_UP] * 2


def test_nothing_is_kept_for_a_connector_of_which_nothing_is_ever_found(trace, kv, monkeypatch):
    monkeypatch.setattr("kvtrace.agent.left.pieces._MOST_WAITING", 2)
    monkeypatch.setattr("kvtrace.agent.left.pieces._BLIND", 3)
    saves(kv, lambda step, layer: pick(layer), steps=9)
    assert POOL.off


def test_sockets_give_what_they_gave(kv):
    """Wrapped or not: results, errors, and what ``makefile`` does."""
    sockets.install()
    one, other = socket.socketpair()
    with one, other:
        assert one.send(b"abc") == 3 and one.sendall(memoryview(b"def")) is None
        assert other.recv(2) == b"ab"
        buffer = bytearray(8)
        assert other.recv_into(buffer, nbytes=4) == 4 and buffer[:4] == b"cdef"
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
    with pytest.raises(OSError):
        one.send(b"x")


# --- at the end -------------------------------------------------------------------------------------------


def test_at_the_end_files_are_looked_at_once(trace, kv, tmp_path):
    def how(step, layer):
        for name in ("stays", "goes", "changes", "zero"):
            (tmp_path / name).write_bytes(data_of(pick(layer)) if name != "zero" else bytes(99))

    saves(kv, how)
    AGENT.flush()
    (tmp_path / "goes").unlink()
    (tmp_path / "changes").write_bytes(b"another's")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*") if path.is_file()}
    assert write_rest(trace.run_dir, KEY)
    rest, _ = read_rest_file(trace.run_dir)
    said = {os.path.basename(one.path): (one.exists, one.size, one.zero) for one in rest.files}
    assert said == {
        "stays": (True, 256, False),
        "goes": (False, None, None),
        "changes": (True, 9, False),
        "zero": (True, 99, True),
    }
    (pieces,) = rest.pieces.values()
    spool, table = trace.read()
    targets = [
        os.path.basename(spool.names[words[4]]) for words in table[rows.kind(table[:, 0]) == Kind.PIECE]
    ]
    assert {(target, still) for target, still in zip(targets, pieces, strict=True)} <= {
        ("stays", "1"), ("goes", "0"), ("changes", "0"),
    }  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert set(look(trace.run_dir, None).pieces.values()) == {"?" * len(pieces)}, "without the key"


def test_a_run_that_ended_long_ago_is_not_looked_at(trace, kv, tmp_path):
    saves(kv, lambda step, layer: (tmp_path / "a").write_bytes(data_of(pick(layer))))
    AGENT.flush()
    spools = list((tmp_path / "spool").iterdir())
    for path in spools:
        os.utime(path, (1, 1))
    assert not write_rest_soon(tmp_path) and read_rest_file(tmp_path)[0].looked_wall_ns is None
    for path in spools:
        os.utime(path)
    assert write_rest_soon(tmp_path) and read_rest_file(tmp_path)[0].files
    assert not write_rest_soon(tmp_path), "once"


def test_homes_and_secrets_are_masked(trace, kv, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtrace.agent.left.leaving._home", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    saves(kv, lambda step, layer: (tmp_path / "api_key=abcdef0123").write_bytes(data_of(pick(layer))))
    saves(kv, lambda step, layer: (tmp_path / "plain").write_bytes(data_of(pick(layer))))
    AGENT.flush()
    rest = {one.path: one.exists for one in look(trace.run_dir, KEY).files}
    assert rest == {"~/api_key=***": None, "~/plain": True}
