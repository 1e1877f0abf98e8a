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
BATCH_SIZE = "c.scheduler_config.max_num_batched_tokens"


def held(value: str, round: str = "n // self.unit * self.unit") -> dict[str, str]:
    return {"m": HELD.format(value=value, round=round)}


@pytest.mark.parametrize("value", [BATCH_SIZE, f"int({BATCH_SIZE})", "getattr(c, 'max_num_batched_tokens')"])
@pytest.mark.parametrize(
    "round", ["n // self.unit * self.unit", "self.unit * (n // self.unit)", "n - n % self.unit"]
)
def test_a_unit_that_the_class_keeps(value: str, round: str) -> None:
    assert to_batched_tokens(held(value, round)) == ["m:5"]


@pytest.mark.parametrize(
    ("value", "round"),
    [
        (BATCH_SIZE, "n // self.unit"),
        (BATCH_SIZE, "n * self.unit"),
        (BATCH_SIZE, "n // self.unit * self.other"),
        (f"min({BATCH_SIZE}, 256)", "n // self.unit * self.unit"),
        (f"{BATCH_SIZE} // 8", "n // self.unit * self.unit"),
        (f"int(c.unit or {BATCH_SIZE})", "n // self.unit * self.unit"),
        ("c.cache_config.block_size", "n // self.unit * self.unit"),
        ("256", "n // self.unit * self.unit"),
    ],
)
def test_another_unit_or_no_rounding(value: str, round: str) -> None:
    assert to_batched_tokens(held(value, round)) == []


def test_a_unit_that_is_given_two_values_is_not_known() -> None:
    text = held(BATCH_SIZE, "n - n % self.unit")["m"] + "    def g(self):\n        self.unit = 16\n"
    assert to_batched_tokens({"m": text}) == []


def test_a_helper_counts_by_what_it_is_called_with() -> None:
    helper = "def align(n, unit):\n    return n // unit * unit\n"
    call = f"def f(c, n):\n    u = {BATCH_SIZE}\n    return align(n, u)\n"
    assert to_batched_tokens({"a": helper, "m": call}) == ["a:2"]
    both = f"def f(c, n):\n    return align(n, {BATCH_SIZE}) + align(n, 16)\n"
    assert to_batched_tokens({"a": helper, "m": both}) == [] == to_batched_tokens({"a": helper})


def test_what_a_constructor_is_given_is_not_known() -> None:
    """It is called by the name of its class, and by those of the classes below it."""
    text = "class A:\n    def __init__(self, unit):\n        self.unit = unit\n    def f(self, n):\n"
    text += "        return n // self.unit * self.unit\nclass B(A):\n    def __init__(self, c):\n"
    assert to_batched_tokens({"m": text + f"        super().__init__({BATCH_SIZE})\nA(128)\n"}) == []
