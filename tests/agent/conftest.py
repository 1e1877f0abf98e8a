from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtrace.agent.kv.caches import CACHES
from kvtrace.agent.state import AGENT, UNARMED
from kvtrace.agent.watch import background
from kvtrace.agent.watch.policy import POLICY
from kvtrace.trace import rows
from kvtrace.trace.config import AgentConfig
from kvtrace.trace.format import Kind
from kvtrace.trace.hooks import Hook
from kvtrace.trace.reader import Spool, spool_paths
from kvtrace.trace.writer import COMPILED

from .fakes import BLOCK, BLOCKS, kv_cache_config


class Trace:
    """The agent of this process, recording into a directory of the test's own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def read(self) -> tuple[Spool, np.ndarray]:
        AGENT.flush()
        (path,) = spool_paths(self.run_dir)
        spool = Spool(path)
        chunks = list(spool.chunks())
        return spool, np.concatenate(chunks) if chunks else np.empty((0, 8), dtype=np.int64)

    def names(self) -> dict[int, str]:
        return self.read()[0].names

    def table(self, kind: Kind) -> np.ndarray:
        """The rows of a kind, in their order."""
        table = self.read()[1]
        return table[rows.kind(table[:, 0]) == kind]

    def rows(self, kind: Kind) -> list[Any]:
        """The same, by the names of their fields."""
        return [rows.decode(words) for words in self.table(kind).tolist()]

    def calls(self, hook: Hook) -> np.ndarray:
        """The rows of a hook's calls."""
        table = self.table(Kind.HOOK)
        return table[rows.code(table[:, 0]) == hook.code]

    def facts(self, kind: int) -> list[dict[str, Any]]:
        return [value for fact, _, value in self.read()[0].facts if fact == kind]


class Which:
    """The recorder of the tests that run with each."""

    compiled = True


@pytest.fixture(scope="module", params=[False, True], ids=["python", "c"])
def each_recorder(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param and COMPILED is None:
        pytest.skip("the recorder in C was not built here")
    Which.compiled = request.param
    yield
    Which.compiled = True


@contextmanager
def recording(run_dir: Path, watch: str = AgentConfig.watch, **more: Any) -> Iterator[Trace]:
    how = {"compiled": Which.compiled, **more}
    AGENT.open(AgentConfig(run_dir, b"k" * 16, limit_bytes=1 << 20, run="test", watch=watch, **how))
    POLICY.__init__()  # type: ignore[misc]
    AGENT.worker.__init__()  # type: ignore[misc]
    background._on = False
    AGENT._failures = AGENT._exceptions = 0
    try:
        yield Trace(run_dir)
    finally:
        AGENT.close()
        AGENT.config = UNARMED
        AGENT.standing_facts.clear()


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Trace]:
    with recording(tmp_path) as made:
        yield made


@pytest.fixture
def sampled(tmp_path: Path) -> Iterator[Trace]:
    """The same where not every step is watched."""
    with recording(tmp_path, "sampled") as made:
        yield made


@pytest.fixture(scope="session")
def torch_is_ready() -> None:
    """At the first operation that is watched torch imports a lot, native code of others too."""
    import torch

    from kvtrace.agent.watch.operations import CopyWatch

    watch = CopyWatch(CACHES, None)
    watch.start()
    with torch.inference_mode():
        torch.arange(8.0).as_strided((2, 2), (2, 1))[1].clone()
    watch.stop()


@pytest.fixture
def caches() -> dict[str, Any]:
    """The KV caches of two layers, of which the agent knows the sizes alone."""
    import torch

    names = ["layer.0", "layer.1"]
    CACHES.__init__()  # type: ignore[misc]
    CACHES.configure(kv_cache_config(BLOCKS, BLOCK, names), {})
    return {name: torch.randn(BLOCKS, BLOCK, 8) for name in names}
