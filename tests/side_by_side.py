"""Engines that tests look at when they have run. Those of all tests of the session run at first use, two at a
time: an engine in one process computes on one core, and a server starts on one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_env import vllm_env

KVTRACE = [sys.executable, "-m", "kvtrace"]

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
            env=vllm_env() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | env,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip


@dataclass(frozen=True)
class Ran:
    place: Place
    future: Future[Any]

    @property
    def done(self) -> Any:
        """What the script returned, or its exception."""
        return self.future.result()


Script = Callable[[Place], Any]


def run_all(scripts: Iterable[Script], model: Path, folder: Callable[[str], Path]) -> Mapping[Script, Ran]:
    """Two at a time, in order; what ``hangs`` is told by time: at the end, when nothing else computes."""
    started: dict[Script, Ran] = {}
    # paths of one length: a connector that pickles its configuration shows its store's
    places = {script: Place(folder(f"script-{n:02}"), model) for n, script in enumerate(scripts)}
    with pytest.MonkeyPatch.context() as patch:
        # a thread for each of two engines on two cores: a second one would wait in a loop, and so take its
        # core from the other engine
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "few_collections"), prepend=os.pathsep)
        for name, value in vllm_env().items():  # for what starts its engine in its own environment
            patch.setenv(name, value)
        # its worker in the core's process, as on a GPU: a CPU's vLLM starts one more
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        for last in (False, True):
            with ThreadPoolExecutor(2) as pool:
                for script, place in places.items():
                    if getattr(script, "hangs", False) is last:
                        started[script] = Ran(place, pool.submit(script, place))
    return started
