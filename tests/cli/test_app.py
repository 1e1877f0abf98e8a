"""The command itself: help, version, usage errors, and errors nobody expected."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import kvtrace.report.load
from kvtrace import __version__
from kvtrace.cli.commands import app
from kvtrace.cli.examples import EXAMPLES
from kvtrace.errors import KvtraceError

Shell = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(shell: Shell, option: str) -> None:
    assert shell(option) == (0, f"kvtrace {__version__}\n", "")


@pytest.mark.parametrize("verb", EXAMPLES)
def test_help_is_whole_and_has_examples(shell: Shell, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = shell(*verb.split(), "--help")
    assert code == 0 and "Usage: kvtrace" in out and err == ""
    assert shell(*verb.split(), "-h") == (code, out, err)
    assert all(f"    {line}\n" in out for line in EXAMPLES[verb])
    # a text that is cut ends in dots: options and metavars have theirs elsewhere
    assert not [line for line in out.splitlines() if re.search(r"\w\.\.\.$", line) and "[" not in line]
    assert max(map(len, out.splitlines())) <= 80


def test_every_verb_has_examples_that_are_command_lines() -> None:
    root: Any = typer.main.get_command(app)
    verbs = {"": root, **root.commands}
    verbs |= {f"scenario {name}": one for name, one in root.commands["scenario"].commands.items()}
    assert set(EXAMPLES) == set(verbs)
    for verb, lines in EXAMPLES.items():
        for line in lines:
            words = shlex.split(line.partition(" | ")[0])
            assert words[0] == "kvtrace" and line.startswith(f"kvtrace {verb}".rstrip())
            depth = 2 if words[1] == "scenario" else 1
            command = verbs[" ".join(words[1 : 1 + depth])]
            command.make_context(words[1], list(words[1 + depth :]))  # raises where it is none


def test_the_shell_completes_verbs_and_options(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        environment = {**os.environ, **words, "_KVTRACE_COMPLETE": "complete_bash"}
        code = "from kvtrace.cli.app import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
        )
        return done.stdout.split()

    assert completed("kvtrace expl") == ["explain"]
    assert "--format" in completed("kvtrace explain --")


def test_alone_it_shows_its_verbs(shell: Shell) -> None:
    _, out, err = shell()
    assert all(verb in out + err for verb in ("run", "explain", "docs"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nope"], "--nope"),
        (["nope"], "nope"),
        (["explain"], "PATH"),
        (["explain", "--nope", "x"], "--nope"),
        (["explain", "x", "y"], "y"),
        (["explain", "a\nb\x1b[2J"], "a b\\x1b[2J"),
        (["docs", "no-such-cause"], "no such cause"),
        (["docs", "decode-not-offerd"], "did you mean decode-not-offered"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(shell: Shell, words: list[str], says: str) -> None:
    code, out, err = shell(*words)
    assert (code, out) == (2, "")
    assert err.startswith("kvtrace: ") and err.count("\n") == 1 and says in err


def test_docs(shell: Shell) -> None:
    code, out, err = shell("docs")
    assert code == 0 and err == "" and "below-save-granularity" in out
    causes = json.loads(shell("docs", "--format", "json")[1])
    assert len(causes) > 40
    for cause in causes:
        assert cause["id"] in out and cause["meaning"].split()[0] in out
        code, page, err = shell("docs", cause["id"])
        assert code == 0 and err == "" and page.startswith(f"{cause['id']}\n")
        assert "\nHow it shows\n" in page and "\nWhat to do\n" in page


@pytest.mark.parametrize("topic", ["unified_attention", "prefix-caching", "cuda-graphs", "use_direct_call"])
def test_docs_answer_what_the_forum_asks(shell: Shell, topic: str) -> None:
    code, out, err = shell("docs", topic)
    assert code == 0 and err == "" and out.splitlines()[0].endswith("?")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KvtraceError("what", "where", "", "do\nthis"), 2, "kvtrace: what: where: do this\n"),
        (OSError(28, "No space left on device", "/x"), 2, "kvtrace: No space left on device: /x\n"),
        (KeyboardInterrupt(), 130, None),
        (RuntimeError("a\nb"), 2, None),
    ],
)
def test_errors_become_codes(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    line: str | None,
) -> None:
    def fail(path: str, progress: object) -> None:
        raise error

    monkeypatch.setattr(kvtrace.report.load, "read_report", fail)
    monkeypatch.delenv("KVTRACE_DEBUG", raising=False)
    got, out, err = shell("explain", "x")
    assert got == code and out == "" and err.strip().count("\n") == 0 and "Traceback" not in err
    if line is not None:
        assert err == line
    if isinstance(error, RuntimeError):
        assert "internal error: RuntimeError: a b (test_app.py:" in err
        monkeypatch.setenv("KVTRACE_DEBUG", "1")
        assert "Traceback" in shell("explain", "x")[2]
