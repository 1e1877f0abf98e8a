"""Nobody but the user puts anything into a run directory: what lies there is run with the user's rights."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import ENVIRON, RUN

from kvtrace.launch import private
from kvtrace.launch.errors import LaunchError
from kvtrace.launch.overlay import make_overlay
from kvtrace.launch.rundir import RunDir

ROOT = os.geteuid() == 0
OTHER = 65534
"""A second user's id. Only root can become another user; elsewhere we look at our own files as another."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like ``/tmp``: everybody may write, nobody may touch what is another's."""
    folder = Path(tempfile.mkdtemp(prefix="kvtrace-test-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def given_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a path somebody else's."""

    def give(path: Path) -> None:
        if ROOT:
            os.chown(path, OTHER, OTHER, follow_symlinks=False)
        else:
            me = os.getuid()
            monkeypatch.setattr(os, "geteuid", lambda: me + 1)

    return give


def as_second_user(attempt: Callable[[], object]) -> bool:
    """Whether the attempt succeeds for another user (root alone can try that)."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            attempt()
        except OSError:
            os._exit(1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def open_to_all(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def refused(output: Path) -> str:
    with pytest.raises(LaunchError) as caught:
        RunDir.create("x", output)
    assert "\n" not in str(caught.value) and "-o DIR" in str(caught.value)
    return str(caught.value)


def test_somebody_elses_empty_directory_is_refused(shared: Path, given_away: Callable[[Path], None]) -> None:
    theirs = open_to_all(shared / "r1")
    given_away(theirs)
    assert "belongs to user" in refused(theirs)
    assert os.listdir(theirs) == [] and stat.S_IMODE(theirs.stat().st_mode) == 0o777


def test_a_directory_below_somebody_elses_is_refused(
    shared: Path, given_away: Callable[[Path], None]
) -> None:
    theirs = shared / "theirs"
    theirs.mkdir()
    given_away(theirs)
    assert "belongs to user" in refused(theirs / "a/b")
    assert os.listdir(theirs) == []


def test_somebody_elses_link_is_refused(
    shared: Path, given_away: Callable[[Path], None], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    link = shared / "link"
    link.symlink_to(mine)
    RunDir.create("x", link / "one").discard()
    given_away(link)
    assert "belongs to user" in refused(link / "two")
    assert os.listdir(mine) == []


def test_a_path_of_which_anybody_may_swap_a_part_is_refused(tmp_path: Path) -> None:
    free = open_to_all(tmp_path / "free")
    assert f"others can write to {free} and exchange run" in refused(free / "run")
    assert os.listdir(free) == []
    (free / "a").mkdir()
    assert "exchange a" in refused(free / "a/b")
    assert os.listdir(free / "a") == []
    link = tmp_path / "link"
    link.symlink_to("free/../free/a")
    assert "exchange a" in refused(link)


def test_a_folder_like_tmp_will_do_and_is_closed_to_others(shared: Path) -> None:
    made = RunDir.create("x", shared / "r1").path
    overlay = make_overlay(made / "overlay")
    planted = overlay / "sitecustomize.py"
    before = planted.read_bytes()
    if ROOT:
        assert not as_second_user(lambda: planted.write_text("evil"))
        assert not as_second_user(lambda: os.rename(made, shared / "r2"))
        assert not as_second_user(lambda: os.listdir(made))
        assert as_second_user(lambda: (shared / "r2").mkdir())
    for place in (made, overlay):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert planted.read_bytes() == before


def test_our_own_empty_directory_is_closed_to_others(tmp_path: Path) -> None:
    mine = open_to_all(tmp_path / "mine")
    assert stat.S_IMODE(RunDir.create("x", mine).path.stat().st_mode) == 0o700


def test_folders_made_on_the_way_are_ours_under_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    try:
        run = RunDir.create("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o755


def test_a_group_may_write_where_nobody_else_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    project.chmod(0o775)
    own = project.stat().st_gid
    monkeypatch.setattr(private, "_private_group", lambda gid: gid == own)
    RunDir.create("x", project / "one")
    monkeypatch.setattr(private, "_private_group", lambda gid: False)
    assert f"others can write to {project}" in refused(project / "two")


def test_an_overlay_elsewhere_is_made_where_only_we_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(LaunchError, match="exchange kvtrace-overlay-"):
        make_overlay(Path("a:b"))
    assert os.listdir(tmp_path) == []


def test_run_refuses_in_one_line_and_runs_nothing(shared: Path, given_away: Callable[[Path], None]) -> None:
    """The attack: an empty directory lies in wait, and its overlay is exchanged while the run starts."""
    theirs = open_to_all(shared / "r1")
    if ROOT:
        given_away(theirs)
    output = theirs if ROOT else theirs / "run"
    command = [*RUN, "-o", str(output), "--", "touch", str(shared / "ran")]
    done = subprocess.run(command, cwd=shared, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("kvtrace: ") and done.stderr.count("\n") == 1 and "-o DIR" in done.stderr
    assert sorted(os.listdir(shared)) == ["r1"] and os.listdir(theirs) == []
