"""Where things were written to, and what of it was there when the run was over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtrace.ledger.places import places
from kvtrace.ledger.run import Place
from kvtrace.trace import rows
from kvtrace.trace.format import Kind, Role, Way, pack_head
from kvtrace.trace.rest_file import OlderFiles, RestFile, RestingFile


def places_of(wrote: dict[str, tuple[Way, int]], rest: RestFile) -> list[Place]:
    names = dict(enumerate(wrote, 1))
    table = [
        rows.Outside(
            pack_head(Kind.OUTSIDE, Role.WORKER, wrote[name][0], 1), 0, 1, 1, at, wrote[name][1], 0, 0
        )
        for at, name in names.items()
    ]
    scan: Any = SimpleNamespace(name="s", names=names, outside=np.array(table, dtype=np.int64))
    engine: Any = SimpleNamespace(extra={}, tag=1, workers=[SimpleNamespace(spool="s")])
    return places([scan], [engine], rest)


def found(wrote: dict[str, tuple[Way, int]], *rest: RestingFile) -> list[tuple[str, str, int, int]]:
    return [(one.kind, one.name, one.files, one.size) for one in places_of(wrote, RestFile(files=rest))]


def test_a_database_has_the_size_that_it_has_at_the_end() -> None:
    """In a write-ahead log its rows come into its file at a checkpoint, which nobody sees."""
    wrote = {"/srv/kv.db": (Way.SQLITE, 4096)}
    assert found(wrote) == [("database", "/srv/kv.db", 0, 4096)]
    assert found(wrote, RestingFile("/srv/kv.db", True, 1 << 20)) == [("database", "/srv/kv.db", 0, 1 << 20)]


def test_segments_of_shared_memory_are_files_of_a_directory() -> None:
    wrote = {f"/dev/shm/kv{n}": (Way.SHARED_MEMORY, 4096) for n in range(3)}
    assert found(wrote) == [("directory", "/dev/shm", 3, 12288)]
    gone = [RestingFile(name, False) for name in wrote]
    assert found(wrote, gone[0]) == [("directory", "/dev/shm", 2, 8192)]
    assert found(wrote, *gone) == [("directory", "/dev/shm", 0, 0)]


def test_a_line_of_a_log_is_no_place() -> None:
    """ "Stored in" a file of 60 bytes, of a connector that keeps its KV in memory."""
    assert found({"/srv/my.log": (Way.FILE, 60)}) == []


def test_who_was_only_answered_is_no_place() -> None:
    """A server in the same process acknowledges what it got."""
    sent = {"tcp 10.0.0.2:6379": (Way.SOCKET, 1 << 20), "tcp 10.0.0.3:5000": (Way.SOCKET, 84)}
    assert [name for _, name, _, _ in found(sent)] == ["tcp 10.0.0.2:6379"]


def test_a_peer_has_what_was_sent() -> None:
    assert found({"tcp 10.0.0.2:6379": (Way.SOCKET, 512)}) == [("peer", "tcp 10.0.0.2:6379", 0, 512)]


def test_files_from_before_the_run_are_counted_where_it_wrote() -> None:
    """A store that outlives its engine, and of which nothing is found again: they lie there. What lies beside
    it in a directory that holds both may be anybody's."""
    wrote = {"/srv/kv/a/1.pt": (Way.FILE, 8192), "/srv/kv/a/2.pt": (Way.FILE, 64), "tcp h": (Way.SOCKET, 512)}
    for directory, older in (("/srv/kv/a", 19), ("/srv/kv", 0), ("/srv/kv/a/b", 19), ("/srv/k", 0)):
        rest = RestFile(older=(OlderFiles(directory, 19),))
        assert [(one.kind, one.older) for one in places_of(wrote, rest)] == [
            ("directory", older),
            ("peer", 0),
        ]
