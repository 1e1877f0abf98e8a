"""The GitHub action's own steps, run as a runner runs them: by bash, with the expressions filled in."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from side_by_side import Done, Place, Ran, Script

ROOT = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
LOSES_A_LAYER = """

class ChunkStore(ChunkStore):
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        if ".3." not in layer_name:
            super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
"""


def made(folder: Path) -> Path:
    """A connector's repository: the connector, and the smoke test of the docs."""
    (folder / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "scenarios" / "connectors" / "chunk_store.py", folder)
    shutil.copy(ROOT / "docs" / "ci" / "smoke.py", folder / "tests" / "smoke.py")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return made(tmp_path / "project")


def step(name: str, project: Path, **inputs: str) -> Done:
    """Runs the step ``name`` of the action with these inputs, the others at their defaults."""
    given = {key: str(one.get("default", "")) for key, one in ACTION["inputs"].items()} | inputs
    known = {
        "github.action_path": str(ROOT),
        "steps.python.outputs.python-path": sys.executable,
        **{f"inputs.{key}": value for key, value in given.items()},
    }
    one = next(one for one in ACTION["runs"]["steps"] if one.get("id") == name)
    assert one["shell"] == "bash"

    def fill(text: str) -> str:
        return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda m: known[m[1]], text)

    env = {**os.environ, **{key: fill(value) for key, value in one.get("env", {}).items()}}
    env |= {
        "GITHUB_OUTPUT": str(project / "output"),
        "GITHUB_STEP_SUMMARY": str(project / "summary.md"),
        "PYTHONPATH": str(project),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: half of the time
        "SMOKE_EXTRA": '{"unit": 32}',
    }
    # a runner's own way of calling bash
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", one["run"]]
    return subprocess.run(
        command, cwd=project, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def smoke(connector: str, module: str) -> str:
    return f"SMOKE_CONNECTOR={connector} SMOKE_MODULE={module} python tests/smoke.py"


def test_an_out_of_two_lines_writes_no_output_of_its_own(project: Path) -> None:
    done = step("gate", project, command="true", install="", out="x\nreport=/etc/passwd")
    assert done.returncode == 2 and "line break" in done.stdout
    assert not (project / "output").exists()


def test_the_key_of_the_cache_is_made_of_what_is_pinned(project: Path) -> None:
    done = step("key", project, command="true")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"hash=[0-9a-f]{16}\n", (project / "output").read_text())


def changed(place: Place) -> Done:
    """A healthy run, then one of a connector that was changed since, against the first one's baseline."""
    project = made(place.folder / "project")
    good = step("gate", project, command=smoke("ChunkStore", "chunk_store"), install="", out="good")
    assert good.returncode == 0, good.stdout[-3000:] + good.stderr[-3000:]
    (project / "output").rename(project / "good" / "output")
    baseline = project / "tests" / "kvtrace-baseline.json"
    shutil.copy(project / "good" / "kvtrace-baseline.json", baseline)  # as docs/ci.md says
    with (project / "chunk_store.py").open("a", encoding="utf-8") as source:  # the change of a pull request
        source.write(LOSES_A_LAYER)
    return step(
        "gate",
        project,
        command=smoke("ChunkStore", "chunk_store"),
        install="",
        baseline="tests/kvtrace-baseline.json",
        args="--min-saved-tokens=0.95\n",
        out="bad",
    )


SCRIPTS = (changed,)


@pytest.mark.engine
def test_the_action_fails_only_a_run_that_lost_a_layer(ran: Mapping[Script, Ran]) -> None:
    bad, project = ran[changed].done, ran[changed].place.folder / "project"
    outputs = dict(line.split("=", 1) for line in (project / "good" / "output").read_text().splitlines())
    report = json.loads((project / outputs["report"]).read_text())
    assert report["schema"] == "kvtrace.report/2" and (project / outputs["sarif"]).is_file()
    assert (project / "good" / "junit.xml").is_file()
    assert bad.returncode == 1, bad.stdout[-3000:] + bad.stderr[-3000:]
    assert "::error" in bad.stdout and "saved" in bad.stdout
    assert (project / "summary.md").read_text().strip()
