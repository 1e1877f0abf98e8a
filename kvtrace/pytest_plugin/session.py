"""The agent in a process that is not run by ``kvtrace run``: hooked once, recording test by test."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtrace import CONFIG_VARIABLE

if TYPE_CHECKING:
    from kvtrace.pytest_plugin.trace import Trace
    from kvtrace.trace.config import AgentConfig

LIMIT_BYTES = 256 << 20
_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_TOO_LATE = (
    "kvtrace: vLLM's attention layers were imported before the fixture kvtrace was used (by a conftest, a "
    "test module or an earlier test) and cannot be hooked any more: put `kvtrace = true` under "
    "[tool.pytest.ini_options] (or [pytest] in pytest.ini), or give --kvtrace"
)


def activate() -> None:
    """Put the agent's hooks into this process, without recording yet. Once; cheap; never raises.

    vLLM may be imported afterwards, or not at all: each hook waits for its module.
    """
    from kvtrace.agent.plugin import activate as activate_agent
    from kvtrace.agent.plugin import retarget
    from kvtrace.agent.state import AGENT
    from kvtrace.trace.config import AgentConfig, new_salt

    if AGENT.armed:
        return
    if os.environ.get(CONFIG_VARIABLE):  # pytest itself runs under `kvtrace run`
        activate_agent()
        return
    # The agent opens a spool as it starts; this one is thrown away, each test gets its own.
    with tempfile.TemporaryDirectory(prefix="kvtrace-") as parking:
        config = AgentConfig(Path(parking), new_salt(), "pytest", LIMIT_BYTES)
        os.environ[CONFIG_VARIABLE] = config.to_text()
        try:
            activate_agent()
        finally:
            del os.environ[CONFIG_VARIABLE]
        retarget(None)


@contextmanager
def recording(node: pytest.Item, folders: pytest.TempPathFactory) -> Iterator[Trace]:
    """Record what vLLM does in this process, and in those that it starts, into a directory of its own.

    The directory is removed where ``Trace.keep`` stays false.
    """
    from kvtrace.agent.plugin import retarget
    from kvtrace.agent.state import AGENT
    from kvtrace.launch.environment import child_environment
    from kvtrace.pytest_plugin.trace import Trace

    config = _agent()
    outer = config.dir if CONFIG_VARIABLE in os.environ else None
    # vLLM makes sockets elsewhere, but paths of a run are shown to people: short names
    run_dir = folders.mktemp("kvtrace-" + re.sub(r"\W+", "-", node.name)[:40].strip("-"))
    text = replace(config, dir=run_dir, run=run_dir.name).to_text()
    retarget(str(run_dir))
    trace = Trace(
        run_dir, node.nodeid, ["pytest", *map(str, node.config.invocation_params.args)], time.time_ns()
    )
    try:
        if AGENT.recorder is None:
            pytest.fail(f"kvtrace: cannot write to {run_dir}: nothing would be traced", pytrace=False)
        with pytest.MonkeyPatch.context() as patch:
            # without another process its hooks are this one's; a test that wants processes sets it to 1
            for name, value in child_environment(os.environ, [], text, None).items():
                if os.environ.get(name) != value:
                    patch.setenv(name, value)
            if _IN_PROCESS not in os.environ:
                patch.setenv(_IN_PROCESS, "0")
            yield trace
    finally:
        trace.close()
        retarget(None if outer is None else str(outer))
        if not trace.keep:
            shutil.rmtree(run_dir, ignore_errors=True)


def _agent() -> AgentConfig:
    """The agent's configuration; fails the test where the agent cannot see what it is for."""
    from kvtrace.agent.state import AGENT

    if not AGENT.armed:
        from kvtrace.agent.targets import TARGETS

        if any(name in sys.modules for target in TARGETS for name in target.too_late_with):
            pytest.fail(_TOO_LATE, pytrace=False)
        activate()
    if not AGENT.armed:
        pytest.fail("kvtrace: the agent did not start in this process (see stderr)", pytrace=False)
    return AGENT.config
