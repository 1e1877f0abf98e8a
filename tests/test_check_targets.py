"""The agent's table of targets against vLLM's own sources, parsed and not imported."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import check_targets  # noqa: E402

from kvtrace.agent.targets import TARGETS  # noqa: E402
from kvtrace.versions import NEWEST, OLDEST  # noqa: E402

GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
CONTEXT = "vllm/forward_context.py"
OUTPUT = "vllm/v1/core/sched/output.py"


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
    assert "no targets missing" in out


def test_every_row_says_what_it_relies_on_and_for_which_versions() -> None:
    oldest, newest = (check_targets.parse_version(text) for text in (OLDEST, NEWEST))
    for target in TARGETS:
        assert target.expects, target.id
        first, last = (check_targets.parse_version(part) for part in target.versions.split(".. "))
        assert oldest <= first <= last <= newest, target.id


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (GRAPHS, "def run_fullgraph(", "def run_full(", "full-replay-v2"),
        (GRAPHS, "class CudaGraphManager:", "class GraphManager:", "full-replay-v2"),
        (CONTEXT, "def create_forward_context(", "def make_context(", "forward-context"),
        (CONTEXT, "    cudagraph_runtime_mode: ", "    runtime_mode: ", "forward-context"),
        (OUTPUT, "    new_block_ids: ", "    block_ids_given: ", "scheduler-output"),
    ],
)
def test_a_renamed_place_or_parameter_is_found(file: str, old: str, new: str, says: str) -> None:
    """The real sources with one change: the table must not hold any more."""
    read = check_targets.open_sources(installed())
    assert old in (read(file) or "")

    def changed(name: str) -> str | None:
        text = read(name)
        return text.replace(old, new) if text and name == file else text

    found = check_targets.check(changed, (0, 32, 0))
    assert [one.target.id for one in found if one.expected and one.problems] == [says]


def test_a_module_that_is_gone_is_named() -> None:
    found = check_targets.check(lambda name: None, (0, 32, 0))
    assert all(one.problems == (f"no module {one.target.module}",) for one in found)
    assert {one.target.id for one in found if not one.expected} == {
        "attention-decorator-old", "attention-direct-call-old",
    }  # fmt: skip


def test_a_wheel_is_read_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm/__init__.py", "")
        file.writestr(CONTEXT, "def create_forward_context(attn_metadata, batch_descriptor): ...")
    assert check_targets.main([str(wheel)]) == 1
    out = capsys.readouterr().out
    assert "create_forward_context has parameters (attn_metadata, batch_descriptor)" in out
    assert "vLLM 0.32.0: 12 targets missing" in out


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
