"""Fixtures for every test: the engine's environment, the tiny model, an empty place for a run."""

from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from scenario_runs import Runs

import side_by_side
import tiny_model as tiny
from vllm_env import CACHE
from vllm_env import vllm_env as make_vllm_env

ROOT = Path(__file__).resolve().parent.parent

# How long an example takes says nothing on a machine that others use as well. The same examples each time:
# those that fail are found by --hypothesis-profile=fresh, not by a change that has nothing to do with them.
settings.register_profile("kvtrace", deadline=None, derandomize=True)
settings.register_profile("fresh", deadline=None, print_blob=True)
settings.load_profile("kvtrace")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: that a tenth of the time goes into looking whether it does, no
    test needs."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(autouse=True)
def _engine_needs_vllm(request: pytest.FixtureRequest) -> None:
    """A missing vLLM is a failure in one line: an engine test that is skipped proves nothing."""
    if request.node.get_closest_marker("engine"):
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            pytest.fail(
                "this test needs vLLM: run it by `make test`, which installs one into .venv", pytrace=False
            )


@pytest.fixture
def vllm_env() -> dict[str, str]:
    """The environment to start vLLM in: caches inside the clone, no network. A fresh copy for each test."""
    return make_vllm_env()


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the tiny model with real random weights; one word of its vocabulary is one token."""
    path = CACHE / "tiny-model"
    if not tiny.is_made(path):  # in a process of its own: torch stays out of this one
        made = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "tiny_model.py"), str(path)],
            capture_output=True,
            text=True,
            check=False,
            env=make_vllm_env(),
        )
        if made.returncode:
            pytest.fail(f"the tiny model could not be made: {made.stderr.strip()[-400:]}", pytrace=False)
    return path


@pytest.fixture(scope="session")
def runs(ran: Mapping[side_by_side.Script, side_by_side.Ran]) -> Runs:
    """The scenarios' runs on a real engine, each made once for all tests that look at it."""
    from scenario_runs import Runs

    return Runs(ran)


@pytest.fixture(scope="session")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Mapping[side_by_side.Script, side_by_side.Ran]:
    """By the function that runs it; a module names its own in ``SCRIPTS``."""
    items = request.session.items
    modules = dict.fromkeys(getattr(item, "module", None) for item in items)
    scripts = [script for module in modules for script in getattr(module, "SCRIPTS", ())]
    # the longest first: those of tests/verify are several servers each, those of tests/engine one engine
    scripts.sort(key=lambda one: ("engine." in one.__module__) - ("verify" in one.__module__))
    if any("runs" in getattr(item, "fixturenames", ()) for item in items):
        from scenario_runs import LANES

        scripts = [*LANES, *scripts]
    return side_by_side.run_all(
        scripts, tiny_model, lambda name: tmp_path_factory.mktemp(name, numbered=False)
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where a run may go: not there yet, its parent is."""
    return tmp_path / "run"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``shell("explain", path)``: kvtrace as a user's shell calls it, in this process: the exit code, stdout
    and stderr."""
    from kvtrace.cli.app import main

    def call(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call
