"""Which source surely rounds down to which unit; what may be something else does not count."""

from __future__ import annotations

from typing import Any

import pytest

from kvtrace.agent.preflight.facts import BATCHED, BLOCK
from kvtrace.agent.preflight.rounding import roundings

HELD = """class C:
    def __init__(self, c):
        option = self._kv_transfer_config.get_from_extra_config
        self.unit = {value}
    def f(self, n):
        return {round}
"""
BATCH_SIZE, BLOCK_SIZE = "c.scheduler_config.max_num_batched_tokens", "c.cache_config.block_size"


def found(texts: dict[str, str], **extra: Any) -> list[tuple[str, str, int | None]]:
    return [(one.where, one.by, one.size) for one in roundings(texts, extra)]


def held(value: str, round: str = "n // self.unit * self.unit") -> dict[str, str]:
    return {"m": HELD.format(value=value, round=round)}


@pytest.mark.parametrize("value", [BATCH_SIZE, f"int({BATCH_SIZE})", "getattr(c, 'max_num_batched_tokens')"])
@pytest.mark.parametrize(
    "round", ["n // self.unit * self.unit", "self.unit * (n // self.unit)", "n - n % self.unit"]
)
def test_a_unit_that_the_class_keeps(value: str, round: str) -> None:
    assert found(held(value, round)) == [("m:6", BATCHED, None)]


@pytest.mark.parametrize(
    ("value", "round"),
    [
        (BATCH_SIZE, "n // self.unit"),
        (BATCH_SIZE, "n * self.unit"),
        (BATCH_SIZE, "n // self.unit * self.other"),
        (f"min({BATCH_SIZE}, 256)", "n // self.unit * self.unit"),
        (f"{BATCH_SIZE} // 8", "n // self.unit * self.unit"),
        ("c.extra.get('unit', 16)", "n // self.unit * self.unit"),
        ("c.block_size", "n // self.unit * self.unit"),
        ("option(c.key, 16)", "n // self.unit * self.unit"),
        ("1", "n // self.unit * self.unit"),
        ("4096", "n // self.bytes * self.bytes"),
    ],
)
def test_another_unit_or_no_rounding(value: str, round: str) -> None:
    assert found(held(value, round)) == []


def test_the_block_size_and_a_number_of_its_own() -> None:
    assert found(held(BLOCK_SIZE)) == [("m:6", BLOCK, None)]
    assert found(held("256")) == [("m:6", "", 256)]


@pytest.mark.parametrize("ask", ["option('unit', {})", "c.kv_connector_extra_config.get('unit', {})"])
def test_a_configuration_key_counts_as_given_else_by_default(ask: str) -> None:
    assert found(held(f"int({ask.format(16)})"), unit=64) == [("m:6", "unit", 64)]
    assert found(held(f"int({ask.format(16)})"), unit="64") == [("m:6", "unit", 64)]
    assert found(held(ask.format(16)), other=64) == [("m:6", "", 16)]
    assert found(held(ask.format(None))) == []
    assert found(held(f"int({ask.format(None)} or {BATCH_SIZE})")) == [("m:6", BATCHED, None)]
    assert found(held(f"int({ask.format(None)} or {BATCH_SIZE})"), unit=64) == [("m:6", "unit", 64)]


def test_a_unit_that_is_given_two_values_is_not_known() -> None:
    text = held(BATCH_SIZE, "n - n % self.unit")["m"] + "    def g(self):\n        self.unit = 16\n"
    assert found({"m": text}) == []


def test_a_helper_counts_by_what_it_is_called_with() -> None:
    helper = "def align(n, unit):\n    return n // unit * unit\n"
    call = f"def f(c, n):\n    u = {BATCH_SIZE}\n    return align(n, u)\n"
    assert found({"a": helper, "m": call}) == [("a:2", BATCHED, None)]
    both = f"def f(c, n):\n    return align(n, {BATCH_SIZE}) + align(n, {BLOCK_SIZE})\n"
    assert found({"a": helper, "m": both}) == [] == found({"a": helper})


def test_what_a_constructor_is_given_is_not_known() -> None:
    """It is called by the name of its class, and by those of the classes below it."""
    text = "class A:\n    def __init__(self, unit):\n        self.unit = unit\n    def f(self, n):\n"
    text += "        return n // self.unit * self.unit\nclass B(A):\n    def __init__(self):\n"
    assert found({"m": text + "        super().__init__(64)\nA(128)\n"}) == []
