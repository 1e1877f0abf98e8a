"""``kvtrace run`` from the outside, with commands that need no vLLM."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtrace
from kvtrace.cli.run import parse_size
from kvtrace.errors import KvtraceError

Shell = Callable[..., tuple[int, str, str]]
SOURCE = str(Path(kvtrace.__file__).parent.parent)
# Stands for a vLLM process that loaded the agent: it writes a spool's head where the agent would.
FAKE_AGENT = """
import json, os, sys
config = json.loads(os.environ["KVTRACE_CONFIG"])
from kvtrace.trace.format import pack_header
with open(os.path.join(config["dir"], "spool", "x.kvt"), "wb") as file:
    file.write(pack_header({"pid": os.getpid(), "run": config["run"]}))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path


def _run(here: Path, *args: str, stdin: bytes = b"", **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvtrace", "run", *args],
        cwd=here,
        input=stdin,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": SOURCE} | environ,
        timeout=60,
        check=False,
    )


def _sh(here: Path, command: str) -> subprocess.CompletedProcess[str]:
    """kvtrace as a shell starts it, which says where its streams go."""
    env = os.environ | {"PYTHONPATH": SOURCE}
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=here, env=env, capture_output=True, text=True, check=False
    )


def _record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


def _own_lines(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    return [line for line in done.stderr.decode().splitlines() if line.startswith("kvtrace: ")]


@pytest.mark.parametrize(
    ("command", "code", "name"),
    [("exit 0", 2, None), ("exit 77", 77, None), ("kill -9 $$", 137, "SIGKILL")],
)
def test_the_exit_code_is_the_childs(here: Path, command: str, code: int, name: str | None) -> None:
    done = _run(here, "-o", "run", "--", "/bin/sh", "-c", command)
    assert done.returncode == code
    record = _record(here / "run")
    assert record["exit_code"] == (0 if code == 2 else code) and record["signal"] == name
    assert "no vLLM process was seen" in _own_lines(done)[-1]


def test_streams_pass_through_byte_for_byte(here: Path) -> None:
    data = bytes(range(256)) * 4096
    done = _run(here, "--", "/bin/sh", "-c", "cat; echo err >&2; exit 3", stdin=data)
    assert done.returncode == 3
    assert done.stdout == data
    assert [line for line in done.stderr.splitlines() if not line.startswith(b"kvtrace: ")] == [b"err"]


def test_other_open_files_reach_the_child_and_close_with_it(here: Path) -> None:
    reader, writer = os.pipe()
    code = f"import os; os.write({writer}, b'through')"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtrace", "run", "--", sys.executable, "-c", code],
        cwd=here,
        env=os.environ | {"PYTHONPATH": SOURCE},
        pass_fds=[writer],
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"through"
    process.wait()


def test_a_run_leaves_a_private_directory_under_reports(here: Path) -> None:
    done = _run(here, "--name", "my run!", "--", "/bin/sh", "-c", "echo $KVTRACE_CONFIG; umask 0; exit 5")
    (folder,) = (here / "reports").iterdir()
    assert folder.name.endswith("-my-run")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert _own_lines(done)[0] == f"kvtrace: recording to reports/{folder.name}"
    config = json.loads(done.stdout)
    assert config == {
        "dir": str(folder), "salt": config["salt"], "limit_bytes": 1 << 30, "run": "my-run",
        "device_timing": "sampled", "budget": 0.01, "watch": "full", "metadata_adapter": "",
        "keep_messages": False, "keep_settings": False, "as_device": False, "compiled": True, "copies": 0,
        "credit": 2.0,
    }  # fmt: skip
    assert len(bytes.fromhex(config["salt"])) == 16
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert config["salt"].encode() not in written + done.stderr


def test_a_named_budget_holds_from_the_first_step_on(here: Path) -> None:
    done = _run(here, "--budget", "2%", "--", "/bin/sh", "-c", "echo $KVTRACE_CONFIG; exit 5")
    config = json.loads(done.stdout)
    assert (config["budget"], config["credit"]) == (0.02, 0.0)


def test_run_json(here: Path) -> None:
    _run(here, "-o", "run", "--", "/bin/sh", "-c", "exit 4", "--api-key", "s3cret", VLLM_PLUGINS="a")
    record = _record(here / "run")
    assert record["schema"] == "kvtrace.run/1"
    assert record["command"][:4] == ["/bin/sh", "-c", "exit 4", "--api-key"]
    assert re.fullmatch("<string of 6 characters, [0-9a-f]{6}>", record["command"][4])
    assert record["name"] == "sh"
    assert set(record) == {
        "schema", "name", "command", "started_wall_ns", "ended_wall_ns", "exit_code", "signal",
        "host", "kvtrace", "python", "processes", "notes", "spools", "crc32", "profiles",
        "launcher", "left",
    }  # fmt: skip
    (row,) = record["processes"]
    assert set(row) == {"pid", "ppid", "name", "command", "vllm", "alive"}
    assert "s3cret" not in (here / "run/run.json").read_text()


def test_the_commands_own_options_are_untouched(here: Path) -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    own = ["--name", "x", "-o", "y", "--", "--limit", "--help", ""]
    for separator in ([], ["--"]):
        done = _run(here, *separator, sys.executable, "-c", code, *own)
        assert json.loads(done.stdout) == own


def test_the_overlay_is_gone_after_the_run(here: Path) -> None:
    code = "import os, sys; path = os.environ['PYTHONPATH'].split(':')[0]; print(path, os.path.isdir(path))"
    done = _run(here, "-o", "run", "--", sys.executable, "-c", code)
    assert done.stdout.decode().split() == [str(here / "run/overlay"), "True"]
    assert sorted(os.listdir(here / "run")) == ["run.json", "spool"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "no command"),
        (["--"], "no command"),
        (["--bogus", "--", "true"], "--bogus"),
        (["--limit", "x", "--", "true"], "--limit"),
        (["--limit", "1K", "--", "true"], "--limit"),
        (["--", "kvtrace-no-such-command"], "command not found: kvtrace-no-such-command"),
        (["--", "./none"], "command not found: ./none"),
        (["--", "./plain"], "not executable"),
        (["--", "./badfirstline"], "cannot run ./badfirstline"),
        (["--", "./"], "directory"),
        (["--", ""], "empty"),
        (["-o", "full", "--", "true"], "full is not empty"),
        (["-o", "plain", "--", "true"], "plain is not a directory"),
        (["-o", "plain/x", "--", "true"], "cannot make the run directory"),
        (["-o", "/proc/kvtrace", "--", "true"], "cannot make the run directory"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_nothing(
    here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, args: list[str], text: str
) -> None:
    monkeypatch.chdir(here)
    (here / "full").mkdir()
    (here / "full/mine").write_text("mine")
    (here / "plain").write_text("mine")
    (here / "badfirstline").write_text("#!/no/such/interpreter\n")
    (here / "badfirstline").chmod(0o755)
    before = sorted(here.rglob("*"))
    code, out, err = shell("run", *args)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvtrace: ") and text in line
    assert sorted(here.rglob("*")) == before
    assert (here / "full/mine").read_text() == (here / "plain").read_text() == "mine"


def test_a_script_without_a_first_line_runs_like_in_a_shell(here: Path) -> None:
    (here / "script").write_text('echo "$1"; exit 9\n')
    (here / "script").chmod(0o755)
    done = _run(here, "--", "./script", "a b")
    assert (done.returncode, done.stdout) == (9, b"a b\n")


def test_the_working_directory_may_be_gone(here: Path) -> None:
    (here / "gone").mkdir()
    command = f"cd gone && rmdir ../gone && exec {sys.executable} -m kvtrace run -- true"
    done = _sh(here, command)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def _fake_vllm(here: Path, code: str) -> str:
    path = here / "bin" / "vllm"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return str(path)


def test_a_vllm_without_the_agent_is_named(here: Path) -> None:
    vllm = _fake_vllm(here, "raise SystemExit(0)")
    done = _run(here, "-o", "run", "--", vllm, "serve")
    assert done.returncode == 2
    (row,) = _record(here / "run")["processes"]
    assert row["vllm"] is True
    assert f"vLLM was seen (pid {row['pid']})" in _own_lines(done)[-1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("-u KVTRACE_CONFIG", "lacks KVTRACE_CONFIG"),
        ("-u PYTHONPATH VLLM_PLUGINS=", "leaves kvtrace's folder out, and VLLM_PLUGINS=''"),
    ],
)
def test_a_vllm_that_is_kept_from_the_agent_says_by_what(here: Path, change: str, text: str) -> None:
    # lives until kvtrace has seen it as it is
    vllm = _fake_vllm(
        here,
        "import os, sys, time\nwhile '\"vllm\": true' not in open('run/run.json').read(): time.sleep(0.01)",
    )
    done = _run(here, "-o", "run", "--", "/bin/sh", "-c", f"env {change} {vllm} serve; exit 0")
    assert done.returncode == 2
    assert text in _own_lines(done)[-1]


@pytest.mark.parametrize("code", [0, 3])
def test_a_traced_run_keeps_the_code_and_names_the_next_command(here: Path, code: int) -> None:
    done = _run(here, "-o", "run", "--", sys.executable, "-c", FAKE_AGENT, str(code))
    assert done.returncode == code
    # an empty spool makes a report or a line that says why not: in both cases the way on
    assert "kvtrace explain run" in _own_lines(done)[-1]
    assert _record(here / "run")["processes"][0]["vllm"] is True


@pytest.mark.parametrize(
    ("command", "code", "deleted", "left"),
    [
        # its own code is 1 where run.json comes anew between its last unlink and its rmdir
        ("rm -r gone; exit 0", 0, "gone", []),
        ("rm -r gone; exit 5", 5, "gone", []),
        # as it leaves it then
        ("rm -r gone/spool gone/overlay", 0, "gone", []),
        ("rm -r gone/spool gone/overlay; touch gone/mine", 0, "gone/spool", ["mine"]),
    ],
)
def test_a_deleted_run_directory_is_said_and_the_code_kept(
    here: Path, command: str, code: int, deleted: str, left: list[str]
) -> None:
    done = _run(here, "-o", "gone", "--", "/bin/sh", "-c", command)
    assert done.returncode == code
    assert _own_lines(done)[1:] == [
        f"kvtrace: {deleted} was deleted while the command ran: there is nothing left to report"
    ]
    assert [path.name for path in here.glob("gone/*")] == left and (here / "gone").exists() == bool(left)


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_a_closed_or_full_stderr_changes_nothing(here: Path, stderr: str) -> None:
    done = _sh(here, f"{sys.executable} -m kvtrace run -- /bin/sh -c 'echo out; exit 6' {stderr}; echo $?")
    assert (done.returncode, done.stdout) == (0, "out\n6\n")


def test_an_error_on_a_full_stderr_keeps_its_exit_code(here: Path) -> None:
    done = _sh(here, f"env -u PYTHONUNBUFFERED {sys.executable} -m kvtrace explain nothing 2>/dev/full")
    assert done.returncode == 2


def test_processes_that_outlive_the_command_are_told(here: Path) -> None:
    server = FAKE_AGENT.replace("sys.exit(int(sys.argv[1]))", "input()")
    code = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {server!r}])\n"
        "while not os.path.exists('run/spool/x.kvt'): pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtrace", "run", "-o", "run", "--", sys.executable, "-c", code],
        cwd=here,
        env=os.environ | {"PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None and process.stdin is not None
    lines = []
    while not lines or "explain" not in lines[-1]:
        lines.append(process.stderr.readline().decode())
    assert process.wait(30) == 0
    process.stdin.close()
    process.stderr.close()
    assert any("vLLM still runs" in line for line in lines)
    assert (here / "run/overlay").is_dir()


def test_sizes() -> None:
    sizes = {
        "64K": 1 << 16,
        "512M": 512 << 20,
        "2GiB": 2 << 30,
        "1g": 1 << 30,
        "65536": 65536,
        "1 TB": 1 << 40,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "x", "-1", "1.5G", "1Q", "0", "63K", "9" * 40):
        with pytest.raises(KvtraceError):
            parse_size(text)
