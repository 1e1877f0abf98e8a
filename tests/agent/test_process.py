"""One spool a process: forked children, spools moved on between engines, the inert entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrace.agent.engine import worker
from kvtrace.agent.state import AGENT
from kvtrace.trace import hooks
from kvtrace.trace.facts import TargetFact
from kvtrace.trace.format import Kind, Role
from kvtrace.trace.reader import Spool, spool_paths
from kvtrace.trace.rows import code, kind

from . import fakes
from .fakes import on_worker

pytestmark = pytest.mark.usefixtures("each_recorder")


def saves(path: Path) -> int:
    spool = Spool(path)
    return sum(
        int(((kind(c[:, 0]) == Kind.HOOK) & (code(c[:, 0]) == hooks.SAVE_LAYER.code)).sum())
        for c in spool.chunks()
    )


def test_a_forked_child_opens_its_own_spool_when_it_writes(trace):
    connector = on_worker(fakes.Storing())
    connector.save_kv_layer("layer.0", "kv", None)
    AGENT.flush()
    for calls in (0, 2):
        pid = os.fork()
        if pid == 0:
            AGENT.after_fork()
            for _ in range(calls):
                connector.save_kv_layer("layer.0", "kv", None)
            AGENT.flush()
            os._exit(0)
        os.waitpid(pid, 0)
    counts = sorted(saves(path) for path in spool_paths(trace.run_dir))
    assert counts == [1, 2], "the idle child left no file, the other one its own"
    pids = {Spool(path).header["pid"] for path in spool_paths(trace.run_dir)}
    assert len(pids) == 2 and os.getpid() in pids


def test_standing_facts_are_in_every_spool_that_is_opened(trace):
    target = TargetFact(id="x", status="found")
    AGENT.fact(target, Role.FRONT, standing="x")
    AGENT.close()
    AGENT.open(AGENT.config)
    spools = [Spool(path) for path in spool_paths(trace.run_dir)]
    assert len(spools) == 2
    for spool in spools:
        assert not list(spool.chunks()) or spool.info().end == "trailer"
        assert [value for _, _, value in spool.facts] == [target.to_json()]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "KVTRACE_CONFIG"}
    return subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True)


ACTIVATE = "from kvtrace.agent.plugin import activate; activate(); activate()"


def test_without_its_variable_the_entry_point_imports_nothing():
    run = python(f"{ACTIVATE}; import sys; print([m for m in sys.modules if 'kvtrace' in m])")
    assert run.returncode == 0 and not run.stderr
    assert "kvtrace.agent.state" not in run.stdout and "kvtrace.trace" not in run.stdout


@pytest.mark.parametrize("config", ["{", '{"dir": "/proc/none"}'])
def test_a_broken_configuration_costs_a_line_not_the_process(config):
    run = python(f"{ACTIVATE}; print('alive')", KVTRACE_CONFIG=config)
    assert run.returncode == 0 and run.stdout == "alive\n"
    assert len(run.stderr.splitlines()) == 1 and "kvtrace" in run.stderr


def test_the_agent_imports_only_the_standard_library(tmp_path):
    config = json.dumps({"dir": str(tmp_path), "salt": "ab" * 16})
    heavy = "{'numpy', 'pandas', 'rich', 'typer', 'torch', 'vllm'}"
    run = python(f"{ACTIVATE}; import sys; print(sorted({heavy} & set(sys.modules)))", KVTRACE_CONFIG=config)
    assert run.stdout == "[]\n", run.stderr
    (path,) = spool_paths(tmp_path)
    assert Spool(path).header["vllm"] is None
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_salt_is_nowhere_on_disk(tmp_path):
    salt = "0123456789abcdef" * 2
    config = json.dumps({"dir": str(tmp_path), "salt": salt, "run": "r"})
    python(ACTIVATE, KVTRACE_CONFIG=config)
    (path,) = spool_paths(tmp_path)
    content = path.read_bytes()
    assert salt.encode() not in content and bytes.fromhex(salt) not in content


def test_a_process_of_scheduler_and_worker_seals_a_step_once(trace):
    """By the scheduler, which hears of the step next; by the worker where it never will."""
    store = AGENT.recorder._store
    before = store.blocks

    def step(raised: bool = False) -> int:
        AGENT.add((int(Kind.EXEC),) + (0,) * 7)
        worker._end_of_step(raised)
        return store.blocks - before

    assert step() == 1  # a worker alone
    AGENT.roles.add(Role.SCHEDULER)
    assert step() == 1
    assert step(raised=True) == 2
