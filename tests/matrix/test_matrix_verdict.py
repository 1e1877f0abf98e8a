"""What the matrix calls right, and what its page says of it."""

from __future__ import annotations

from typing import Any

import pytest
from matrix_rows.page import page
from matrix_rows.row import CHUNKS, SHORT, Row, generate
from matrix_rows.verdict import Of, numbers, of_kind, of_row

ROW = Row("plain", "The plain engine", (generate("x", 64),))
RAN = {"answers": [[1, 2]], "rows": 512, "error": ""}


def report(first: str = "", severity: str = "fault", fired: int = 8, saved: int = 512) -> dict[str, Any]:
    book = {
        "total": 520,
        "accounts": {"saved": saved, "not-saved:x": 520 - saved},
        "grades": {"saved": {"proved": saved}},
    }
    return {
        "coverage": {"summary": [{"hook": "save_kv_layer", "eligible": 8, "fired": fired}]},
        "ledger": {"saves": book, "loads": {"total": 0, "accounts": {}}},
        "findings": [{"id": first, "severity": severity}] if first else [],
    }  # fmt: skip


def test_a_healthy_run_that_is_right() -> None:
    found = of_kind(ROW, CHUNKS, RAN, RAN, report("decode-not-offered", "limit"))
    assert not found.wrong and found.equal and (found.seen, found.due) == (8, 8) and found.rest == 512


@pytest.mark.parametrize(
    ("traced", "said", "words"),
    [
        ({**RAN, "answers": [[1, 3]]}, report(), "tokens differ"),
        ({**RAN, "error": "ValueError: x"}, report(), "not traced: ValueError: x"),
        (RAN, None, "no report"),
        (RAN, report(fired=7), "save_kv_layer 7/8"),
        (RAN, report("slots-short"), "a fault on a healthy run: slots-short"),
        ({**RAN, "rows": 511}, report(), "too many called saved: 512 proved; at rest 511"),
        ({**RAN, "rows": 513}, report(), "fewer called saved"),
    ],
)
def test_what_makes_a_healthy_run_wrong(traced: Any, said: Any, words: str) -> None:
    assert words in " ".join(of_kind(ROW, CHUNKS, RAN, traced, said).wrong)


def test_a_ledger_that_does_not_balance_is_wrong() -> None:
    said = report()
    said["ledger"]["saves"]["total"] += 1
    assert of_kind(ROW, CHUNKS, RAN, RAN, said).wrong == ["a ledger that does not balance"]


def test_a_planted_fault_must_be_the_first_finding() -> None:
    assert not of_kind(ROW, SHORT, RAN, RAN, report("slots-short")).wrong
    assert "first finding none, not slots-short" in of_kind(ROW, SHORT, RAN, RAN, report()).wrong
    assert of_kind(ROW, SHORT, RAN, RAN, report("save-lost")).wrong


def test_what_was_read_is_no_claim_that_it_is_at_rest() -> None:
    assert numbers({"proved": 3, "read": 2}, 4) == "read, and not at rest"
    assert numbers({"proved": 3, "read": 2}, 5) == "right"
    assert numbers({"proved": 3}, 2) == "too many" and numbers({"read": 3}, 4) == "fewer"
    assert numbers({"proved": 3}, None) == "not compared"


def with_states(rest: int, **accounts: int) -> list[str]:
    said = report()
    named = {name.replace("_", "-"): n for name, n in accounts.items()}
    book = {"total": sum(accounts.values()), "accounts": named}
    said["ledger"]["states"] = {"saves": book, "loads": {"total": 0, "accounts": {}}}
    found = of_kind(ROW, CHUNKS, RAN, RAN, said, rest)
    assert found.states == {**named, "total": book["total"], "at rest": rest}
    return found.wrong


def test_states_that_are_called_taken_are_those_at_rest() -> None:
    assert not with_states(2, taken=2, not_taken=8) and not with_states(2, taken=1, not_observed=9)
    assert with_states(2, taken=3, not_taken=7)[0].startswith("too many states called taken")
    assert with_states(3, taken=2, not_taken=8)[0].startswith("fewer states called taken")


def test_a_row_that_does_not_run_untraced_is_not_our_fault() -> None:
    refused = {"answers": [], "rows": 0, "error": "ValueError: current platform cpu does not support ray."}
    found = of_kind(ROW, CHUNKS, refused, refused, None)
    kept = of_row(ROW, {"healthy": found, "planted": found})
    assert not kept["wrong"] and kept["cannot"] == refused["error"]
    text = page([("Topologies", [kept], ["Two engines", "Ray"])])
    assert "does not run on this build: ValueError: current platform cpu does not support ray." in text
    assert "0 of 0 rows are right;** 1 do not run" in text and "Not run yet: Two engines; Ray." in text


def test_what_a_row_must_show_and_does_not_is_wrong() -> None:
    healthy = of_kind(ROW, CHUNKS, RAN, RAN, report())
    healthy.proofs = {"preempted": ""}
    planted = of_kind(ROW, SHORT, RAN, RAN, report("slots-short"))
    assert of_row(ROW, {"healthy": healthy, "planted": planted})["wrong"] == ["not shown: preempted"]


def test_the_page_says_what_is_wrong() -> None:
    right = Of(equal=True, balanced=True, seen=8, due=8, rest=512, grades={"proved": 512})
    wrong = Of(equal=False, balanced=True, seen=8, due=9, first="slots-short", wrong=["tokens differ"])
    text = page([("Topologies", [of_row(ROW, {"healthy": right, "planted": wrong})], [])], ["## More"])
    assert (
        "| The plain engine | one process | **no** | 16 / 17 | yes | none | ShortStore: slots-short |" in text
    )
    assert "- The plain engine: planted: tokens differ." in text and text.endswith("## More\n")
