"""``kvtrace baseline``, ``check`` and ``diff`` as a project's CI sees them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sample import sample

from kvtrace.report.digest import seal
from kvtrace.report.published import SCHEMA

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "reports" / "vllm-0.32.0-cpu" / "healthy-chunk-store.json"
REAL_BASELINE = ROOT / "reports" / "baselines" / "healthy-chunk-store.json"
Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of any repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / ".git").mkdir()


def write(path: Path, value: Any) -> Path:
    if isinstance(value, dict) and value.get("schema") == SCHEMA:
        for book in value["ledger"].values():  # what a test put into the accounts, in tokens
            pairs = book["pairs"] or 1
            book["tokens"] = {name: amount / pairs for name, amount in book["accounts"].items()}
            book["total_tokens"] = book["total"] / pairs
        seal(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def healthy() -> Any:
    """The real run of a scenario, in the reports of this repository."""
    return json.loads(REAL.read_text(encoding="utf-8"))


def broken() -> Any:
    """The same report, had layer 2 lost its hook."""
    report = healthy()
    for row in report["coverage"]["hooks"]:
        if row["layer"] == "model.layers.2.self_attn.attn" and row["hook"] == "save_kv_layer":
            row["fired"] = row["with_work"] = 0
    book = report["ledger"]["saves"]
    lost = book["total"] // 4
    book["accounts"] = {"saved": book["total"] - lost, "not-saved:layer-not-hooked": lost}
    report["findings"].insert(
        0,
        {
            "id": "layer-not-hooked",
            "severity": "fault",
            "stage": 3,
            "tokens": 368.0,
            "share": 0.25,
            "requests": 6,
            "title": "1 layer owns KV and passes no connector hook.",
            "evidence": ["3 of 4 layers"],
            "events": [],
            "remedy": ["Take the KV in wait_for_save."],
            "versions": "",
            "docs": "docs/causes/layer-not-hooked.md",
            "headline": "",
            "pattern": "",
            "connector": "",
            "grade": "read",
        },
    )
    return report


# ------------------------------------------------------------------------------ baseline


def test_baseline_and_check_of_a_real_run(shell: Shell) -> None:
    code, out, err = shell("baseline", REAL, "-o", "kvtrace-baseline.json")
    assert (code, err) == (0, "")
    assert re.match(r"wrote kvtrace-baseline\.json: 1 engine, \d+ hooks, layers model\.layers\.\*", out)
    for baseline in ("kvtrace-baseline.json", REAL_BASELINE):
        code, out, err = shell("check", REAL, "--baseline", baseline)
        assert (code, err) == (0, "") and re.match(r"PASSED  \d+ checks\n", out)


def test_a_baseline_is_small_readable_and_names_no_machine(shell: Shell, tmp_path: Path) -> None:
    report: Any = sample()
    report["run"]["command"] += ["--model", "/home/me/model"]
    report["run"]["engines"][0]["connector"]["file"] = "/home/me/my_store/connector.py"
    path = write(tmp_path / "report.json", report)
    assert shell("baseline", path)[0] == 0
    text = Path("kvtrace-baseline.json").read_text()
    assert len(text) < 4000 and max(map(len, text.splitlines())) < 140
    for secret in ("/home/me", "laptop", "cmpl-", "2026", "step", "_ns", "61.2"):
        assert secret not in text
    report["run"].update(host="other", seconds=5.0, name="again")
    for engine in report["run"]["engines"]:
        engine.update(steps=9, real_steps=9, tag=5)
    for row in [*report["coverage"]["hooks"], *report["coverage"]["ops"]]:
        row.update(eligible=9, fired=9)
    write(path, report)
    assert shell("baseline", path, "-o", "again.json")[0] == 0
    assert Path("again.json").read_text() == text


def test_baseline_overwrites_nothing_without_force(shell: Shell) -> None:
    Path("b.json").write_text("mine")
    code, out, err = shell("baseline", REAL, "-o", "b.json")
    assert (code, out, err.count("\n")) == (2, "", 1) and "there already" in err
    assert Path("b.json").read_text() == "mine"
    assert shell("baseline", REAL, "-o", "b.json", "--force")[0] == 0
    assert "kvtrace.baseline/1" in Path("b.json").read_text()
    assert {path.name for path in Path().iterdir()} == {".git", "b.json"}  # nothing half written is left
    code, _, err = shell("baseline", REAL, "-o", ".git")
    assert code == 2 and "a directory" in err


def test_a_baseline_of_nothing_and_of_faults(shell: Shell, tmp_path: Path) -> None:
    report = healthy()
    report["run"]["engines"][0]["real_steps"] = 0
    code, _, err = shell("baseline", write(tmp_path / "r.json", report))
    assert code == 2 and "no engine executed a step" in err
    code, out, _ = shell("baseline", write(tmp_path / "r.json", broken()), "-o", "b.json")
    assert code == 0 and "allows 1 fault: layer-not-hooked" in out and "save_kv_layer 0 %" in out


# --------------------------------------------------------------------------------- check


def test_a_regression_says_what_where_and_why(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell("check", write(tmp_path / "r.json", broken()), "--baseline", REAL_BASELINE)
    assert (code, err) == (1, "")
    assert out.startswith("FAILED  3 of ")
    for words in ("FAULT  layer-not-hooked", "1 layer owns KV and passes no connector hook.",
                  "save_kv_layer  model.layers.2.self_attn.attn  100 % -> 0 %",
                  "tokens kept", "100 % -> 75.0 %", "Remedy     Take the KV in wait_for_save.",
                  "Next  kvtrace docs layer-not-hooked"):  # fmt: skip
        assert words in out, words
    assert max(map(len, out.splitlines())) <= 100 or str(REAL_BASELINE) in out


def test_the_default_gate(shell: Shell, tmp_path: Path) -> None:
    code, out, _ = shell("check", REAL)
    assert code == 0 and "the default gate: no fault, and every KV layer hooked" in " ".join(out.split())
    assert shell("check", write(tmp_path / "r.json", broken()))[0] == 1
    # a layer without a hook fails also where no rule of kvtrace has a finding for it
    report = broken()
    report["findings"] = []
    code, out, _ = shell("check", write(tmp_path / "r.json", report))
    assert code == 1 and "No finding explains" in out and "model.layers.2.self_attn.attn" in out
    assert shell("check", tmp_path / "r.json", "--allow", "layer-not-hooked")[0] == 1
    # and a run in which no layer was ever seen
    report["coverage"]["hooks"] = []
    code, out, _ = shell("check", write(tmp_path / "r.json", report))
    assert code == 1 and "no KV layer was seen" in out


def test_rules_of_the_command_line(shell: Shell, tmp_path: Path) -> None:
    bad = write(tmp_path / "r.json", broken())
    assert shell("check", REAL, "--min", "save_kv_layer=1.0", "--min-saved-tokens", "0.95")[0] == 0
    assert shell("check", bad, "--min", "bind_connector_metadata=1.0")[0] == 0
    code, out, _ = shell("check", bad, "--min", "save_kv_layer=0.5")
    assert code == 1 and "model.layers.2.self_attn.attn" in out
    assert "required >= 50.0 %, got 0 %" in out
    code, out, _ = shell("check", bad, "--min-saved-tokens", "0.95")
    assert code == 1 and "tokens saved  required >= 95.0 %, got 75.0 %" in out and "layer-not-hooked" in out
    assert shell("check", bad, "--min-saved-tokens", "0.75")[0] == 0
    assert shell("check", bad, "--forbid", "hook-raised")[0] == 0
    assert shell("check", bad, "--forbid", "layer-not-hooked")[0] == 1
    assert shell("check", bad, "--forbid", "fault")[0] == 1
    assert shell("check", bad, "--forbid", "fault", "--allow", "layer-not-hooked")[0] == 0
    code, out, _ = shell("check", REAL, "--min", "unified_mla_attention_with_output=1")
    assert code == 1 and "not seen in this run" in out
    # what is allowed may cost tokens, too; the hook is still missed
    code, out, _ = shell("check", bad, "--baseline", REAL_BASELINE, "--allow", "layer-not-hooked")
    assert code == 1 and "tokens kept" not in out and "save_kv_layer" in out


def test_a_share_just_below_the_required_does_not_read_like_it(shell: Shell, tmp_path: Path) -> None:
    report = healthy()
    report["ledger"]["saves"].update(
        accounts={"saved": 98_995, "not-saved:layer-not-hooked": 1005}, total=100_000
    )
    code, out, _ = shell("check", write(tmp_path / "r.json", report), "--min-saved-tokens", "0.99")
    assert code == 1 and "required >= 99 %, got 98.995 %" in out


def test_a_baseline_of_another_connector_or_model_is_refused(shell: Shell, tmp_path: Path) -> None:
    assert shell("baseline", REAL, "-o", "b.json")[0] == 0
    other = healthy()
    other["run"]["engines"][0]["connector"]["name"] = "OtherStore"
    code, out, err = shell("check", write(tmp_path / "r.json", other), "--baseline", "b.json", "--junit", "j")
    assert (code, out, err.count("\n")) == (2, "", 1) and not Path("j").exists()
    assert "of another connector (ChunkStore, and the run has OtherStore)" in err
    other = healthy()
    other["run"]["engines"][0]["model"] = "/elsewhere/tiny-model/"
    assert shell("check", write(tmp_path / "r.json", other), "--baseline", "b.json")[0] == 0
    other["run"]["engines"][0]["model"] = "org/large"
    code, out, err = shell("check", write(tmp_path / "r.json", other), "--baseline", "b.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "of another model (tiny-model, and the run has org/large)" in err
    # a run that lost its connector is a failed run, and a baseline without models fits as before
    other["run"]["engines"][0].update(connector=None, model=healthy()["run"]["engines"][0]["model"])
    assert shell("check", write(tmp_path / "r.json", other), "--baseline", "b.json")[0] == 1
    old = json.loads(Path("b.json").read_text())
    del old["made"]["models"]
    assert shell("check", REAL, "--baseline", write(tmp_path / "old.json", old))[0] == 0


def test_a_run_in_which_nothing_happened_passes_no_gate(shell: Shell, tmp_path: Path) -> None:
    report = healthy()
    report["run"]["engines"][0]["real_steps"] = 0
    path = write(tmp_path / "r.json", report)
    for words in ([], ["--forbid", "hook-raised"], ["--allow", "lookup-miss"], ["--baseline", REAL_BASELINE]):
        code, out, err = shell("check", path, *words)
        assert (code, out, err.count("\n")) == (2, "", 1) and "no engine executed a step" in err
    report["findings"] = broken()["findings"]  # what kept it from running is a failure
    write(path, report)
    assert shell("check", path)[0] == 1
    assert shell("check", path, "--forbid", "hook-raised")[0] == 2


def test_saved_tokens_do_not_count_decode_that_is_never_offered(shell: Shell, tmp_path: Path) -> None:
    report = healthy()
    book = report["ledger"]["saves"]
    book["accounts"] = {"saved": 900, "not-saved:decode-not-offered": 4000, "loaded": 988}
    book["total"] = 5888
    assert shell("check", write(tmp_path / "r.json", report), "--min-saved-tokens", "1")[0] == 0
    book["accounts"]["not-saved:hook-raised"] = 100
    book["total"] += 100
    assert shell("check", write(tmp_path / "r.json", report), "--min-saved-tokens", "0.91")[0] == 1
    assert shell("check", write(tmp_path / "r.json", report), "--min-saved-tokens", "0.9")[0] == 0


def test_tolerance(shell: Shell, tmp_path: Path) -> None:
    report = healthy()
    book = report["ledger"]["saves"]
    lost = book["total"] // 100
    book["accounts"] = {"saved": book["total"] - lost, "not-saved:metadata-has-no-store": lost}
    path = write(tmp_path / "r.json", report)
    assert shell("check", path, "--baseline", REAL_BASELINE)[0] == 0
    assert shell("check", path, "--baseline", REAL_BASELINE, "--tolerance", "0")[0] == 1
    assert shell("check", path, "--baseline", REAL_BASELINE, "--tolerance", "0.005")[0] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--min", "save_kv_layr=1"], "did you mean save_kv_layer?"),
        (["--min", "save_kv_layer"], "write HOOK=SHARE"),
        (["--min", "save_kv_layer=2"], "write a number of 0 to 1"),
        (["--min", "save_kv_layer=nan"], "write a number of 0 to 1"),
        (["--min-saved-tokens", "95"], "write a number of 0 to 1"),
        (["--forbid", "hook-raise"], "did you mean hook-raised"),
        (["--allow", "\x1b[2J"], "kvtrace docs lists them"),
        (["--allow", "fault"], "no such cause"),
        (["--forbid", "hook-raised", "--allow", "hook-raised"], "both forbidden and allowed"),
        (["--tolerance", "-1"], "write a number of 0 to 1"),
        (["--baseline", "nosuch.json"], "no such baseline"),
        (["--baseline", ""], "--baseline: the name is empty"),
        (["--baseline", " "], "--baseline: the name is empty"),
        (["--baseline", str(REAL)], "this is a report, not a baseline"),
        (["--baseline", "."], "a directory"),
        (["--config", "nosuch.toml"], "no such configuration"),
        (["--junit", str(REAL)], "name another file"),
        (["--junit", "x.xml", "--sarif", "x.xml"], "name another file"),
        (["--config", "a.toml", "--no-config"], "exclude each other"),
        (["--nosuch"], "--nosuch"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(shell: Shell, words: list[str], says: str) -> None:
    before = REAL.read_bytes()
    code, out, err = shell("check", REAL, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and says in err, err
    assert "\x1b" not in err and REAL.read_bytes() == before


BAD = [
    (b"", "empty"),
    (b"{", "cut short"),
    (b"[]", "no kvtrace baseline"),
    (b"{}", "no kvtrace baseline"),
    (b'{"schema": "kvtrace.baseline/2"}', "newer kvtrace"),
    (b'{"schema": "kvtrace.baseline/1"}', "damaged baseline"),
    (b'{"schema": "\\u001b[2J\\ud800"}', "another kind"),
    (b"KVTRACE\0rest", "not"),
    (REAL_BASELINE.read_bytes()[:-300], "cut short"),
    (REAL_BASELINE.read_bytes().replace(b'"share": 1.0', b'"share": NaN', 1), "bad number"),
    (REAL_BASELINE.read_bytes().replace(b'"share": 1.0', b'"share": 7', 1), "damaged baseline"),
]


@pytest.mark.parametrize(("data", "says"), BAD)
def test_a_bad_baseline_is_one_line_and_exit_2(shell: Shell, data: bytes, says: str) -> None:
    Path("b.json").write_bytes(data)
    code, out, err = shell("check", REAL, "--baseline", "b.json", "--junit", "j.xml")
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err, err
    assert "\x1b" not in err and not Path("j.xml").exists()
    for words in (
        ["check", "b.json"],
        ["diff", "b.json", str(REAL)],
        ["diff", str(REAL), "b.json"],
        ["baseline", "b.json"],
    ):
        code, out, err = shell(*words)
        assert (code, out, err.count("\n")) == (2, "", 1) and "internal" not in err, err
    assert not Path("kvtrace-baseline.json").exists()


# --------------------------------------------------------------------------------- files


def test_rules_in_pyproject_and_kvtrace_toml(shell: Shell, tmp_path: Path) -> None:
    bad = write(tmp_path / "r.json", broken())
    Path("pyproject.toml").write_text(
        '[tool.kvtrace.check]\nmin = {save_kv_layer = 1.0}\nforbid = ["hook-raised"]\n'
    )
    below = tmp_path / "tests" / "deep"
    below.mkdir(parents=True)
    os.chdir(below)
    code, out, _ = shell("check", bad)
    assert code == 1 and "save_kv_layer >= 1; no hook-raised" in " ".join(out.split())
    assert ">= 50.0 %, got 0 %" in shell("check", bad, "--min", "save_kv_layer=0.5")[1]  # options win
    assert shell("check", REAL)[0] == 0
    # kvtrace.toml wins beside it, and its baseline's path is meant from there
    (tmp_path / "kvtrace.toml").write_text('[check]\nbaseline = "base.json"\nmin_saved_tokens = 0.5\n')
    code, _, err = shell("check", bad)
    assert code == 2 and "no such baseline" in " ".join(err.split())
    (tmp_path / "base.json").write_text(REAL_BASELINE.read_text())
    code, out, _ = shell("check", bad)
    assert code == 1 and "tokens kept" in " ".join(out.split())
    assert shell("check", REAL)[0] == 0
    code, out, _ = shell("check", bad, "--no-config")
    assert code == 1 and "the default gate" in " ".join(out.split())
    other = tmp_path / "other.toml"
    other.write_text('[check]\nallow = ["layer-not-hooked"]\nforbid = ["fault"]\n')
    assert shell("check", bad, "--config", other)[0] == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[check]\nforbit = ["hook-raised"]\n', "did you mean forbid?"),
        ('[check]\nforbid = ["hook-rased"]\n', "did you mean hook-raised"),
        ("[check]\nmin = {save_kv_leyer = 1}\n", "did you mean save_kv_layer"),
        ('[check]\nforbid = "hook-raised"\n', "should be an array"),
        ("[check]\nmin-saved-tokens = 95\n", "write a number of 0 to 1"),
        ("[check]\nmin-saved-tokens = true\n", "write a number of 0 to 1"),
        ("[check]\nbaseline = 3\n", "should be the path"),
        ("[chek]\nallow = []\n", "did you mean check?"),
        ("check = 5\n", "should be a table"),
        ("", "no rules in this file"),
        ("[check\n", "not TOML"),
        ("[check]\nmin = 1.0\n", "should be a table"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_2(shell: Shell, text: str, says: str) -> None:
    Path("kvtrace.toml").write_text(text)
    code, out, err = shell("check", REAL)
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err and "kvtrace.toml" in err, err


def test_a_pyproject_of_somebody_else_is_left_alone(shell: Shell) -> None:
    Path("pyproject.toml").write_text("[tool.other\nbroken = ")
    assert shell("check", REAL)[0] == 0
    Path("pyproject.toml").write_text("[tool.kvtrace.check\nbroken = ")
    assert shell("check", REAL)[0] == 2


def test_a_python_without_a_toml_parser(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    assert shell("check", REAL)[0] == 0  # nothing to parse
    Path("kvtrace.toml").write_text("[check]\nmin-saved-tokens = 1.0\n")
    code, out, err = shell("check", REAL)
    assert (code, out, err.count("\n")) == (2, "", 1) and "install tomli" in err


# ------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("option", ["--junit", "--sarif"])
def test_the_report_of_a_run_directory_is_an_input(shell: Shell, tmp_path: Path, option: str) -> None:
    report = write(tmp_path / "report.json", json.loads(REAL.read_text()))
    before = report.read_bytes()
    code, out, err = shell("check", tmp_path, option, report)
    assert (code, out) == (2, "") and "name another file" in err
    assert report.read_bytes() == before


def test_junit(shell: Shell, tmp_path: Path) -> None:
    bad = write(tmp_path / "r.json", broken())
    for report, code, failures in ((REAL, 0, 0), (bad, 1, 3)):
        assert shell("check", report, "--baseline", REAL_BASELINE, "--junit", "out/j.xml")[0] == code
        suite = ElementTree.parse("out/j.xml").getroot()[0]
        cases = suite.findall("testcase")
        assert int(suite.get("tests", "")) == len(cases) > 20
        assert int(suite.get("failures", "")) == failures == len(suite.findall("testcase/failure"))
        assert len({(case.get("classname"), case.get("name")) for case in cases}) == len(cases)
    failure = suite.find("testcase/failure")
    assert failure is not None and failure.get("type") == "layer-not-hooked"
    assert "remedy: Take the KV in wait_for_save." in (failure.text or "")


def test_sarif(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(REAL_BASELINE.read_text())
    bad = write(tmp_path / "r.json", broken())
    assert shell("check", bad, "--baseline", "base.json", "--sarif", "s.sarif")[0] == 1
    log = json.loads(Path("s.sarif").read_text())
    run = log["runs"][0]
    assert log["version"] == "2.1.0" and run["tool"]["driver"]["name"] == "kvtrace"
    lines = REAL_BASELINE.read_text().splitlines()
    for result in run["results"]:
        place = result["locations"][0]["physicalLocation"]
        rule = run["tool"]["driver"]["rules"][result["ruleIndex"]]
        assert result["level"] == "error" and rule["id"] == result["ruleId"] == "layer-not-hooked"
        assert result["message"]["text"].endswith(".")
        if result["message"]["text"].startswith("save_kv_layer"):
            assert place["artifactLocation"]["uri"] == "base.json"
            assert '"hook": "save_kv_layer"' in lines[place["region"]["startLine"] - 1]
    assert len({json.dumps(one["partialFingerprints"]) for one in run["results"]}) == len(run["results"]) == 3
    assert shell("check", REAL, "--baseline", "base.json", "--sarif", "s.sarif")[0] == 0
    assert json.loads(Path("s.sarif").read_text())["runs"][0]["results"] == []


def test_github(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = broken()
    report["findings"][0]["title"] = "100 %\n::set-env name=X::evil `a` @me <b>"
    bad = write(tmp_path / "r.json", report)
    (tmp_path / "base.json").write_text(REAL_BASELINE.read_text())
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code, out, err = shell("check", bad, "--baseline", "base.json", "--github")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    stop = re.fullmatch(r"::stop-commands::([0-9a-f]{32})", lines[0])
    assert stop
    end = lines.index(f"::{stop[1]}::")
    (error,) = lines[end + 1 :]
    assert (
        error.startswith("::error file=base.json,line=")
        and ",title=kvtrace%3A layer-not-hooked::100 %25 " in error
    )
    assert "%0ARemedy: Take the KV in wait_for_save." in error
    text = summary.read_text()
    assert text.startswith("before\n") and "❌ kvtrace check" in text and "`layer-not-hooked`" in text
    assert "<b>" not in text.replace("\\<b\\>", "") and "@me" not in text
    # a program's output stays JSON: the annotations go to the other stream, which the runner reads as well
    code, out, err = shell("check", bad, "--baseline", "base.json", "--github", "--json")
    assert json.loads(out)["passed"] is False and err.startswith("::error ")


def test_json(shell: Shell, tmp_path: Path) -> None:
    code, out, _ = shell("check", write(tmp_path / "r.json", broken()), "--baseline", REAL_BASELINE, "--json")
    value = json.loads(out)
    assert code == 1 and out.isascii()
    assert (value["schema"], value["passed"], value["failed"]) == ("kvtrace.check/1", False, 3)
    failed = [one for one in value["checks"] if one["state"] == "failed"]
    hook = next(one for one in failed if one["subject"] == "save_kv_layer")
    assert (hook["before"], hook["after"], hook["cause"]) == (1.0, 0.0, "layer-not-hooked")
    assert [one["id"] for one in value["explanations"]] == ["layer-not-hooked"]


# ---------------------------------------------------------------------------------- diff


def test_diff_of_a_run_and_itself(shell: Shell) -> None:
    for format, says in (("text", "No difference"), ("markdown", "No difference"), ("json", '"empty": true')):
        code, out, err = shell("diff", REAL, REAL, "--format", format)
        assert (code, err) == (0, "") and says in out


def test_diff_says_what_changed(shell: Shell, tmp_path: Path) -> None:
    other = broken()
    other["run"]["vllm"] = "0.33.0"
    other["run"]["command"] = ["vllm", "serve", "m", "--block-size=64", "--enforce-eager"]
    other["run"]["engines"][0].update(block_size=64, prefix_caching=True)
    target = next(one for one in other["instrumentation"]["targets"] if one["status"] == "found")
    target.update(status="missing", detail="no such attribute")
    bad = write(tmp_path / "r.json", other)
    code, out, _ = shell("diff", REAL, bad)
    assert code == 0
    for words in ("vLLM", "0.32.0 -> 0.33.0", "32 -> 64", "off -> on", "--block-size", "--enforce-eager",
                  "found -> missing", "save_kv_layer", "100 % -> 0 %", "not-saved:layer-not-hooked",
                  "0 % -> 25.0 %", "none -> fault", "Take the KV in wait_for_save."):  # fmt: skip
        assert words in out, words
    back = json.loads(shell("diff", bad, REAL, "--format", "json")[1])
    assert back["schema"] == "kvtrace.diff/1" and not back["empty"]
    assert {one["verdict"] for one in back["coverage"]} == {"better"}
    assert [(one["name"], one["verdict"]) for one in back["findings"]] == [("layer-not-hooked", "better")]
    markdown = shell("diff", REAL, bad, "--format", "markdown")[1]
    assert "| `save_kv_layer` | `model.layers.*.self_attn.attn` | 100 % -\\> 0 % | worse |" in markdown


def test_diff_reads_an_argument_that_is_json(shell: Shell, tmp_path: Path) -> None:
    """It was cut short before the key that differs."""
    paths = []
    for unit in (32, 64):
        one = broken()
        extra = {"kv_connector": "A" * 60, "kv_connector_extra_config": {"unit": unit, "path": "p" * 60}}
        one["run"]["command"] = ["vllm", "serve", "m", "--kv-transfer-config", json.dumps(extra)]
        paths.append(write(tmp_path / f"{unit}.json", one))
    out = " ".join(shell("diff", *paths)[1].split())
    assert "--kv-transfer-config kv_connector_extra_config.unit 32 -> 64" in out and "AAA" not in out


def test_limits_of_a_report_are_said_by_check_baseline_and_diff(shell: Shell, tmp_path: Path) -> None:
    """A number of a damaged or half-watched run is not handed on without a word."""
    part = healthy()
    book = part["ledger"]["saves"]
    book["accounts"] = {"saved": book["total"] - book["pairs"] * 40, "not-observed": book["pairs"] * 40}
    book["tokens"] = {"saved": book["total_tokens"] - 40, "not-observed": 40}
    part["limits"].update(
        notes=["the recording is incomplete: worker.kvt: a write failed"],
        lost_records=7,
        damaged=[{"spool": "spool/w.kvt", "detail": "7 records left out, of a damaged block"}],
    )
    part["not_observed"] = [{"id": "hook-slow", "why": "too short a run"}]
    bad = write(tmp_path / "r.json", part)
    said = [
        "the recording is incomplete: worker.kvt: a write failed",
        "7 records of the trace were lost",
        "spool/w.kvt: 7 records left out, of a damaged block",
        "tokens not observed",
        "hook-slow",
    ]
    for words in (
        ["check", bad, "--no-config"],
        ["check", bad, "--no-config", "--json"],
        ["check", bad, "--no-config", "--format", "markdown"],
        ["diff", REAL, bad],
        ["diff", bad, bad, "--format", "json"],
        ["baseline", bad, "-o", tmp_path / "b.json"],
    ):
        out = " ".join(shell(*words)[1].split())
        assert [one for one in said if one not in out] == [], words
    out = shell("diff", bad, bad)[1]
    assert out.count("7 records of the trace were lost") == 1 and "A and B: " in out


def test_the_command_in_a_pipe(tmp_path: Path) -> None:
    """As in a workflow: exit codes of the real program, and no traceback where the reader has gone."""
    rules = ["--baseline", str(REAL_BASELINE), "--no-config"]
    words = [sys.executable, "-m", "kvtrace", "check", str(REAL), *rules]
    done = subprocess.run(words, capture_output=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"") and b"\x1b" not in done.stdout
    words[4] = str(write(tmp_path / "r.json", broken()))
    line = " ".join(f"'{word}'" for word in [*words, "--json"])
    script = f"{line} | head -c 5 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (b"1\n", b"")  # still a failure
