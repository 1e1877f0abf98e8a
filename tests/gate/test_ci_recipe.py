"""The recipe for a project's CI: the script, the action and the page, as far as they go without an engine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import connector_ci
import pytest
import tomllib

from kvtrace.cli.commands import app
from kvtrace.gate.rules import from_table

ROOT = Path(__file__).resolve().parents[2]
ACTION = (ROOT / "action.yml").read_text(encoding="utf-8")


def test_options_and_the_words_for_check() -> None:
    args = connector_ci.options(
        [
            "--install",
            ".",
            "--baseline",
            "b.json",
            "--check=--min=save_kv_layer=1.0",
            "--github",
            "--",
            "x",
            "--",
            "y",
        ]
    )
    assert args.command == ["x", "--", "y"] and args.install == ["."]
    assert connector_ci.check_words(args) == [
        *("--junit", "kvtrace-ci/junit.xml", "--sarif", "kvtrace-ci/check.sarif"),
        *("--baseline", "b.json", "--github", "--min=save_kv_layer=1.0"),
    ]
    assert connector_ci.baseline_name("tests/b.json") == "b.json"


@pytest.mark.parametrize("words", [[], ["--"], ["python", "x.py"], ["--nosuch", "--", "x"]])
def test_wrong_usage_is_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        connector_ci.options(words)
    assert ended.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_nothing_is_written_where_something_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert connector_ci.main(["--no-setup", "--out", str(tmp_path), "--", "true"]) == 2
    assert "holds something" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_environment_keeps_the_projects_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    env = connector_ci.environment(Path(sys.executable))
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and env["HF_HUB_OFFLINE"] == "1"
    assert env["PATH"].startswith(str(Path(sys.executable).parent))


def test_every_input_of_the_action_is_used_and_declared() -> None:
    block = ACTION.partition("inputs:")[2].partition("outputs:")[0]
    declared = set(re.findall(r"^  ([a-z]+):$", block, re.MULTILINE))
    assert declared == set(re.findall(r"inputs\.([a-z]+)", ACTION)) and "command" in declared
    # what a workflow gives reaches the shell as variables only
    for script in re.findall(r"run: \|\n((?: {8,}.*\n)+)", ACTION):
        assert "${{" not in script
    assert "scripts/connector_ci.py" in ACTION and (ROOT / "scripts" / "connector_ci.py").is_file()


def test_the_pages_say_what_is_true() -> None:
    page = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    block = page.partition("[tool.kvtrace.check]\n")[2].partition("\n\n")[0]
    rules = from_table(tomllib.loads("\n".join(line.strip() for line in block.splitlines())), "docs/gate.md")
    assert rules.minimum == {"save_kv_layer": 1.0, "wait_for_save": 1.0} and rules.allow == {
        "decode-not-offered"
    }
    assert {"baseline", "check", "diff"} <= {command.name for command in app.registered_commands}
    ci = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    for option in set(re.findall(r"connector_ci\.py.*", ci)):
        words = option.split()[1:]
        connector_ci.options(words) if "--" in words else None
