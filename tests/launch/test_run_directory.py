"""The run directory is made once, private, and never written over."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from kvtrace.launch.errors import LaunchError
from kvtrace.launch.rundir import RunDir, safe_name
from kvtrace.regular import write_json


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_default_place_and_collision() -> None:
    one = RunDir.create("demo", now=0)
    two = RunDir.create("demo", now=0)
    three = RunDir.create("demo", now=0)
    assert one.path.parent == Path.cwd() / "reports"
    assert one.path.name.endswith("-demo") and len(one.path.name) == len("19700101-000000-demo")
    assert [two.path.name, three.path.name] == [f"{one.path.name}-2", f"{one.path.name}-3"]
    assert _mode(one.path) == _mode(one.path / "spool") == 0o700
    assert one.shown == f"reports/{one.path.name}"


def test_output_may_be_new_or_empty() -> None:
    assert _mode(RunDir.create("x", Path("a/b/c")).path) == 0o700
    os.mkdir("empty")
    assert RunDir.create("x", Path("empty")).path == Path.cwd() / "empty"


@pytest.mark.parametrize("output", ["x" * 300, "a\0b"])
def test_an_impossible_place_is_one_line_and_leaves_nothing(output: str) -> None:
    with pytest.raises((LaunchError, ValueError)) as caught:
        RunDir.create("x", Path(output))
    assert "\n" not in str(caught.value) and os.listdir(".") == []


def test_half_made_parents_are_removed() -> None:
    with pytest.raises(LaunchError):
        RunDir.create("x", Path("new") / ("y" * 300))
    assert os.listdir(".") == []


def test_discard_removes_what_was_made() -> None:
    rundir = RunDir.create("x")
    write_json(rundir.path / "run.json", {})
    rundir.discard()
    assert os.listdir(".") == []
    os.mkdir("empty")
    rundir = RunDir.create("x", Path("empty"))
    write_json(rundir.path / "run.json", {})
    rundir.discard()
    assert os.listdir(".") == ["empty"] and os.listdir("empty") == []


def test_discard_keeps_a_parent_with_other_runs() -> None:
    one, two = RunDir.create("x", now=0), RunDir.create("x", now=0)
    two.discard()
    one.discard()
    assert os.listdir(".") == []
    one, two = RunDir.create("x", now=0), RunDir.create("x", now=0)
    one.discard()
    assert os.listdir("reports") == [two.path.name]


def test_text_that_is_no_unicode_can_be_written() -> None:
    rundir = RunDir.create("x")
    name = os.fsdecode(b"\xff")
    write_json(rundir.path / "run.json", {"command": [name]})
    assert json.loads((rundir.path / "run.json").read_text()) == {"command": [name]}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("vllm", "vllm"),
        ("a/b c\n", "a-b-c"),
        ("..", "run"),
        ("", "run"),
        ("ü" * 3, "run"),
        ("x" * 99, "x" * 64),
    ],
)
def test_names_are_one_safe_component(given: str, name: str) -> None:
    assert safe_name(given) == name


def test_a_disk_that_is_full_keeps_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = RunDir.create("x")
    write_json(rundir.path / "run.json", {"n": 1})

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        write_json(rundir.path / "run.json", {"n": 2})
    assert json.loads((rundir.path / "run.json").read_text()) == {"n": 1}
    assert sorted(os.listdir(rundir.path)) == ["run.json", "spool"]
