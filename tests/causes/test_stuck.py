"""hook-stuck and worker-stuck: what py-spy's looks at a silent process say, and what they don't."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from diagnosed import analyse, prompts
from synth import Rounding, Sim

from kvtrace.causes import Diagnosis
from kvtrace.causes.diagnosis import Finding
from kvtrace.ledger import read_run
from kvtrace.trace.stuck_file import Frame, StuckFile, StuckProcess, Thread
from kvtrace.trace.sums import summed

STEP = Frame("execute_model", "/x/kvtrace/agent/engine/worker.py", 120)
WAITS = Frame("Event.wait", "/usr/lib/python3.11/threading.py", 629)
HOOK = (
    WAITS,
    Frame("Mine.wait_for_save", "/site/site-packages/mine/store.py", 40),
    Frame("_kvt_wrapper", "<kvtrace wrapper of Mine.wait_for_save>", 4),
    STEP,
)
IN_HOOK = Thread("MainThread", False, HOOK)
UPLOADER = Thread(
    "uploader",
    False,
    (
        Frame("send", "/site/site-packages/mine/net.py", 12),
        Frame("Thread.run", "/usr/lib/python3.11/threading.py", 982),
    ),
)
OTHER = Thread("logger", False, (Frame("write", "/site/site-packages/other/log.py", 12),))
IN_STEP = Thread("MainThread", False, (Frame("all_reduce", "/site/site-packages/vllm/c.py", 7), STEP))


def look(*threads: Thread, stood: bool = True, resumed: int | None = None, pid: int = 100) -> StuckProcess:
    return StuckProcess(pid, "worker.kvt", 1, 36 * 10**9, 5 * 10**9, False, stood, resumed, threads)


def found(folder: Path, *looks: StuckProcess, unseen: str = "") -> tuple[dict[str, Finding], Diagnosis]:
    sim = Sim(folder)
    sim.serve(prompts([64, 96]), Rounding(32).policy())
    document = StuckFile(looks=looks, unseen=unseen).to_json()
    sim.dir.mkdir(parents=True, exist_ok=True)
    (sim.dir / "stuck.json").write_text(json.dumps(summed(document)))
    diagnosis = analyse(sim)
    return {one.id: one for one in diagnosis.findings if one.id.endswith("-stuck")}, diagnosis


def test_a_hook_that_never_came_back_is_a_fault_with_its_calls(tmp_path: Path) -> None:
    findings, _ = found(tmp_path, look(IN_HOOK, UPLOADER, OTHER))
    assert list(findings) == ["hook-stuck"]
    one = findings["hook-stuck"]
    assert one.severity == "fault" and "wait_for_save never came back" in one.title and one.tokens == 0
    told = " | ".join(one.evidence)
    assert "no step ended for 36 s, and at two looks 5.0 s apart" in told
    assert "Mine.wait_for_save (store.py:40) > Event.wait (threading.py:629)" in told
    assert "thread uploader: send (net.py:12)" in told and "logger" not in told
    assert "nothing more was recorded" in told


def test_native_calls_are_named_but_not_the_interpreters_own(tmp_path: Path) -> None:
    lib, python = "/usr/lib/libnixl.so.1", "/usr/lib/libpython3.11.so.1.0"
    calls = (
        Frame("0x7f00", "/usr/lib/libc.so.6", 0, True),
        Frame("nixlAgent::getXferStatus", lib, 0, True),
        Frame("lock_acquire", python, 0, True),
    )
    inside = Thread("MainThread", False, (*calls, *HOOK, Frame("main", "/usr/bin/python3.11", 0, True)))
    findings, _ = found(tmp_path / "a", look(inside))
    (line, *_) = findings["hook-stuck"].evidence
    assert line.endswith("Event.wait (threading.py:629) > nixlAgent::getXferStatus (libnixl.so.1)")
    findings, _ = found(tmp_path / "b", replace(look(IN_HOOK), no_native="py-spy: no unwinding"))
    assert "calls in native code are not known: py-spy: no unwinding" in " ".join(
        findings["hook-stuck"].evidence
    )


def test_a_hook_that_came_back_is_a_note(tmp_path: Path) -> None:
    findings, _ = found(tmp_path, look(IN_HOOK, resumed=12 * 10**9))
    one = findings["hook-stuck"]
    assert one.severity == "note" and "came back after 36 s or more" in one.title
    assert "12 s later it went on" in one.evidence


def test_a_worker_that_waits_outside_of_the_hooks(tmp_path: Path) -> None:
    findings, _ = found(tmp_path, look(IN_STEP))
    assert list(findings) == ["worker-stuck"] and findings["worker-stuck"].severity == "fault"
    assert "all_reduce (c.py:7)" in findings["worker-stuck"].evidence[0]


def test_a_worker_that_waits_for_anothers_hook_is_no_finding(tmp_path: Path) -> None:
    findings, _ = found(tmp_path, look(IN_STEP, pid=101), look(IN_HOOK))
    assert list(findings) == ["hook-stuck"]


def test_what_moved_and_an_idle_process_are_no_findings(tmp_path: Path) -> None:
    idle = Thread("MainThread", False, (WAITS,))
    findings, diagnosis = found(tmp_path, look(IN_HOOK, stood=False), look(idle))
    assert not findings
    said = {item.id for item in (*diagnosis.ruled_out, *diagnosis.not_observed)}
    assert not {"hook-stuck", "worker-stuck"} & said  # silence rules nothing out


def test_where_nothing_could_be_seen_it_is_not_observed(tmp_path: Path) -> None:
    findings, diagnosis = found(tmp_path, unseen="py-spy is not installed")
    (one,) = [item for item in diagnosis.not_observed if item.id == "hook-stuck"]
    assert not findings and "py-spy is not installed" in one.why


def test_a_damaged_file_is_left_out_with_a_word(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.serve(prompts([64]), Rounding(32).policy())
    sim.write()
    for text in ("{", "[]", '{"looks": [], "crc32": 1}'):
        (sim.dir / "stuck.json").write_text(text)
        run = read_run(sim.dir)
        assert not run.stuck.looks and any("stuck.json" in note for note in run.notes)
