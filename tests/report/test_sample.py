"""The sample is a report that could be: what it says in one place agrees with the others."""

from __future__ import annotations

import itertools

from sample import BELOW, DECODE, PAIRS, PROMPT, SAVED, TOTAL, sample


def test_numbers_add_up() -> None:
    report = sample()
    book = report["ledger"]["saves"]
    assert (PROMPT, SAVED, BELOW, DECODE, TOTAL) == (62816, 4096, 58720, 4010, 66826)
    assert sum(book["accounts"].values()) == book["total"] == TOTAL * PAIRS
    assert sum(book["tokens"].values()) == book["total_tokens"]
    assert sum(sum(of.values()) for of in book["prompts"].values()) == PROMPT
    rows = report["requests"]["rows"]
    assert sum(row["saved"] for row in rows) == SAVED
    assert sum(row["not_saved"] for row in rows) == BELOW + DECODE
    assert all(sum(row["chunk_tokens"]) == row["prompt"] for row in rows)
    assert len(rows) == report["requests"]["shown"] == report["requests"]["total"]
    assert abs(sum(one["share"] for one in report["findings"]) + SAVED / TOTAL - 1) < 1e-9


def test_the_road_is_unbroken() -> None:
    stages = sample()["stages"]
    assert [stage["stage"] for stage in stages] == list(range(7))
    assert all(left["out"] == right["in"] for left, right in itertools.pairwise(stages))


def test_summary_is_the_sum_of_the_rows() -> None:
    coverage = sample()["coverage"]
    for one in coverage["summary"]:
        rows = [row for row in coverage["hooks"] if row["hook"] == one["hook"]]
        assert one["fired"] == sum(row["fired"] for row in rows)
        assert one["eligible"] == sum(row["eligible"] for row in rows)
