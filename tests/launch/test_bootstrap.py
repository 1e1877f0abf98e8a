"""The agent is in place before any of the user's code, and the user's own sitecustomize runs as ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in import write_sources

from kvtrace.launch.environment import child_environment
from kvtrace.launch.overlay import make_overlay
from kvtrace.trace.config import AgentConfig, new_salt
from kvtrace.trace.reader import Spool, spool_paths

# A vLLM of three modules: an op's consumer imports the decorator by name, as attention modules do.
DECORATOR = "vllm/model_executor/layers/attention/kv_transfer_utils.py"
CONSUMER = "vllm/model_executor/layers/attention/attention.py"
SOURCES = {
    DECORATOR: "def maybe_transfer_kv_layer(func):\n    return func\n",
    CONSUMER: (
        "from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer\n"
        "@maybe_transfer_kv_layer\n"
        "def unified_attention_with_output(query, key, value, output, layer_name):\n    pass\n"
    ),
}


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "site", SOURCES)


def python(tmp_path: Path, code: str, *options: str, path: str = "", traced: bool = True) -> str:
    run = tmp_path / "run"
    overlay = run / "overlay"
    if not overlay.is_dir():
        make_overlay(overlay)
    config = AgentConfig(run, new_salt()).to_text()
    environ = child_environment(os.environ | {"PYTHONPATH": path}, [], config, overlay)
    if not traced:
        del environ["KVTRACE_CONFIG"]
    done = subprocess.run(
        [sys.executable, *options, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WRAPPED = (
    "from vllm.model_executor.layers.attention import attention\n"
    "print(hasattr(attention.unified_attention_with_output, '__wrapped__'))\n"
)


def test_who_imports_attention_first_finds_it_hooked(tmp_path: Path, vllm: Path) -> None:
    assert python(tmp_path, WRAPPED, path=str(vllm)) == "True\n"
    assert python(tmp_path, WRAPPED, path=str(vllm), traced=False) == "False\n"


def test_importing_vllm_alone_leaves_no_spool(tmp_path: Path, vllm: Path) -> None:
    python(tmp_path, WRAPPED, path=str(vllm))
    assert spool_paths(tmp_path / "run") == []
    loaded = f"{WRAPPED}from kvtrace.agent.plugin import activate; activate(); activate()"
    python(tmp_path, loaded, path=str(vllm))
    (path,) = spool_paths(tmp_path / "run")
    spool = Spool(path)
    assert not list(spool.chunks())
    status = {value["id"]: value["status"] for _, _, value in spool.facts if "status" in value}
    assert status["attention-decorator"] == "found"


def test_a_python_without_vllm_loads_nothing_of_the_agent(tmp_path: Path) -> None:
    code = "import json, sys; print(json.dumps([m for m in sys.modules if m.startswith('kvtrace')]))"
    loaded = json.loads(python(tmp_path, code))
    assert set(loaded) == {"kvtrace", "kvtrace.agent", "kvtrace.agent.bootstrap"}


def users_sitecustomize(folder: Path, text: str) -> str:
    """The folder of one that the user has."""
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(text)
    return str(theirs)


@pytest.mark.parametrize("traced", [True, False])
def test_the_users_own_sitecustomize_runs_in_its_place(tmp_path: Path, traced: bool) -> None:
    theirs = users_sitecustomize(tmp_path, "import sys\nsys.theirs = __file__\nMARK = 7\n")
    code = "import sys, sitecustomize; print(sys.theirs, sitecustomize.MARK, sitecustomize.__file__)"
    mine = f"{theirs}/sitecustomize.py"
    assert python(tmp_path, code, path=theirs, traced=traced).split() == [mine, "7", mine]


def test_what_the_users_sitecustomize_raises_is_as_without_us(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": users_sitecustomize(tmp_path, "raise RuntimeError('mine')\n")}
    overlay = make_overlay(tmp_path / "overlay")
    told = []
    for given in (environ, child_environment(environ, [], "{}", overlay)):
        done = subprocess.run([sys.executable, "-c", "1"], env=given, capture_output=True, text=True)
        told.append((done.returncode, done.stderr))
    assert told[0] == told[1] and "RuntimeError: mine" in told[0][1]


def test_nested_runs_wait_once(tmp_path: Path) -> None:
    inner = make_overlay(tmp_path / "inner")
    code = "import sys; print(sum(type(f).__name__ == '_FirstImport' for f in sys.meta_path))"
    assert python(tmp_path, code, path=str(inner)) == "1\n"


def test_where_something_came_first_the_targets_say_so(tmp_path: Path, vllm: Path) -> None:
    code = f"{WRAPPED}from kvtrace.agent.plugin import activate; activate()"
    overlay = make_overlay(tmp_path / "run/overlay")
    (overlay / "sitecustomize.py").unlink()
    assert python(tmp_path, code, path=str(vllm)) == "False\n"
    (path,) = spool_paths(tmp_path / "run")
    spool = Spool(path)
    assert not list(spool.chunks())
    targets = {value["id"]: value for _, _, value in spool.facts if "status" in value}
    assert targets["attention-decorator"]["status"] == "late"
    assert "layers.attention.attention was imported before" in targets["attention-decorator"]["detail"]
    assert targets["scheduler"]["status"] == "pending"
