"""What a connector's work does outside the process, by names and sizes: OUTSIDE records and rest.json."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
from multiprocessing import connection, shared_memory

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.kv.caches import CACHES  # noqa: E402
from kvtrace.agent.outside import files  # noqa: E402
from kvtrace.agent.outside.call import OutsideCall  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.launch.rest import look, write_rest  # noqa: E402
from kvtrace.trace import rows  # noqa: E402
from kvtrace.trace.format import Flag, Kind, Way  # noqa: E402
from kvtrace.trace.rest_file import read_rest_file  # noqa: E402

from . import fakes  # noqa: E402
from .fakes import BLOCK, BLOCKS, on_worker  # noqa: E402

SLOTS = torch.tensor([20, 21, 22, 23, 8, 9, 10, 11])


@pytest.fixture
def kv():
    CACHES.__init__()
    files.PLACES.__init__()
    return torch.randn(BLOCKS, BLOCK, 8)


def data_of(layer):
    return layer[SLOTS // BLOCK, SLOTS % BLOCK].contiguous().numpy().tobytes()


def saves(kv, how, steps=1):
    """``how(number of the step, KV)`` is what the connector does in its save hook."""
    number = [0]
    connector = on_worker(fakes.Copying(lambda connector, layer, slots: how(number[0], layer)))
    connector.register_kv_caches({"layer.0": kv})
    for number[0] in range(1, steps + 1):
        in_a_step(connector, kv, number[0])


def in_a_step(connector, kv, number=1):
    AGENT.worker.step = AGENT.worker.latest = number
    connector.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(SLOTS)))
    with torch.inference_mode():
        connector.save_kv_layer("layer.0", kv, None)
        connector.wait_for_save()
    connector.clear_connector_metadata()
    AGENT.worker.step = 0


def outside(trace):
    """[(way, last part of the target, bytes, size or new name, errors)] in the order of the file."""
    names, found = trace.names(), []
    for row in trace.rows(Kind.OUTSIDE):
        way, name = Way(rows.code(row.head)), names[row.target].rsplit("/", 1)[-1]
        size = names.get(row.size, "").rsplit("/", 1)[-1] if way == Way.NAME else row.size
        found.append((way, name, row.bytes, size, row.errors))
    return found


def test_a_file_under_its_last_name(trace, kv, tmp_path):
    def how(step, layer):
        part = tmp_path / "a.part"
        part.write_bytes(b"header" + data_of(layer))
        part.rename(tmp_path / "a.kv")

    saves(kv, how)
    assert outside(trace) == [(Way.FILE, "a.kv", 262, 262, 0), (Way.NAME, "a.part", 0, "a.kv", 0)]


def test_a_file_in_a_folder_that_gets_its_name_last(trace, kv, tmp_path):
    (tmp_path / "a.tmp").mkdir()
    (tmp_path / "a.tmp-2").write_bytes(b"another")

    def how(step, layer):
        (tmp_path / "a.tmp" / "0.kv").write_bytes(data_of(layer))
        (tmp_path / "a.tmp").rename(tmp_path / "a")

    saves(kv, how)
    assert outside(trace) == [(Way.FILE, "0.kv", 256, 256, 0), (Way.NAME, "0.kv", 0, "0.kv", 0)]
    assert [os.path.dirname(path) for path in files.PLACES._places if path.endswith("0.kv")] == [
        str(tmp_path / "a")
    ]


def test_a_file_that_is_published_by_a_hard_link(trace, kv, tmp_path):
    def how(step, layer):
        part = tmp_path / "a.tmp"
        part.write_bytes(data_of(layer))
        os.link(part, tmp_path / "a.kv")
        part.unlink()

    saves(kv, how)
    first, linked, gone = outside(trace)
    assert first == (Way.FILE, "a.kv", 256, 256, 0)
    assert linked == (Way.NAME, "a.tmp", 0, "a.kv", 0) and gone == (Way.NAME, "a.tmp", 0, "", 0)


def test_a_new_name_is_told_as_of_when_it_was_given(trace, kv, tmp_path):
    """Else a call of another thread that ends in between tells of the file under its new name first, and what
    it held under the old one counts as another file's, and as written over."""
    other, part = OutsideCall(1), tmp_path / "a.part"
    file = None

    def how(step, layer):
        nonlocal file
        if step == 1:
            file = part.open("wb", buffering=0)
            file.write(b"header")
            return
        file.write(data_of(layer))
        part.rename(tmp_path / "a.kv")
        other.write(step, 1)

    saves(kv, how, steps=2)
    in_time = sorted(zip(trace.table(Kind.OUTSIDE)[:, 1].tolist(), outside(trace), strict=True))
    assert [(way, name) for _, (way, name, *_) in in_time] == [
        (Way.FILE, "a.part"), (Way.NAME, "a.part"), (Way.FILE, "a.kv"), (Way.FILE, "a.kv"),
    ]  # fmt: skip


def test_a_call_alone_tells_of_what_it_opened_while_it_runs(trace, kv, tmp_path):
    """Of several jobs at once each one's bytes are set against what that one read."""
    other = OutsideCall(1)

    def how(step, layer):
        with (tmp_path / "a.kv").open("wb", buffering=0) as file:
            file.write(data_of(layer))
            other.write(step, 1)

    saves(kv, how)
    (call,) = {rows.SlotsTouched._make(one).call for one in trace.table(Kind.SLOTS).tolist()}
    assert [rows.Outside._make(one).call for one in trace.table(Kind.OUTSIDE).tolist()] == [call]


def test_what_comes_later_is_for_who_opened_the_file(trace, kv, tmp_path):
    """By a handle that stays open it comes at any time: another connector's call may be the next to look."""
    file = None

    def how(step, layer):
        nonlocal file
        file = (tmp_path / "a.kv").open("ab", buffering=0)

    saves(kv, how)
    file.write(data_of(kv))
    OutsideCall(9).write(1, 1)
    records = trace.table(Kind.OUTSIDE)
    assert len(records) == 2 and 9 not in rows.detail(records[:, 0]).tolist()
    assert sum(max(0, rows.Outside._make(one).bytes) for one in records.tolist()) == 256


def test_a_hard_link_takes_no_name_that_is_in_use(trace, kv, tmp_path):
    def how(step, layer):
        part = tmp_path / "a.tmp"
        part.write_bytes(data_of(layer))
        with contextlib.suppress(FileExistsError):
            os.link(part, tmp_path / "a.kv")
        part.unlink()

    saves(kv, how, 2)
    _, _, gone, *again = outside(trace)
    assert gone == (Way.NAME, "a.tmp", 0, "", 0), "the first one is published, and stays"
    assert again == [(Way.FILE, "a.tmp", 0, 0, 1)], "the second one is given up: neither kept nor lost"


def test_what_is_written_at_shutdown_counts(trace, kv, tmp_path):
    class Draining(fakes.Copying):
        def shutdown(self):
            for at, data in enumerate(self.kept):
                (tmp_path / f"{at}.kv").write_bytes(data)

    connector = on_worker(Draining(lambda connector, layer, slots: data_of(layer)))
    connector.register_kv_caches({"layer.0": kv})
    in_a_step(connector, kv)
    assert outside(trace) == []
    connector.shutdown()
    assert outside(trace) == [(Way.FILE, "0.kv", 256, 256, 0)]


def test_a_file_that_its_own_call_removes_has_its_size(trace, kv, tmp_path):
    def how(step, layer):
        (tmp_path / "a").write_bytes(data_of(layer))
        (tmp_path / "a").unlink()

    saves(kv, how)
    assert outside(trace) == [(Way.FILE, "a", 256, 256, 0), (Way.NAME, "a", 0, "", 0)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_write_that_failed_counts_what_it_takes_up(trace, kv, tmp_path, fails):
    """LMCache#4991: a file of its full size, of which a part was written when the disk was full."""

    def how(step, layer):
        with contextlib.suppress(OSError), (tmp_path / "a").open("wb") as file:
            file.truncate(1 << 20)
            file.write(bytes(4096))
            file.flush()
            if fails:
                raise OSError(28, "No space left on device")

    saves(kv, how)
    (way, name, came, size, errors) = outside(trace)[0]
    assert (way, name, size, errors) == (Way.FILE, "a", 1 << 20, 0)
    assert came < 1 << 16 if fails else came == 1 << 20


def test_a_file_that_grows_in_later_calls(trace, kv, tmp_path):
    with (tmp_path / "log").open("ab") as file:

        def how(step, layer):
            file.write(data_of(layer))
            file.flush()

        saves(kv, lambda step, layer: open(tmp_path / "log", "ab").close(), 1)
        saves(kv, how, 2)
    grown = [row for row in outside(trace) if row[2]]
    assert grown == [(Way.FILE, "log", 256, 256, 0), (Way.FILE, "log", 256, 512, 0)]


def test_what_is_written_in_place_has_no_amount(trace, kv, tmp_path):
    arena = tmp_path / "arena"
    arena.write_bytes(bytes(4096))

    def how(step, layer):
        with arena.open("r+b") as file:
            file.seek(512)
            file.write(data_of(layer))

    saves(kv, how)
    assert outside(trace) == [(Way.FILE, "arena", -1, 4096, 0)]


def test_a_file_that_is_written_anew_says_so(trace, kv, tmp_path):
    saves(kv, lambda step, layer: (tmp_path / "a").write_bytes(data_of(layer)), 2)
    assert rows.flags(trace.table(Kind.OUTSIDE)[:, 0]).tolist() == [0, Flag.FIRST]


def test_what_goes_to_a_peer_and_a_connection_that_is_refused(trace, kv):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    closed = socket.create_server(("127.0.0.1", 0))
    nobody = closed.getsockname()[1]
    closed.close()

    def how(step, layer):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(data_of(layer))
            sock.send(b"end")
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", nobody))

    saves(kv, how)
    server.close()
    assert set(outside(trace)) == {
        (Way.SOCKET, f"tcp 127.0.0.1:{port}", 259, 0, 0),
        (Way.SOCKET, f"tcp 127.0.0.1:{nobody}", 0, 0, 1),
    }


def test_what_a_server_of_the_process_sends_goes_to_one_place(trace, kv):
    """Each client's end has a number of its own: a store in the connector's own process had 16 places."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]

    def how(step, layer):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as served:
                served.sendall(data_of(layer))
                assert len(client.recv(256)) == 256

    saves(kv, how)
    server.close()
    assert outside(trace) == [(Way.SOCKET, f"tcp 127.0.0.1:{port}", 3 * 256, 0, 0)]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_what_a_server_answers_to_its_own_process_is_no_store(trace, kv, tmp_path, family):
    """A connector's thread that serves its own loads: they counted as sent to the store."""
    where = ("127.0.0.1", 0) if family == socket.AF_INET else str(tmp_path / "door")
    with socket.create_server(where, family=family) as server:
        address = server.getsockname()

        def how(step, layer):
            with socket.socket(family) as client:
                client.connect(address)
                client.sendall(data_of(layer))
                with server.accept()[0] as served:
                    served.sendall(served.recv(256))
                assert len(client.recv(256)) == 256

        saves(kv, how)
    name = f"tcp 127.0.0.1:{address[1]}" if family == socket.AF_INET else "door"
    assert outside(trace) == [(Way.SOCKET, name, 256, 0, 0)]


@pytest.mark.parametrize("timeout", [None, 9.0])
def test_what_goes_through_a_connection_of_multiprocessing(trace, kv, tmp_path, timeout):
    """It writes to the descriptor, past the socket. A pipe has no name. The descriptor stays as it was, also
    where new sockets are to be non-blocking."""
    path = str(tmp_path / "s")
    with connection.Listener(path, "AF_UNIX") as door:
        client, pipe = connection.Client(path, "AF_UNIX"), connection.Pipe(duplex=False)
        server = door.accept()

        socket.setdefaulttimeout(timeout)

        def how(step, layer):
            client.send_bytes(data_of(layer))
            pipe[1].send_bytes(b"there")
            client.send({"more": 1})

        try:
            saves(kv, how)
        finally:
            socket.setdefaulttimeout(None)
        assert server.recv_bytes() and server.recv() == {"more": 1}
        assert os.get_blocking(client.fileno())
        for one in (server, client, *pipe):
            one.close()
    told = [(way, peer, failed) for way, peer, sent, _, failed in outside(trace) if sent > 256]
    assert told == [(Way.SOCKET, "s", 0)] * (timeout is None)


def test_a_segment_of_shared_memory(trace, kv):
    held = []

    def how(step, layer):
        held.append(shared_memory.SharedMemory(create=True, size=1024))
        held[0].buf[:256] = data_of(layer)

    try:
        saves(kv, how)
        assert [row[0] for row in outside(trace)] == [Way.SHARED_MEMORY]
    finally:
        held[0].close()
        held[0].unlink()


def test_names_and_sizes_are_looked_at_once_and_nothing_opened(trace, kv, tmp_path):
    def how(step, layer):
        (tmp_path / f"{step}.part").write_bytes(data_of(layer))
        (tmp_path / f"{step}.part").rename(tmp_path / f"{step}.kv")

    saves(kv, how, 2)
    (tmp_path / "2.kv").unlink()
    outside(trace)  # writes what is waiting
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    found = {os.path.basename(one.path): (one.exists, one.size) for one in look(trace.run_dir).files}
    assert found == {
        "1.kv": (True, 256), "1.part": (False, None), "2.kv": (False, None), "2.part": (False, None),
    }  # fmt: skip
    assert not [path for path in opened if path.startswith(str(tmp_path)) and path.endswith((".kv", ".part"))]
    assert write_rest(trace.run_dir) and read_rest_file(trace.run_dir)[0].files


@pytest.mark.parametrize("whose", ["its own", "anybody's", "a home", "gone"])
def test_files_from_before_the_run_are_counted(trace, kv, tmp_path, monkeypatch, whose):
    """Beside those that it wrote; but where anybody may leave files, as in /tmp, and in a user's home."""
    store, began = tmp_path / "store", 10**18
    for name in ("old/a.kv", "old/b.kv", "new/c.kv"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(b"x")
        os.utime(store / name, ns=(0, began + (1 if "new" in name else -1)))
    store.chmod(0o1777 if whose == "anybody's" else 0o755)
    monkeypatch.setenv("HOME", str(store if whose == "a home" else tmp_path / "home"))

    def how(step, layer):
        (store / "new" / str(step)).mkdir()
        (store / "new" / str(step) / "1.kv").write_bytes(data_of(layer))
        (store / f"{step}.kv").write_bytes(data_of(layer))

    saves(kv, how)
    outside(trace)  # writes what is waiting
    if whose == "gone":
        store.rename(tmp_path / "elsewhere")
    found = look(trace.run_dir, began)
    assert [(one.directory, one.files) for one in found.older] == [(str(store), 2)] * (whose == "its own")
    assert len(found.files) == 2


LOCKS = {
    "flock": "import fcntl; fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "lockf": "import fcntl; fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "os.lockf": "import os; os.lockf(f.fileno(), os.F_TLOCK, 0)",
}
LIBC = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.lockf(f.fileno(), 2, ctypes.c_long(0)): raise OSError(ctypes.get_errno(), "locked")
"""
LOCKS["libc lockf"] = LIBC


def is_locked(path, how):
    """Whether another process finds the file locked."""
    code = f"f = open({str(path)!r}, 'r+b')\n{how}"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode != 0


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_held_through_later_watched_calls(trace, kv, tmp_path, name):
    path, held = tmp_path / "store", {}

    def how(step, layer):
        if step == 1:
            path.write_bytes(b"")  # opened and closed before the lock is taken
            held["file"] = open(path, "r+b")  # noqa: SIM115
            exec(LOCKS[name], {"f": held["file"]})
        else:
            held["file"].write(data_of(layer))
            held["file"].flush()

    saves(kv, how, 3)
    assert is_locked(path, LOCKS[name])
    held["file"].close()
    assert not is_locked(path, LOCKS[name])


@pytest.mark.parametrize(
    ("before", "journal"),
    [
        *(("opened", journal) for journal in ("delete", "truncate", "persist", "memory", "wal", "off")),
        ("none", "delete"), ("none", "wal"), ("touched", "delete"),
    ],
)  # fmt: skip
def test_a_database_keeps_its_write_lock_through_watched_calls(trace, kv, tmp_path, before, journal):
    path, held = tmp_path / "store.db", {}

    def how(step, layer):
        if step == 1:
            if before == "touched":
                path.touch()
            elif before == "opened":
                with open(path, "ab"):
                    pass
            held["db"] = sqlite3.connect(path, isolation_level=None)
            held["db"].execute(f"pragma journal_mode={journal}")
            held["db"].execute("create table t (x)")
            held["db"].execute("begin immediate")
        held["db"].execute("insert into t values (?)", (data_of(layer),))

    saves(kv, how, 3)
    code = (
        f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0, isolation_level=None)"
        ".execute('begin immediate')"
    )
    busy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "locked" in busy.stderr, "another process got the write lock"
    held["db"].execute("commit")
    assert held["db"].execute("select count(*) from t").fetchone() == (3,)
    held["db"].close()


def test_a_databases_size_has_what_lies_in_its_write_ahead_log(trace, kv, tmp_path):
    """Of a store of 3.6 MB whose process was ended 4 KiB were said to lie there."""
    path, held = tmp_path / "store.db", []

    def how(step, layer):
        held.append(sqlite3.connect(path, isolation_level=None))
        held[0].execute("pragma journal_mode=wal")
        held[0].execute("create table t (x)")
        held[0].execute("insert into t values (?)", (data_of(layer) * 64,))

    saves(kv, how)
    outside(trace)  # writes what is waiting
    (lies,) = look(trace.run_dir).files
    parts = [path.stat().st_size, path.with_name("store.db-wal").stat().st_size]
    assert lies.size == sum(parts) and parts[1] > 64 * 256
    held[0].close()
    (lies,) = look(trace.run_dir).files
    assert lies.size == path.stat().st_size > 64 * 256


def test_no_file_of_the_connector_is_opened_by_the_agent(trace, kv, tmp_path):
    store, opened = tmp_path / "store", []
    store.mkdir()
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)

    def how(step, layer):
        np.save(store / f"{step}.npy", layer[SLOTS // BLOCK, SLOTS % BLOCK].numpy())

    saves(kv, how, 3)
    assert len([path for path in opened if path.startswith(str(store))]) == 3, "by the connector itself"


SERVER = """
import socket
from kvtrace.agent import targets
from kvtrace.agent.outside import sockets
targets.install_all()
server = socket.create_server(("127.0.0.1", 0))
with socket.create_connection(server.getsockname()) as client, server.accept()[0] as served:
    print(sockets.name_of(served) == sockets.name_of_address(server.getsockname()))
"""


def test_a_server_is_known_before_any_connector_is_made():
    """One that a connector's module starts waits in ``accept`` from then on."""
    told = subprocess.run([sys.executable, "-c", SERVER], check=True, capture_output=True, text=True)
    assert told.stdout == "True\n"
