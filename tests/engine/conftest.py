"""Scripts that tests look at. Those of all tests of the session run at first use, two at a time: an engine in
one process computes on one core."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_env import vllm_env as make_vllm_env

from .server import KVTRACE

Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Place:
    """Where a script runs; ``run`` is its run directory, ``store`` its connector's folder."""

    folder: Path
    model: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def start(self, *words: object, traced: bool = True, options: Sequence[str] = (), **env: str) -> Done:
        before = [*KVTRACE, "run", *options, "-o", str(self.run), "--"] if traced else []
        return subprocess.run(
            [*before, *map(str, words)],
            env=make_vllm_env() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | env,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip


@dataclass(frozen=True)
class Ran:
    place: Place
    future: Future[Done]

    @property
    def done(self) -> Done:
        return self.future.result()


Script = Callable[[Place], Done]


@pytest.fixture(scope="session")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Mapping[Script, Ran]:
    """By the function that runs it; a module names its own in ``SCRIPTS``."""
    modules = dict.fromkeys(getattr(item, "module", None) for item in request.session.items)
    scripts = [script for module in modules for script in getattr(module, "SCRIPTS", ())]
    with ThreadPoolExecutor(2) as pool:
        started = {}
        for number, script in enumerate(scripts):
            # paths of one length: a connector that pickles its configuration shows its store's
            folder = tmp_path_factory.mktemp(f"script-{number:02}", numbered=False)
            place = Place(folder, tiny_model)
            started[script] = Ran(place, pool.submit(script, place))
        wait(one.future for one in started.values())
    return started
