"""Which source surely rounds down to max_num_batched_tokens; what may be something else does not count."""

from __future__ import annotations

import pytest

from kvtrace.agent.preflight.rounding import to_batched_tokens

HELD = """class C:
    def __init__(self, c):
        self.unit = {value}
    def f(self, n):
        return {round}
"""
BATCH, BLOCK = "c.scheduler_config.max_num_batched_tokens", "c.cache_config.block_size"


@pytest.mark.parametrize("value", [BATCH, f"int({BATCH})", "getattr(c, 'max_num_batched_tokens')"])
@pytest.mark.parametrize(
    "round", ["n // self.unit * self.unit", "self.unit * (n // self.unit)", "n - n % self.unit"]
)
def test_a_unit_that_the_class_keeps(value: str, round: str) -> None:
    assert to_batched_tokens({"m": HELD.format(value=value, round=round)}) == ["m:5"]


@pytest.mark.parametrize(
    ("value", "round"),
    [
        (BLOCK, "n // self.unit * self.unit"),
        (BATCH, "n // self.unit"),
        (BATCH, "n * self.unit"),
        (BATCH, "n // self.unit * self.other"),
        (f"min({BATCH}, 256)", "n // self.unit * self.unit"),
        (f"{BATCH} // 8", "n // self.unit * self.unit"),
        ("c.extra.get('unit', 16)", "n // self.unit * self.unit"),
    ],
)
def test_another_unit_or_no_rounding(value: str, round: str) -> None:
    assert to_batched_tokens({"m": HELD.format(value=value, round=round)}) == []


def test_a_unit_that_is_given_two_values_is_not_known() -> None:
    text = HELD.format(value=BATCH, round="n - n % self.unit") + "    def g(self):\n        self.unit = 16\n"
    assert to_batched_tokens({"m": text}) == []


def test_a_helper_counts_by_what_it_is_called_with() -> None:
    helper = "def align(n, unit):\n    return n // unit * unit\n"
    assert to_batched_tokens(
        {"a": helper, "m": f"def f(c, n):\n    u = {BATCH}\n    return align(n, u)\n"}
    ) == ["a:2"]
    both = f"def f(c, n):\n    return align(n, {BATCH}) + align(n, {BLOCK})\n"
    assert to_batched_tokens({"a": helper, "m": both}) == [] == to_batched_tokens({"a": helper})
