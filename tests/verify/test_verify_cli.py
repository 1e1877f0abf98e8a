"""The command line of ``kvtrace verify``: usage errors, and what is printed of a result."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from kvtrace.render.html.page import verify_page as verify_html
from kvtrace.render.page import Screen
from kvtrace.render.terminal import terminal
from kvtrace.render.verify import verify_junit, verify_page
from kvtrace.verify.answers import Answered, Result, Stopped, failed, not_applicable, not_observed, proved
from kvtrace.verify.document import verify_schema

Shell = Callable[..., tuple[int, str, str]]
ANSWERS = [
    Answered("transfers", "A transfer happens", proved("96 tokens")),
    Answered(
        "outputs", "Answers are right",
        failed("1 of 2", evidence=["token 3\x1b[2J"], requests=["kvverify-1"], case="a96 ; a96"), "mla",
    ),
    Answered("ranks-apart", "Ranks", not_applicable("one rank")),
    Answered("finish-told", "Told", not_observed("nothing")),
]  # fmt: skip
AGAIN = {"mla/outputs": "kvtrace verify --case"}
RESULT = Result("Mine (kv_both)", "quick", 7, "reports/x", ANSWERS, AGAIN)


def test_the_document_has_the_published_shape() -> None:
    document = json.loads(json.dumps(RESULT.document()))
    jsonschema.validate(document, verify_schema())
    assert not document["passed"] and document["properties"][1]["again"] == "kvtrace verify --case"


def test_the_page_names_each_failure_with_its_case() -> None:
    text = terminal(verify_page(RESULT), Screen(120, None))
    assert "FAILED" in text and "mla: outputs" in text and "a96 ; a96" in text and "\x1b" not in text
    assert "kvtrace verify --case" in text and "not observed" in text


def test_what_was_stopped_is_not_said_to_have_passed() -> None:
    whole = replace(RESULT, answers=ANSWERS[:1], stopped=True)
    text = terminal(verify_page(whole), Screen(120, None))
    assert "STOPPED  before all was asked" in text and "PASSED" not in text
    assert "FAILED" in terminal(verify_page(replace(RESULT, stopped=True)), Screen(120, None))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("asked", [True, False])
def test_a_signal_ends_the_asking_and_what_is_known_is_printed(
    number: signal.Signals, code: int, asked: bool, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*_: object) -> Result:
        try:
            os.kill(os.getpid(), number)
        except Stopped:
            os.kill(os.getpid(), number)  # once more: its server is being stopped
            if asked:
                return replace(RESULT, stopped=True)
            raise
        raise AssertionError

    monkeypatch.setattr("kvtrace.verify.session.verify", verify)
    before = [(one, signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM)]
    try:
        ended, out, err = shell("verify", "--connector", "mine:Mine")
    finally:
        for one, handler in before:
            signal.signal(one, handler)
    assert ended == code
    assert ("mla: outputs" in out) is asked and ("stopped before anything was asked" in err) is not asked


def test_the_html_page_holds_each_answer_and_no_script() -> None:
    text = verify_html(RESULT)
    assert all(one.id in text and one.verdict.says in text for one in ANSWERS)
    assert "kvtrace verify --case" in text and "<script" not in text and "script-src 'none'" in text


def test_junit_has_a_case_a_property() -> None:
    root = ElementTree.fromstring(verify_junit(RESULT))
    (suite,) = root
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("4", "1", "2")
    assert [case.get("name") for case in suite] == [one.id for one in ANSWERS]


def test_an_assertion_says_what_failed() -> None:
    assert str(RESULT).startswith("mla/outputs failed: 1 of 2") and not RESULT.passed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a command or a connector"),
        (["--connector", "m:C", "--", "vllm"], "a command or a connector"),
        (["--suite", "huge", "--connector", "m:C"], "'huge' is not known"),
        (["--prefill", "vllm serve x"], "--prefill and --decode"),
        (["--prefill", "vllm", "--decode", "'x"], "--decode is no command"),
        (["--config", "{}", "--", "vllm", "serve"], "go with --connector"),
        (["--error", "5", "--connector", "m:C"], "no share"),
        (["-o", "X", "--connector", "a-b"], "no class"),
    ],
)
def test_wrong_usage_is_one_line(
    words: list[str], said: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = shell("verify", *words)
    assert code == 2 and said in err and err.count("\n") == 1
