"""The picture of kvtrace top holds on its screen, and the command ends as it should."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from synth import SpoolFile

from kvtrace.live.counts import HookTimes
from kvtrace.live.look import OpenHook, ProcessLook, Snapshot
from kvtrace.live.stuck import of_looks
from kvtrace.live.watch import LiveRun
from kvtrace.render.live import picture
from kvtrace.render.styled import cell_len
from kvtrace.trace.stuck_file import ASK_FILE, Frame, StuckFile, StuckProcess, Thread

Shell = Callable[..., tuple[int, str, str]]
TAKEN_OVER = b"\x1b[?1049h"
ROOT = Path(__file__).resolve().parents[2]


def crowded(look: Snapshot) -> Snapshot:
    """With more of everything than a screen holds, and names that are long, wide or obeyed by a terminal."""
    assert look.analysis is not None
    report = look.analysis.report
    saves = report["ledger"]["saves"]
    accounts = {f"not-saved:cause-{i}-{'x' * 60}": 10**12 + i for i in range(40)}
    ledger = {**saves, "accounts": accounts, "tokens": {}, "total": sum(accounts.values()), "grades": {}}
    finding = {
        "id": "a-cause", "severity": "fault", "share": 0.5, "title": "漢字 \x1b[2J" * 40, "tokens": 1,
        "stage": None, "requests": 1, "evidence": [], "events": [], "remedy": [], "versions": "", "docs": "",
    }  # fmt: skip
    report = {**report, "ledger": {"saves": ledger, "loads": ledger}, "findings": [finding] * 30}  # type: ignore[typeddict-item]
    processes = tuple(ProcessLook(f"worker-{i}-{'w' * 90}", i, 1e9, False, 3, 10**9, 1e9) for i in range(64))
    open_hooks = tuple(
        OpenHook(f"worker-{i}-{'w' * 90}", i, "wait_for_save", "漢字 \x1b[2J" * 40, 1e9, 1e9)
        for i in range(8)
    )
    hooks = {f"hook_{i}_{'h' * 50}": HookTimes(10**12, 10**18, 10**15, 10**9) for i in range(30)}
    return replace(
        look,
        run="r" * 300,
        state="running",
        steps=10**12,
        steps_per_s=1e9,
        arrived=10**12,
        preempted=10**12,
        records=10**15,
        processes=processes,
        open_hooks=open_hooks,
        hooks=hooks,
        analysis=replace(look.analysis, report=report),
    )


@pytest.mark.parametrize("size", [(80, 24), (80, 12), (40, 10), (20, 2), (200, 60)], ids=str)
def test_the_picture_holds(run: Path, size: tuple[int, int]) -> None:
    look = LiveRun(run).look(wait=True)
    for one in (look, crowded(look), replace(look, analysis=None, hooks={}, processes=())):
        lines = picture(one, *size)
        assert len(lines) <= size[1]
        assert all(cell_len(line.plain()) <= size[0] for line in lines)
        assert "\x1b" not in "".join(line.plain() for line in lines)


def test_every_part_has_its_place_on_a_full_screen(run: Path) -> None:
    text = "\n".join(line.plain() for line in picture(crowded(LiveRun(run).look(wait=True))))
    for part in ("Open hooks", "Tokens", "Hooks", "Processes", "Findings so far: 30"):
        assert part in text
    assert text.count("more\n") == 5  # what has no room is counted


def test_the_picture_says_what_the_report_says(run: Path) -> None:
    look = LiveRun(run).look(wait=True)
    text = "\n".join(line.plain() for line in picture(look))
    assert look.analysis is not None
    for finding in look.analysis.report["findings"]:
        assert finding["id"] in text
    assert "ended" in text.splitlines()[0]
    assert "2 requests, " in text
    assert "saved" in text and "%" in text


def test_a_step_that_stays_open_is_shown(run: Path) -> None:
    look = replace(LiveRun(run).look(), state="running")
    slow = ProcessLook("Worker-0", 4711, 61.0, False, 2, 41, 60.0)
    text = "\n".join(line.plain() for line in picture(replace(look, processes=(slow,))))
    assert "Worker-0 (pid 4711)" in text
    assert "61 s ago   41 and 1 more, 60 s" in text
    quick = replace(slow, open_s=0.01)  # as in every running engine
    assert "41 and" not in "\n".join(line.plain() for line in picture(replace(look, processes=(quick,))))


def looked(pid: int, *, stood: bool = True, resumed: int | None = None) -> StuckProcess:
    """A process that stood in wait_for_save at two looks, the second one 20 s after time 0."""
    frames = (
        Frame("recv", "/m/net.py", 12),
        Frame("_kvt_wrapper", "<kvtrace wrapper of Mine.wait_for_save>", 4),
    )
    thread = Thread("MainThread", False, frames)
    return StuckProcess(pid, "w.kvt", 20 * 10**9, 36 * 10**9, 5 * 10**9, False, stood, resumed, (thread,))


def test_a_hook_that_hangs_is_shown_with_its_bounds_and_call(run: Path) -> None:
    workers = [ProcessLook(f"Worker-{pid}", pid, 46.0, False) for pid in (1, 2, 3, 4)]
    went_on = ProcessLook("Worker-5", 5, 1.0, False)
    looks = (looked(1), looked(2, stood=False), looked(3, resumed=1), looked(5), looked(6))
    open_hooks = of_looks(StuckFile(looks=looks), [*workers, went_on], 30 * 10**9)
    assert open_hooks == (OpenHook("Worker-1", 1, "wait_for_save", "recv (net.py:12)", 15.0, 46.0),)
    look = replace(LiveRun(run).look(), state="running", open_hooks=open_hooks)
    lines = [line.plain() for line in picture(look)]
    at = next(i for i, line in enumerate(lines) if line.startswith("Open hooks"))
    assert lines[at + 1].split() == [
        "wait_for_save", "·", "Worker-1", "(pid", "1)", "15", "s", "46", "s", "recv", "(net.py:12)",
    ]  # fmt: skip


def test_once_prints_one_picture(run: Path, shell: Shell) -> None:
    code, out, err = shell("top", run, "--once")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 24 and "\x1b" not in out
    again = shell("top", run)[1]  # and so it does into a pipe; the last line tells how old the ledger is
    assert again.splitlines()[:-1] == out.splitlines()[:-1]


def test_no_run_is_one_clear_line(tmp_path: Path, shell: Shell) -> None:
    code, out, err = shell("top", tmp_path / "none")
    assert (code, out) == (2, "")
    assert err.startswith("kvtrace: no such run directory: ") and err.count("\n") == 1


def on_a_terminal(folder: Path, *typed: tuple[bytes, bytes]) -> tuple[int, str]:
    """kvtrace top on a terminal: its exit code and what it showed. ``typed``: what is waited for on the
    screen, and the key that is pressed then."""
    waiting = list(typed)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtrace", "top", str(folder)],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
            if waiting and waiting[0][0] in shown:
                os.write(ours, waiting.pop(0)[1])
    except OSError:  # the other end is closed
        pass
    code = process.wait()
    os.close(ours)
    return code, shown.decode()


def one_process(tmp_path: Path) -> None:
    """A run with one process that is there: this one."""
    header = {
        "role": "front", "process": "MainProcess", "host": socket.gethostname(), "pid": os.getpid(),
        "wall_ns": time.time_ns(), "perf_ns": 0,
    }  # fmt: skip
    SpoolFile(tmp_path, "front-1", header).write()


def test_q_ends_it_with_0_and_leaves_the_last_picture(tmp_path: Path) -> None:
    one_process(tmp_path)
    code, shown = on_a_terminal(tmp_path, (TAKEN_OVER, b"q"))
    assert code == 0
    assert "\x1b[?1049h" in shown and shown.rstrip().endswith("\x1b[?1049l")
    assert "running" in shown and "q ends" in shown


def test_s_asks_kvtrace_run_for_the_stacks(tmp_path: Path) -> None:
    one_process(tmp_path)
    code, shown = on_a_terminal(tmp_path, (TAKEN_OVER, b"s"), (b"has the stacks", b"q"))
    assert code == 0 and "stuck.json has the stacks" in shown
    assert (tmp_path / ASK_FILE).is_file()


def test_a_run_that_has_ended_shows_its_last_picture(run: Path) -> None:
    code, shown = on_a_terminal(run)
    assert code == 0
    last = shown.rpartition("\x1b[?1049l")[2]
    assert "ended" in last and "Findings" in last
