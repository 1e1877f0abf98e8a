"""``kvtrace explain`` and ``kvtrace docs`` as a user's shell sees them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample import sample

from kvtrace.report.digest import seal

GOLDEN = Path(__file__).parents[1] / "report" / "golden"
Shell = Callable[..., tuple[int, str, str]]


def test_the_default_is_one_screen_and_v_has_the_evidence(
    shell: Shell, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    brief = shell("explain", str(report))[1]
    assert len(brief.splitlines()) <= 23 and "Evidence" not in brief and "(-v)" in brief
    code, out, err = shell("explain", "-v", str(report))
    assert (code, err) == (0, "")
    *page, following = out.splitlines()
    assert page == (GOLDEN / "flagship.txt").read_text().splitlines()[:-1]
    # a report without its run directory: `kvtrace why` would find no spools
    assert following == "Next  kvtrace docs below-save-granularity" == brief.splitlines()[-1]


def test_vv_leaves_nothing_out(shell: Shell, report: Path) -> None:
    some, every = (shell("explain", option, str(report))[1] for option in ("-v", "-vv"))
    held: Any = sample()
    rows = [row["id"] for row in held["requests"]["rows"]]
    assert not all(row in some for row in rows) and all(row in every for row in rows)
    assert all(line.split()[0] in every for finding in held["findings"] for line in finding["remedy"])
    assert "gone from 0.20.0" in every and "engine core" in every[every.index("Processes") :]


def test_columns_set_the_width_of_a_pipe(shell: Shell, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, brief = {}, {}
    for columns in ("72", "400", "many", "-3", ""):
        monkeypatch.setenv("COLUMNS", columns)
        said = shell("explain", "-v", str(report))[1].split("Coverage")[0]
        wide[columns] = max(map(len, said.splitlines()))
        brief[columns] = max(map(len, shell("explain", str(report))[1].splitlines()))
    assert wide["72"] <= 72 < 100 < wide["400"]
    assert wide["many"] == wide["-3"] == wide[""] <= 100
    assert brief["72"] <= 72 < brief["many"] == brief["-3"] == brief[""] <= 100 < brief["400"]


def test_json_is_the_report(shell: Shell, report: Path) -> None:
    code, out, _ = shell("explain", "--format", "json", str(report))
    assert code == 0 and json.loads(out) == seal(sample()) and out.isascii()


def test_the_next_command_without_faults_shows_more_of_the_same(shell: Shell, tmp_path: Path) -> None:
    value: Any = sample()
    value["findings"] = []
    value["ledger"]["saves"]["prompts"]["saved"] = {"written": 1.0}
    path = tmp_path / "my report.json"
    path.write_text(json.dumps(seal(value)))
    assert shell("explain", str(path))[1].splitlines()[-1] == f"Next  kvtrace explain '{path}' -v"
    following = shell("explain", "-v", str(path))[1].splitlines()[-1]
    assert following == f"Next  kvtrace explain '{path}' --format markdown"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"{}", "no kvtrace report"),
        (b'{"schema": "kvtrace.report/3"}', "newer kvtrace"),
        (b'{"schema": "kvtrace.report/1"}', "older kvtrace"),
        (b'{"schema": "kvtrace.report/2", "run": []}', "damaged report"),
        (b"[" * 100_000, "nested too deep"),
        (b"\xff\xfe\x00\x01", "not UTF-8"),
        (b'{"schema": "\\u001b[2J\\ud800\\n"}', "another kind"),
        (None, "no such file"),
    ],
)
@pytest.mark.parametrize("format", ["text", "json", "markdown"])
def test_bad_input_is_one_line_and_exit_2(
    shell: Shell, tmp_path: Path, data: bytes | None, says: str, format: str
) -> None:
    path = tmp_path / "report.json"
    if data is not None:
        path.write_bytes(data)
    code, out, err = shell("explain", str(path), "--format", format)
    assert (code, out) == (2, "")
    assert err.startswith("kvtrace: ") and err.count("\n") == 1 and err.endswith("\n") and says in err
    assert "\x1b" not in err and "Traceback" not in err


def test_empty_run_directory(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell("explain", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1) and "no run in this directory" in err


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"KVTRACE\0" + b"\xff" * 200, os.urandom(4096)])
def test_run_directory_of_broken_spools(shell: Shell, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "worker-1.kvt").write_bytes(content)
    (tmp_path / "run.json").write_bytes(b"{not json")
    for words in (["explain"], ["requests"], ["why", "--request", "x"]):
        code, out, err = shell(*words, str(tmp_path))
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("kvtrace: ") and "internal error" not in err


def run_cli(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kvtrace", *words]
    return subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, **environment})


def in_terminal(*words: str, **environment: str) -> bytes:
    """What the command writes to a terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "kvtrace", *words]
    surroundings = {**os.environ, "TERM": "xterm-256color", **environment}
    child = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=follower, env=surroundings)
    os.close(follower)
    got = b""
    try:
        while part := os.read(leader, 65536):
            got += part
    except OSError:  # the last writer has gone
        pass
    assert child.wait(60) == 0
    os.close(leader)
    return got


def test_colour_in_a_terminal_and_none_where_it_is_not_wanted(report: Path) -> None:
    surroundings = dict.fromkeys(("NO_COLOR", "FORCE_COLOR", "COLORTERM"), "")
    assert b"\x1b[" in in_terminal("explain", str(report), **surroundings)
    assert b"\x1b" not in in_terminal("explain", str(report), **{**surroundings, "NO_COLOR": "1"})
    assert b"\x1b" not in in_terminal("explain", "--no-color", str(report), **surroundings)
    piped = run_cli("explain", str(report), FORCE_COLOR="1")
    assert piped.returncode == 0 and b"\x1b" not in piped.stdout


def test_a_terminal_without_unicode(report: Path) -> None:
    done = run_cli("explain", str(report), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0 and done.stderr == b"" and b"58 720" in done.stdout


def test_a_closed_pipe_is_quiet(report: Path) -> None:
    command = f"'{sys.executable}' -m kvtrace explain --format json '{report}'"
    code = "echo ${PIPESTATUS[0]}"
    script = f"{command} | head -c 10 >/dev/null; {code}; {command} | true; {code}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60)
    assert done.stderr == b"" and done.stdout.split() == [b"0", b"0"]


@pytest.mark.parametrize(("fault", "server"), [(False, True), (False, False), (True, True)])
def test_what_was_read_alone_is_to_be_verified_next(
    shell: Shell, tmp_path: Path, fault: bool, server: bool
) -> None:
    """With the run's own command; of a script with its connector."""
    value: Any = sample()
    value["findings"] = value["findings"][:1] if fault else []
    value["run"]["command"] = ["vllm", "serve", "tiny"] if server else ["python", "mine.py"]
    value["run"]["engines"][0]["connector"] |= {"module": "mine.kv", "class": "Mine"}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(seal(value)))
    following = shell("explain", str(path))[1].splitlines()[-1].removeprefix("Next  ")
    mine = "kvtrace verify --connector mine.kv:Mine --config '{...}'"
    assert following.startswith(
        "kvtrace docs" if fault else "kvtrace verify -- vllm serve tiny" if server else mine
    )


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_one_side_of_two_is_to_be_verified_with_the_other(shell: Shell, tmp_path: Path, role: str) -> None:
    value: Any = sample()
    value["findings"], value["run"]["command"] = [], ["vllm", "serve", "tiny"]
    value["run"]["engines"][0]["connector"]["role"] = role
    path = tmp_path / "report.json"
    path.write_text(json.dumps(seal(value)))
    assert (
        "verify --prefill 'vllm serve MODEL ...' --decode" in shell("explain", str(path))[1].splitlines()[-1]
    )


def test_a_long_command_takes_no_rows_from_what_was_found(shell: Shell, tmp_path: Path) -> None:
    value: Any = sample()
    value["findings"], value["run"]["command"] = [], ["vllm", "serve", "tiny", "--port", *["8000"] * 40]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(seal(value)))
    assert shell("explain", str(path))[1].endswith("kvtrace verify -- COMMAND, as it was run here\n")
    assert " ".join(["8000"] * 40) in " ".join(shell("explain", "-v", str(path))[1].split())
