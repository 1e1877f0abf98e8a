"""On a real engine: a hook that hangs is found from outside, with the call that it hangs in and what the
connector's threads do meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from side_by_side import KVTRACE, Place, Ran, Script
from vllm_env import vllm_env

from kvtrace.report.load import read_report
from kvtrace.trace.stuck_file import StuckProcess, read_stuck_file, standing

from .hanging_ways import HOOKS, WAYS

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).with_name("hanging.py")


def until(true: Callable[[], bool], run: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 240
    while not true():
        assert run.poll() is None and time.monotonic() < deadline, run.poll()
        time.sleep(0.05)


def looks_in(run_dir: Path, way: str) -> list[StuckProcess]:
    """The looks that saw a thread in the function that hangs this way."""
    return [
        look
        for look in read_stuck_file(run_dir)[0].looks
        if any(frame.function.endswith(way) for thread in look.threads for frame in thread.frames)
    ]


def hangs(place: Place) -> None:
    """In one way after the other; each but the last is ended once it was seen."""
    run_dir, gates = place.run, place.folder / "gates"
    gates.mkdir()
    env = vllm_env() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [*KVTRACE, "run", "-o", str(run_dir), "--stuck-after", "1", "--"]
    with (place.folder / "log").open("wb") as out:
        run = subprocess.Popen(
            [*command, sys.executable, str(SCRIPT), str(place.model), str(gates)],
            env=env, stdout=out, stderr=out,
        )  # fmt: skip
        try:
            for way in WAYS:
                until(lambda way=way: bool(looks_in(run_dir, way)), run)
                (look, *_) = looks_in(run_dir, way)
                if way != WAYS[-1]:
                    (gates / way).touch()
            os.kill(look.pid, signal.SIGKILL)  # the last one never comes back
            assert run.wait(240) == 128 + signal.SIGKILL
        finally:
            run.kill()
            run.wait()


SCRIPTS = (hangs,)


def test_a_hook_that_hangs_is_named_with_calls_and_threads(ran: Mapping[Script, Ran]) -> None:
    assert ran[hangs].done is None
    run_dir = ran[hangs].place.run
    for way, hook in zip(WAYS, HOOKS, strict=True):
        place = standing(looks_in(run_dir, way)[0].threads)
        assert place is not None and place.what == hook
        assert way in " ".join(frame.function for frame in place.way)
    resumed = {way: looks_in(run_dir, way)[0].resumed_ns is not None for way in WAYS}
    assert resumed == {way: way != WAYS[-1] for way in WAYS}
    kept = json.loads((run_dir / "stuck.json").read_text())["looks"]
    frames = [frame for look in kept for thread in look["threads"] for frame in thread["frames"]]
    assert frames and all(
        set(frame) == {"function", "file", "line", "native"} for frame in frames
    )  # no values
    threads = {thread.name for way in WAYS for thread in looks_in(run_dir, way)[0].threads}
    assert {"uploader", "holder"} <= threads

    (last, *_) = looks_in(run_dir, WAYS[-1])
    assert any(frame.native for thread in last.threads for frame in thread.frames) or last.no_native

    report = read_report(run_dir / "report.json")
    (found,) = [one for one in report["findings"] if one["id"] == "hook-stuck"]
    assert found["severity"] == "fault" and "wait_for_save never came back" in found["title"]
    told = " ".join(found["evidence"])
    assert "hang_for_socket (hanging.py:" in told and "nothing more was recorded" in told
    assert "kvtrace: pid" in (ran[hangs].place.folder / "log").read_text()
