"""A process that writes nothing is looked at from outside, twice: what is kept, and what never is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ENVIRON, RUN, Clocked, Look

from kvtrace.launch import spy as spy_module
from kvtrace.launch.rundir import RunDir
from kvtrace.launch.spy import FORBIDDEN, MISSING, Spy, SpyError, read_dump
from kvtrace.launch.stuck import MOST_ASKED, MOST_LOOKS, StuckWatch
from kvtrace.trace import format as fmt
from kvtrace.trace.facts import Header
from kvtrace.trace.format import Kind, Stop
from kvtrace.trace.stuck_file import ASK_FILE, Frame, Thread, read_stuck_file, standing
from kvtrace.trace.writer import Recorder

PID = 4242
AGENT = "/x/kvtrace/agent"
STEP = Frame("execute_model", f"{AGENT}/worker.py", 120)
WAITS = Frame("Event.wait", "/usr/lib/python3.11/threading.py", 629)


def hook(name: str, line: int = 40) -> Thread:
    """A thread in a hook, as py-spy shows it."""
    made = Frame("_kvt_wrapper", f"<kvtrace wrapper of Mine.{name}>", 4)
    frames = (WAITS, Frame(f"Mine.{name}", "/m/mine.py", line), made, STEP)
    return Thread("MainThread", False, frames)


IDLE = Thread("MainThread", False, (WAITS, Frame("run_busy_loop", "/v/vllm/v1/engine/core.py", 9)))


class Scene(Clocked):
    """A run directory with one worker's spool, and what each look sees."""

    def __init__(self, folder: Path, after: float = 30.0) -> None:
        self.rundir = RunDir.create("run", folder / "run")
        self.sees, self.looked, self.native = (IDLE,), list[int](), list[bool]()
        path = self.rundir.path / fmt.SPOOL_DIR / f"worker-r0-{PID}-ab.kvt"
        self.recorder = Recorder(path, Header(pid=PID), 1 << 30)
        self.living = {PID}
        self.error = ""
        self.watch = StuckWatch(self.rundir, after, lambda: self.living, self.look, clock=lambda: self.now)

    def look(self, pid: int, native: bool) -> Spy:
        self.looked.append(pid)
        self.native.append(native)
        if self.error:
            raise SpyError(self.error)
        return Look(*self.sees)

    def writes(self) -> None:
        self.recorder.add((int(Kind.EXEC),) + (0,) * 7)
        self.recorder.flush()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_thread_that_stands_in_a_hook_at_both_looks_is_kept(scene: Scene) -> None:
    scene.sees = (hook("wait_for_save"),)
    scene.passes(29)
    assert not scene.looked
    scene.passes(10)
    assert scene.looked == [PID, PID]
    file, notes = read_stuck_file(scene.rundir.path)
    (look,) = file.looks
    assert not notes and look.stood and not look.asked and look.pid == PID
    assert look.silent_ns >= 35 * 10**9 and look.apart_ns >= 5 * 10**9 and look.resumed_ns is None
    place = standing(look.threads)
    assert place is not None and place.what == "wait_for_save"
    scene.passes(300)
    assert len(scene.looked) == 2  # one silence, one pair of looks
    scene.writes()
    scene.passes(1)
    assert read_stuck_file(scene.rundir.path)[0].looks[0].resumed_ns


def test_an_idle_process_is_looked_at_and_nothing_kept(scene: Scene) -> None:
    scene.passes(600)
    assert 18 <= len(scene.looked) <= 20 and not scene.watch.file.looks
    assert not (scene.rundir.path / "stuck.json").exists()


def test_a_first_step_that_hangs_is_found_after_an_idle_hour(scene: Scene) -> None:
    scene.passes(3600)
    scene.sees = (hook("start_load_kv"),)
    scene.passes(40)
    assert len(scene.watch.file.looks) == 1


def test_a_process_that_writes_between_the_looks_does_not_hang(scene: Scene) -> None:
    scene.sees = (hook("wait_for_save"),)
    for _ in range(20):
        scene.passes(31)
        scene.writes()
    assert len(scene.looked) == 20 and not scene.watch.file.looks


def test_another_hook_at_the_second_look_is_no_hang(scene: Scene) -> None:
    scene.sees = (hook("start_load_kv"),)
    scene.passes(32)
    scene.sees = (hook("wait_for_save"),)
    scene.passes(10)
    assert len(scene.looked) == 2 and not scene.watch.file.looks


def in_step(line: int, active: bool = False, file: str = "/v/vllm/v1/worker/x.py") -> Thread:
    return Thread("MainThread", active, (Frame("all_reduce", file, line), STEP))


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (in_step(7), in_step(7), True),
        (in_step(7), in_step(8), False),  # it computes
        (in_step(7, active=True), in_step(7, active=True), False),
        (in_step(7, file="/s/torch/_inductor/a.py"), in_step(7, file="/s/torch/_inductor/a.py"), False),
    ],
)
def test_outside_of_hooks_a_worker_hangs_at_the_line_it_waits(
    scene: Scene, first: Thread, second: Thread, kept: bool
) -> None:
    scene.sees = (first,)
    scene.passes(32)
    scene.sees = (second,)
    scene.passes(10)
    assert bool(scene.watch.file.looks) == kept


def test_a_hook_in_the_general_wrapper_is_known_by_its_frame() -> None:
    wrapper = Frame("wrapper", f"{AGENT}/wrappers.py", 80)
    thread = Thread("MainThread", False, (WAITS, Frame("Mine.get_finished", "/m/mine.py", 3), wrapper, STEP))
    place = standing((IDLE, thread))
    assert place is not None and place.what == "get_finished" and [f.line for f in place.way] == [3, 629]


def test_a_signal_asks_at_once_and_what_it_shows_is_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path, after=0)
    scene.passes(100)
    assert not scene.looked
    scene.watch.ask()
    scene.passes(10)
    assert len(scene.looked) == 2
    (look,) = scene.watch.file.looks
    assert look.asked and not look.stood
    scene.passes(100)
    assert len(scene.looked) == 2


def test_a_file_asks_as_the_signal_does(tmp_path: Path) -> None:
    scene = Scene(tmp_path, after=0)
    (scene.rundir.path / ASK_FILE).touch()
    scene.passes(10)
    assert len(scene.looked) == 2 and scene.watch.file.looks[0].asked
    assert not (scene.rundir.path / ASK_FILE).exists()


def test_who_asks_gets_a_look_past_those_that_nobody_asked_for(scene: Scene) -> None:
    for _ in range(MOST_ASKED + 3):
        scene.watch.ask()
        scene.passes(10)
    assert len(scene.watch.file.looks) == MOST_ASKED


def test_a_run_keeps_a_few_looks_only(scene: Scene) -> None:
    scene.sees = (hook("wait_for_save"),)
    for _ in range(MOST_LOOKS + 5):
        scene.passes(40)
        scene.writes()
    assert len(scene.watch.file.looks) == MOST_LOOKS and len(scene.looked) == 2 * MOST_LOOKS


def test_a_pid_that_is_not_of_the_run_is_never_looked_at(scene: Scene) -> None:
    scene.living.clear()
    scene.passes(100)
    assert not scene.looked


def test_a_recording_that_was_stopped_is_no_silence(scene: Scene) -> None:
    scene.recorder.stop(Stop.SIZE_LIMIT)
    scene.passes(100)
    assert not scene.looked


def test_after_the_command_was_told_to_end_nothing_is_looked_at(scene: Scene) -> None:
    scene.sees = (hook("wait_for_save"),)
    scene.passes(40)
    scene.watch.end()
    scene.writes()
    scene.passes(100)
    assert scene.watch.file.looks[0].resumed_ns is None and len(scene.looked) == 2


@pytest.mark.parametrize("why", [MISSING, FORBIDDEN])
def test_where_nothing_can_be_seen_one_line_says_what_to_do(
    scene: Scene, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    scene.error = why
    for _ in range(5):
        scene.passes(100)
        scene.writes()
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line and len(scene.looked) == 1
    assert read_stuck_file(scene.rundir.path)[0].unseen == why


def test_a_look_that_failed_is_made_again(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.sees, scene.error = (hook("wait_for_save"),), "py-spy: cannot read memory"
    scene.passes(31)
    scene.error = ""
    scene.passes(10)
    assert len(scene.watch.file.looks) == 1
    scene.writes()
    scene.error = "py-spy: cannot read memory"
    scene.passes(100)
    assert len(scene.looked) < 30 and "cannot read memory" in capsys.readouterr().err
    scene.writes()
    scene.error = ""
    scene.passes(40)
    assert len(scene.watch.file.looks) == 2  # the next silence is looked at all the same


def program(folder: Path, body: str) -> Path:
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def seen(pid: int) -> tuple[Thread, ...]:
    spy = Spy(pid)
    spy._process.wait(60)
    threads = spy.threads()
    assert threads is not None
    return threads


def test_without_the_right_to_trace_the_settings_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "Permission Denied: Try running again with elevated permissions by going 'sudo env ...'"
    path = program(tmp_path, f'echo "{said}" >&2; exit 1')
    monkeypatch.setattr(spy_module, "program", lambda: str(path))
    with pytest.raises(SpyError, match=r"ptrace_scope=0.*SYS_PTRACE"):
        seen(1)
    monkeypatch.setattr(spy_module, "program", lambda: None)
    with pytest.raises(SpyError, match=r"pip install 'kvtrace\[spy\]'"):
        Spy(1)


def test_where_native_frames_fail_it_looks_again_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = '{"name": "f", "filename": "/m/a.py", "module": null, "line": 3}'
    call = '{"name": "recv", "filename": "/l/libc.so.6", "module": "/l/libc.so.6", "line": 0}'
    answer = '[{"thread_name": "t", "active": false, "frames": [%s]}]'
    refuses = f"case $* in *--native*) echo no unwinding here >&2; exit 1;; esac; echo '{answer % frame}'"
    fake = program(tmp_path, refuses)
    monkeypatch.setattr(spy_module, "program", lambda: str(fake))
    spy = Spy(1, native=True)
    spy._process.wait(60)
    assert spy.threads() is None
    spy._process.wait(60)
    assert spy.threads() == (Thread("t", False, (Frame("f", "/m/a.py", 3),)),)
    assert spy.no_native == "py-spy: no unwinding here"
    program(tmp_path, f"echo '{answer % f'{call}, {frame}'}'")
    spy = Spy(1, native=True)
    spy._process.wait(60)
    (thread,) = spy.threads() or ()
    assert thread.frames[0] == Frame("recv", "/l/libc.so.6", 0, native=True) and not spy.no_native


def test_native_frames_are_taken_of_a_process_that_hangs_only(scene: Scene) -> None:
    scene.sees = (hook("wait_for_save"),)
    scene.passes(40)
    assert scene.native == [False, True]
    scene.writes()
    scene.passes(1)
    scene.watch.ask()
    scene.passes(1)
    scene.writes()
    scene.passes(10)
    assert scene.native == [False, True, False, False]


def test_names_and_lines_are_read_and_nothing_else() -> None:
    frame = {"name": "f", "filename": "/m/a.py", "line": 3, "locals": [{"name": "p", "repr": "'prompt'"}]}
    given = {"thread_name": None, "os_thread_id": 7, "active": True, "frames": [frame]}
    (thread,) = read_dump(json.dumps([given]).encode())
    assert thread == Thread("thread 7", True, (Frame("f", "/m/a.py", 3),))
    for bad in (b"", b"[1]", b'[{"frames": 3}]', b"null"):
        with pytest.raises(SpyError):
            read_dump(bad)


def test_the_signal_for_kvtrace_is_not_passed_on(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGRTMIN); raise SystemExit(7)"
    command = [*RUN, "-o", "run", "--", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, check=False)
    assert done.returncode == 7
