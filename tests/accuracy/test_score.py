"""Scoring: pure, and strict where it must be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import score
from kvgen.catalogue import BY_NAME

LOST = BY_NAME["takes-less"]  # right: slots-short
LIMIT = BY_NAME["tail-left-out"]  # right: below-save-granularity


def found(*findings: tuple[str, str]) -> list[dict[str, str]]:
    return [{"id": ident, "severity": severity} for ident, severity in findings]


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        (found(("slots-short", "fault")), ("right", "slots-short")),
        (found(("decode-not-offered", "limit"), ("slots-short", "fault")), ("right", "slots-short")),
        (found(("no-forward", "fault"), ("slots-short", "fault")), ("second", "no-forward")),
        (found(("no-forward", "fault")), ("wrong", "no-forward")),
        (found(("decode-not-offered", "limit")), ("silent", "decode-not-offered (limit)")),
        (found(("slots-short", "note")), ("second", "slots-short (note)")),
        ([], ("silent", "none")),
    ],
)
def test_a_fault_is_judged_by_the_first_fault_found(
    findings: list[dict[str, str]], expected: tuple[str, str]
) -> None:
    assert score.verdict(LOST, findings) == expected


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        (found(("below-save-granularity", "limit")), "right"),
        (found(("decode-not-offered", "limit"), ("below-save-granularity", "limit")), "second"),
        (found(("stored-nothing", "fault"), ("below-save-granularity", "limit")), "false_alarm"),
        (found(("below-save-granularity", "fault")), "false_alarm"),
        (found(("stored-nothing", "fault")), "false_alarm"),
        (found(("decode-not-offered", "limit")), "wrong"),
        ([], "silent"),
    ],
)
def test_a_limit_is_judged_by_the_first_finding_of_all(findings: list[dict[str, str]], expected: str) -> None:
    assert score.verdict(LIMIT, findings)[0] == expected


@pytest.mark.parametrize(
    ("findings", "shows", "expected"),
    [
        ([], "return-only", "right"),
        (found(("decode-not-offered", "limit")), "return-only", "right"),
        (found(("store-failed", "fault")), "return-only", "right"),
        (found(("slots-short", "fault")), "return-only", "wrong"),
        ([], "sizes", "silent"),
    ],
)
def test_what_only_return_shows_is_no_fault_of_a_traced_run(
    findings: list[dict[str, str]], shows: str, expected: str
) -> None:
    assert score.verdict(BY_NAME["writer-dies"], findings, shows)[0] == expected


def test_wrong_kv_that_came_back_is_true_of_what_changes_it() -> None:
    """Also where no place but the return shows it."""
    wrong = found(("kv-load-wrong", "fault"))
    assert score.verdict(BY_NAME["half-zeroed"], wrong, "return-only")[0] == "right"
    assert score.verdict(BY_NAME["writer-dies"], wrong, "return-only")[0] == "wrong"


FAILS = {"transfer": "proved", "whole-units": "failed", "restart": "not observed", "flat": "does not apply"}


@pytest.mark.parametrize(
    ("fault", "answers", "expected"),
    [
        ("writer-dies", FAILS, "right"),
        ("half-zeroed", FAILS, "wrong"),
        ("half-zeroed", dict.fromkeys(FAILS, "proved"), "silent"),
        ("child-dead", FAILS, ""),
        ("tail-left-out", FAILS, "false_alarm"),
        ("", FAILS, "false_alarm"),
        ("", {"restart": "failed", "transfer": "proved"}, "right"),
        ("", None, ""),
    ],
)
def test_verify_is_judged_by_the_property_that_fails(
    fault: str, answers: dict[str, str] | None, expected: str
) -> None:
    unpromised = frozenset({"restart"})
    planted = BY_NAME.get(fault)
    breaks = planted.breaks if planted is not None else frozenset()
    assert score.verify_verdict(planted, answers, unpromised, breaks)[0] == expected
    one_way = score.verify_verdict(planted, answers, unpromised, frozenset())[0]
    assert one_way == ("" if fault in ("writer-dies", "half-zeroed") else expected)


def test_a_healthy_run_shows_no_fault() -> None:
    assert score.verdict(None, []) == ("right", "none")
    assert score.verdict(None, found(("decode-not-offered", "limit"), ("hook-slow", "note")))[0] == "right"
    assert score.verdict(None, found(("x", "limit"), ("y", "fault"))) == ("false_alarm", "y")


def report(saved: int, rows: dict[str, float], trust: str = "measured", **more: Any) -> dict[str, Any]:
    accounts = {"saved": saved, "not-saved:x": 40, "not-observed": 60}
    saves = {"accounts": accounts, "total": saved + 100, "trust": trust, **more}
    return {
        "findings": [],
        "ruled_out": [],
        "ledger": {"saves": saves},
        "requests": {"rows": [{"id": name, "saved": tokens} for name, tokens in rows.items()]},
    }


def truth(taken: int | None = None, **claimable: int) -> dict[str, Any]:
    """``taken``: of each request; None: no more than is at rest."""
    requests = [
        {"id": name, "claimable": n, "taken": n if taken is None else taken} for name, n in claimable.items()
    ]
    return {"layers": 4, "requests": requests}


def test_saved_numbers_are_exact_to_the_token_layer() -> None:
    assert score.score(1, None, report(256, {"a": 64.0}), truth(a=256)).wrong_number == ""
    assert score.score(1, None, report(200, {"a": 50.0}), truth(a=256)).wrong_number == ""
    over = score.score(1, None, report(257, {"a": 64.0}), truth(a=256))
    assert over.wrong_number == "257 token-layers called saved, 256 at rest"
    taken = score.score(1, None, report(257, {"a": 64.0}), truth(a=256, taken=300))
    assert taken.wrong_number != "", "a report without grades says that it is stored"


def test_a_request_must_not_borrow_from_another() -> None:
    one = score.score(1, None, report(256, {"a": 64.0, "b": 0.0}), truth(a=128, b=128))
    assert one.wrong_number == "a: 64 tokens called saved, 32 at rest"
    assert "stranger" in score.score(1, None, report(4, {"stranger": 1.0}), truth(a=8)).wrong_number


def test_declared_numbers_are_counted_apart() -> None:
    one = score.score(1, None, report(300, {}, trust="declared"), truth(a=256))
    assert one.wrong_number == "" and one.declared_number != ""


@pytest.mark.parametrize(
    ("grades", "right"),
    [
        ({"written": 200, "read": 56, "declared": 100}, True),
        ({"written": 201}, False),
        ({"proved": 100, "written": 101}, False),
        ({"written": 200, "read": 57}, False),
        ({"read": 256}, True),
        ({"read": 257}, False),
        ({"declared": 999}, True),
        ({}, True),
    ],
)
def test_a_number_is_judged_by_what_its_grade_says(grades: dict[str, int], right: bool) -> None:
    """200 token-layers are at rest, 256 were taken from the KV cache."""
    one = score.score(1, None, report(356, {}, grades={"saved": grades}), truth(a=200, taken=256))
    assert (one.wrong_number == "") is right


def test_what_is_spoilt_at_rest_is_written_and_not_proved() -> None:
    """200 token-layers are at rest and right, the bytes of 256 are there."""
    true = truth(a=200, taken=256)
    true["requests"][0]["written"] = 256

    def of(**grades: int) -> str:
        return score.score(1, None, report(256, {}, grades={"saved": grades}), true).wrong_number

    assert of(written=256) == "" == of(proved=200, written=56)
    assert of(written=257) == "257 token-layers said to be at rest, 256 are"
    assert of(proved=201, written=55) == "201 token-layers said to be proved, 200 are right"


def test_what_was_read_and_is_not_at_rest_is_noted() -> None:
    read = score.score(1, None, report(256, {}, grades={"saved": {"read": 256}}), truth(a=200, taken=256))
    assert read.wrong_number == "" and read.not_resting == "256 token-layers called saved, 200 at rest"
    rests = score.score(1, None, report(200, {}, grades={"saved": {"read": 200}}), truth(a=200, taken=256))
    assert rests.not_resting == ""
    assert score.notes([read, rests])[1].endswith("above what is at rest: 1 runs")
    assert score.notes([read, rests])[2].endswith(": 0 runs")
    assert score.last_line([read, rests]).endswith("wrong_numbers=0")


@pytest.mark.parametrize(
    ("written", "sent", "wrong", "noted"),
    [(200, 56, False, True), (144, 56, False, False), (201, 55, True, False), (200, 57, True, False)],
)
def test_what_was_sent_to_a_server_is_not_said_to_be_at_rest(
    written: int, sent: int, wrong: bool, noted: bool
) -> None:
    """200 token-layers are at rest, 256 were taken from the KV cache."""
    grades = {"saved": {"written": written, "read": sent}}
    peers = [{"to": "tcp host:1", "amount": sent}]
    one = score.score(1, None, report(256, {}, grades=grades, sent=peers), truth(a=200, taken=256))
    assert (one.wrong_number != "") is wrong
    assert score.notes([one])[1:3] == [
        f"numbers that are true of what was read or sent, and above what is at rest: {int(noted)} runs",
        f"of these, said to be sent to a server, which does not keep all of it: {int(noted)} runs",
    ]


def test_a_request_with_grades_is_judged_by_them() -> None:
    def of(**grades: float) -> str:
        told = report(256, {"a": 64.0}, grades={"saved": {"read": 256}})
        told["requests"]["rows"][0]["grades"] = grades
        return score.score(1, None, told, truth(a=128, b=128, taken=256)).wrong_number

    assert of(written=32.0, read=32.0) == ""
    assert of(written=33.0) == "a: 33 tokens said to be at rest, 32 are"
    assert of(read=65.0) == "a: 65 tokens called saved, 64 taken"
    assert of(declared=500.0) == ""


def test_a_requests_number_without_grades_may_be_declared() -> None:
    grades = {"saved": {"read": 100, "declared": 300}}
    assert score.score(1, None, report(400, {"a": 100.0}, grades=grades), truth(a=100)).wrong_number == ""
    grades = {"saved": {"read": 100}}
    assert score.score(1, None, report(100, {"a": 26.0}, grades=grades), truth(a=100)).wrong_number != ""


def test_without_what_was_taken_truth_is_what_is_at_rest() -> None:
    old = {"layers": 4, "requests": [{"id": "a", "claimable": 100}]}
    assert score.score(1, None, report(101, {}, grades={"saved": {"read": 101}}), old).wrong_number != ""


def test_a_report_that_cannot_be_made_is_wrong() -> None:
    assert score.score(1, LOST, None, truth(a=1)).verdict == "wrong"
    assert score.score(1, None, None, truth(a=1)).verdict == "false_alarm"


def test_the_last_line_and_the_table() -> None:
    right = score.Scored(
        1, "takes-less", "right", "slots-short", ("slots-short",), total=100, not_observed=50, shows="cache"
    )
    wrong = score.Scored(
        2, "takes-less", "wrong", "no-forward", ("no-forward",), "9 called saved", total=100, shows="cache"
    )
    alarm = score.Scored(4, "", "false_alarm", "no-forward", ("no-forward",))
    scores = [right, wrong, alarm, score.Scored(8, "", "right", "none", ())]
    assert score.last_line(scores) == (
        "accuracy: runs=4 right=2 second=0 wrong=1 silent=0 false_alarm=1 wrong_numbers=1"
    )
    rows = score.table(scores)
    assert rows[1].split()[:3] == ["(healthy)", "-", "2"]
    assert rows[2].split()[:5] == ["takes-less", "cache", "2", "1", "."]
    assert rows[2].endswith("slots-short, no-forward")
    assert score.notes(scores)[0] == "not observed: 25.0% of all token-layers"
    assert [row.split() for row in score.places(scores)[1:]] == [
        ["shows", "in:", "cache", "2", "1", ".", "1", ".", ".", "1", "-"],
        ["healthy", "2", "1", ".", ".", ".", "1", ".", "-"],
        ["verify:", "not", "run"],
    ]
    verified = [*scores, score.Scored(9, "", "right", "none", (), choice="ring", verify="right")]
    assert score.places(verified)[-1].split()[-1] == "1/1"
    assert score.last_line([]).startswith("accuracy: runs=0 right=0 ")


def test_a_rule_out_of_what_was_planted_is_noted() -> None:
    ident = min(LOST.right)
    denied = {**report(0, {}), "ruled_out": [{"id": ident}, {"id": "no-forward"}]}
    (scored, healthy) = (score.score(7, fault, denied, truth(a=0)) for fault in (LOST, None))
    assert (scored.ruled_out, healthy.ruled_out) == ((ident,), ())
    assert score.notes([scored, healthy])[-1].endswith(f": 7 {ident}")


def test_whoever_reads_the_list_may_stop_early() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "accuracy.py"
    child = subprocess.Popen(
        [sys.executable, "-u", str(script), "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    _, errors = child.communicate()
    assert (child.returncode, errors) == (0, b"")


def test_what_was_kept_is_scored_anew_without_an_engine(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "accuracy.py"
    command = [sys.executable, str(script), "--seed", "7", "--keep", str(tmp_path), "--again"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "needs --keep DIR with what an earlier call kept" in done.stderr
    (tmp_path / "7").mkdir()
    kept = {"plan": "kept", "truth": {"problem": "its share is small"}, "seconds": {"engine": 1.0}}
    (tmp_path / "7" / "outcome.json").write_text(json.dumps(kept))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "UNPROVEN: its share is small  [kept]" in done.stdout and done.returncode == 1
    assert (tmp_path / "7" / "outcome.json").exists()
