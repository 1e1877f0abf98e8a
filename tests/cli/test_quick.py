"""The quick way to the version, the help and the answer: what the long way says, without its libraries."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvtrace.cli import quick
from kvtrace.cli.commands import app
from kvtrace.cli.quick import help_file

ROOT = Path(__file__).resolve().parents[2]
Shell = Callable[..., tuple[int, str, str]]
HEAVY = {
    "psutil", "typer", "click", "rich", "numpy", "pandas", "dataclasses", "inspect", "pydantic", "logging"
}  # fmt: skip


def loaded(*words: str) -> set[str]:
    """Modules that one command line loads, besides those of any Python."""
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom kvtrace.cli.app import main\n"
        f"try:\n    main({list(words)!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('loaded', *sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def of_kvtrace(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "kvtrace"}


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["explain", "-h"]], ids=" ".join)
def test_version_and_help_load_next_to_nothing(words: list[str]) -> None:
    modules = loaded(*words)
    assert not modules & {*HEAVY, "json", "re", "typing", "pathlib"}
    few = {"kvtrace", "kvtrace.cli", "kvtrace.cli.app", "kvtrace.cli.quick", "kvtrace.cli.screen",
           "kvtrace.errors"}  # fmt: skip
    assert of_kvtrace(modules) <= few


@pytest.mark.parametrize("option", [[], ["-v"]], ids=["short", "long"])
def test_explaining_a_report_loads_no_library(report: Path, option: list[str]) -> None:
    modules = loaded("explain", str(report), *option)
    assert not modules & HEAVY, modules & HEAVY
    assert not [name for name in modules if ".html" in name]  # nor the charts
    rooms = {name.split(".")[1] for name in of_kvtrace(modules) if "." in name}
    assert rooms <= {
        "cli", "render", "report", "gate", "trace", "errors", "grouped", "labels", "regular", "terms", "words"
    }  # fmt: skip


def test_no_verb_loads_the_analysis_before_it_runs() -> None:
    code = "import sys, kvtrace.cli.commands; print('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    heavy = {"numpy", "pandas", "pyarrow", "vllm", "torch"}
    assert done.returncode == 0 and not heavy & set(done.stdout.split())


def test_a_command_that_run_starts_waits_for_no_tables() -> None:
    code = "import sys, kvtrace.launch.session; print('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not {"pandas", "pyarrow"} & set(done.stdout.split())


def test_a_report_is_made_without_pandas() -> None:
    """Its frames are for exports: loading them takes longer than reading a short run."""
    code = "import sys, kvtrace.report.build, kvtrace.story.tell; print('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not {"pandas", "pyarrow"} & set(done.stdout.split())


def long_way(monkeypatch: pytest.MonkeyPatch, shell: Shell, *words: str) -> tuple[int, str, str]:
    with monkeypatch.context() as patch:
        patch.setattr(quick, "quick", lambda words: False)
        return shell(*words)


@pytest.mark.parametrize(
    ("options", "columns", "beside"),
    [
        *(
            (options, "72", "a lone report")
            for options in ([], ["-v"], ["-vv"], ["-v", "-v"], ["--verbose"], ["-v", "--no-color"])
        ),
        *(([], columns, "a run") for columns in ("", "72", "140")),
        (["-v"], "", "a run"), (["--no-color"], "140", "a lone report"),
    ],
)  # fmt: skip
def test_explain_says_the_same_on_both_ways(
    shell: Shell,
    report: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    columns: str,
    beside: str,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    if beside == "a run":
        (report.parent / "spool").mkdir()
        (report.parent / "spool" / "worker-1.kvt").write_bytes(b"")
    assert quick.quick(["explain", str(report), *options])
    shown = capsys.readouterr().out
    assert long_way(monkeypatch, shell, "explain", str(report), *options) == (0, shown, "")
    if beside == "a run":
        assert "Next  kvtrace why " in shown


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["explain"],
        ["explain", "DIRECTORY"],
        ["explain", "nowhere"],
        ["explain", "REPORT", "REPORT"],
        ["explain", "REPORT", "--format", "json"],
        ["explain", "REPORT", "-o", "x.html"],
        ["explain", "REPORT", "-x"],
        ["explain", "--", "REPORT"],
        ["requests", "REPORT"],
        ["--version", "explain"],
        ["run", "--", "python", "-h"],
        ["nope", "-h"],
    ],
    ids=" ".join,
)
def test_all_else_goes_the_long_way_and_nothing_is_said_twice(
    report: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"REPORT": str(report), "DIRECTORY": str(report.parent)}
    assert not quick.quick([names.get(word, word) for word in words])
    assert capsys.readouterr().out == ""


def test_a_narrow_terminal_and_completion_go_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert not quick.quick(["--help"])
    monkeypatch.setenv("COLUMNS", "80")
    assert quick.quick(["--help"])
    monkeypatch.setenv("_KVTRACE_COMPLETE", "complete_bash")
    assert not quick.quick(["--help"])


@pytest.mark.parametrize("content", ["", "{}", "[1"])
def test_errors_are_those_of_the_long_way(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    assert shell("explain", str(path)) == long_way(monkeypatch, shell, "explain", str(path))


def squeezed(text: str) -> str:
    """Without white space: lines break where they like."""
    return "".join(text.split())


def commands() -> Iterator[tuple[str, Any]]:
    def walk(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        yield " ".join(names), command
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*names, name))

    yield from walk(typer.main.get_command(app), ())


def test_the_help_that_is_kept_is_the_programs() -> None:
    """Whatever typer makes of its layout: every option, text and example of today, and no other option."""
    found = dict(commands())
    files = {Path(help_file(verb)) for verb in found}
    assert files == set(Path(help_file("")).parent.iterdir()), "run: python scripts/help_texts.py"
    for verb, command in found.items():
        text = Path(help_file(verb)).read_text(encoding="utf-8")
        kept = squeezed(text)
        options = {"-h", "--help"}
        for param in command.params:
            if param.param_type_name == "option":
                options |= {*param.opts, *param.secondary_opts}
            for said in (getattr(param, "help", None), getattr(param, "metavar", None)):
                assert squeezed(said or "") in kept, f"{verb}: {param.name}: python scripts/help_texts.py"
        listed = re.search(r"^Options:\n((?: .*\n|\n(?=  -))+)", text, re.M)
        assert listed is not None
        heads = re.findall(r"^  (-[^ ].*?)(?:  |$)", listed[1], re.M)
        assert {word for head in heads for word in re.findall(r"(?<!\w)--?[\w-]+", head)} == options, (
            f"{verb}: run: python scripts/help_texts.py"
        )
        for said in (command.help or "", command.epilog or ""):
            assert squeezed(said.replace("\b", "")) in kept, f"{verb}: run: python scripts/help_texts.py"
        for name, inner in getattr(command, "commands", {}).items():
            assert squeezed(f"{name} {inner.get_short_help_str(200)}") in kept
