"""The user's own directory is damaged on purpose, and never what was there before."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtrace.trace.config import STORE_FULL
from kvtrace.verify.answers import VerifyError
from kvtrace.verify.store import Store, fillable
from kvtrace.verify.usage import DESCRIPTORS, MEMORY, THREADS, usage


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(VerifyError, match="not empty"):
        Store(tmp_path, tmp_path / "is")
    with pytest.raises(VerifyError, match="no directory"):
        Store(tmp_path / "mine", tmp_path / "is")


def test_what_came_later_is_damaged_and_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"x" * 100)
    place = tmp_path / "store"
    store = Store(place, tmp_path / "is")
    file = place / "a" / "b"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"k" * 100)
    (place / "link").symlink_to(outside)
    store.act("garbage")
    assert store.met == {"garbage"}
    assert file.stat().st_size == 100 and file.read_bytes() != b"k" * 100
    store.act("cut")
    assert file.stat().st_size == 50
    store.act("read-only")
    assert stat.S_IMODE(os.stat(place / "a").st_mode) == 0o500
    store.act("gone")
    assert not file.exists() and stat.S_IMODE(os.stat(place / "a").st_mode) != 0o500
    assert outside.read_bytes() == b"x" * 100


def test_a_directory_on_a_shared_file_system_is_never_filled(tmp_path: Path) -> None:
    place = tmp_path / "store"
    place.mkdir()
    Store(place, tmp_path / "is").act(STORE_FULL)
    assert not fillable(place) and not list(place.iterdir())


def test_a_file_system_of_its_own_is_filled_and_emptied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test may mount one: its size is made up here, the bytes are real."""
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 21, free=1 << 21))
    place = tmp_path / "store"
    place.mkdir()
    store = Store(place, tmp_path / "is")
    store.act(STORE_FULL)
    assert sum(path.stat().st_size for path in place.iterdir()) == 1 << 21
    assert store.met == {STORE_FULL} and not (tmp_path / "is").is_symlink()
    store.restore()
    assert not list(place.iterdir())


def test_what_processes_use_is_the_sum_of_a_session() -> None:
    mine = usage(os.getsid(0))
    assert mine[MEMORY] > 1 << 20 and mine[DESCRIPTORS] > 2 and mine[THREADS] >= 1
    assert usage(1 << 30) == {}
