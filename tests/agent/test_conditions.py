"""A store that verify makes slow, or full, in the server's process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtrace.agent.outside import conditions, files
from kvtrace.trace.config import STORE_FULL, STORE_READ_ONLY, STORE_SLOW
from kvtrace.verify.store import Store

CODE = """
import sys, time
from kvtrace.agent.outside import conditions

conditions.install()
slept = []
time.sleep = slept.append

def opens(path, mode):
    slept.clear()
    try:
        with open(path, mode) as file:
            return ("slow" if sum(slept) >= 0.2 else "opened") + " " * bool(file)
    except OSError as error:
        return str(error.errno)

inside, outside = sys.argv[1:]
print(*(opens(path, mode).strip() for path in (inside, outside) for mode in ("wb", "rb")))
"""


def seen_by_the_server(store: Store, tmp_path: Path) -> list[str]:
    """Of a file in the store and of another one: written, read."""
    words = [str(tmp_path / "store" / "a"), str(tmp_path / "elsewhere")]
    environ = {**os.environ, **store.environ}
    command = [sys.executable, "-c", CODE, *words]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store", tmp_path / "is")


@pytest.fixture
def here(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store's folder, of which this process is the server."""
    monkeypatch.setattr(conditions, "_store", f"{tmp_path / 'store'}{os.sep}")
    monkeypatch.setattr(conditions, "_told", str(tmp_path / "is"))
    return tmp_path / "store"


def test_a_slow_store_opens_its_files_later(store: Store, tmp_path: Path) -> None:
    assert seen_by_the_server(store, tmp_path) == ["opened"] * 4 and not store.met
    store.act(STORE_SLOW)
    assert seen_by_the_server(store, tmp_path) == ["slow", "slow", "opened", "opened"]
    assert store.met == {STORE_SLOW}
    store.act("reset")
    assert seen_by_the_server(store, tmp_path) == ["opened"] * 4


def test_a_store_is_slow_for_a_bounded_time(
    store: Store, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many files an answer would seem never to come."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    store.act(STORE_SLOW)
    conditions.opens(here / "a")
    end = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: end)
    conditions.opens(here / "b")
    assert len(waited) == 1


def test_a_full_store_takes_no_file_and_gives_those_it_has(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / "a").write_bytes(b"kv")
    store.act(STORE_FULL)
    assert seen_by_the_server(store, tmp_path) == [str(errno.ENOSPC), "opened", "opened", "opened"]
    assert store.met == {STORE_FULL} and (tmp_path / "store" / "a").read_bytes() == b"kv"


def test_a_read_only_store_takes_no_change(store: Store, here: Path, tmp_path: Path) -> None:
    """Permissions stop nobody who may write everywhere. A folder that is there already is no change."""
    (here / "a").write_bytes(b"kv")
    store.act(STORE_READ_ONLY)
    assert seen_by_the_server(store, tmp_path)[1:] == ["opened"] * 3 and store.met == {STORE_READ_ONLY}
    conditions._audit("os.mkdir", (here / "a", 0o777, -1))
    for event, path in (("os.mkdir", "c"), ("os.rename", "a"), ("os.remove", "a")):
        with pytest.raises(OSError, match="Read-only"):
            conditions._audit(event, (here / path,))
    store.act("reset")
    conditions._audit("os.remove", (here / "a", -1))


def test_what_a_store_was_is_of_the_last_time_it_was_so(store: Store, tmp_path: Path) -> None:
    store.act(STORE_FULL)
    seen_by_the_server(store, tmp_path)
    store.act(STORE_FULL)
    assert not store.met


def test_a_native_writer_meets_a_full_store(
    store: Store, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors opens its files in Rust."""
    store.act(STORE_FULL)
    writes = files._writer(lambda tensors, path: "written")
    monkeypatch.setattr(files, "here", lambda: object())
    with pytest.raises(OSError, match="No space"):
        writes({}, here / "a")
    assert store.met == {STORE_FULL}
