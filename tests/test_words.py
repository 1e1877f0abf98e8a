"""Numbers in words: one rounding, and a remainder is never called all or nothing."""

from __future__ import annotations

import pytest

from kvtrace.words import capital, count, duration, listed, of_all, percent, plural, sentence, size


def test_counts_and_nouns() -> None:
    assert (count(2210), count(58720), count(1234567.4)) == ("2 210", "58 720", "1 234 567.4")
    assert (plural(1, "step"), plural(2, "step"), plural(1.04, "step")) == ("1 step", "2 steps", "1 step")
    assert (plural(1, "process"), plural(3, "process")) == ("1 process", "3 processes")
    assert (plural(2, "property"), plural(2, "key")) == ("2 properties", "2 keys")
    assert (of_all(2, 2, "x"), of_all(1, 1, "x"), of_all(1, 3, "x")) == (
        "all 2 xs",
        "the only x",
        "1 of 3 xs",
    )
    assert listed(["a", "b", "a", "c", "d", "e"]) == "a, b, c and 2 more"
    assert capital("a word") == "A word" and capital("") == ""


@pytest.mark.parametrize(
    ("part", "whole", "words"),
    [(0, 5, "0 %"), (5, 5, "100 %"), (1, 10_000, "<0.1 %"), (9_999, 10_000, ">99.9 %"), (1, 3, "33.3 %"),
     (1, 0, "0 %"), (0.5, 1, "50.0 %")],
)  # fmt: skip
def test_percentages_never_round_a_remainder_away(part: float, whole: float, words: str) -> None:
    assert percent(part, whole) == words


def test_durations_and_sizes() -> None:
    assert [duration(s) for s in (0, 1e-6, 0.0123, 9.9, 61.2, 7300)] == [
        "0 s", "1.0 µs", "12 ms", "9.9 s", "61 s", "2 h 1 min",
    ]  # fmt: skip
    assert (size(0), size(1023), size(1536), size(1 << 50)) == ("0 B", "1023 B", "1.5 KiB", "1 024 TiB")


def test_a_sentence_begins_with_a_capital_but_a_name_as_typed() -> None:
    assert sentence("vLLM schedules it") == "vLLM schedules it" == capital("vLLM schedules it")
    assert sentence("lower --block-size") == "Lower --block-size" and sentence("look, then go")[:1] == "L"
    for name in ("kv_role is unset", "get_finished must name it", '"unit" is not read', "--block-size 16"):
        assert sentence(name) == name
