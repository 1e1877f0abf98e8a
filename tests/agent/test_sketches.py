"""Sketches of KV: alike for KV that is alike, in what follows from rounding and in what does not."""

from __future__ import annotations

from typing import Any

import pytest

from kvtrace.ledger.contents.distance import TWO_BITS
from kvtrace.trace.rows import SIGNS, SIZE_OFFSET, SIZE_STEPS

torch = pytest.importorskip("torch")

from kvtrace.agent.prints.sketches import Signs, parts_of, sketches_of  # noqa: E402

LAYERS, BLOCKS, NUMBERS = 3, 8, 1000


def kv(dtype: Any = torch.float32) -> list[Any]:
    torch.manual_seed(3)
    of_channels = torch.rand(NUMBERS) * 8  # some are large in every block, as those of real keys
    return [(torch.randn(BLOCKS, NUMBERS) * of_channels).to(dtype) for _ in range(LAYERS)]


def sketched(layers: list[Any]) -> list[int]:
    signs, parts = Signs(), 0.0
    for at, values in enumerate(layers):
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()]
        own = signs.of(values, values[0].nbytes)
        parts = parts + parts_of(values.view(integers), values.dtype, own, at)
    return [value >> 1 for value in sketches_of(parts, LAYERS).tolist()]


def differing(one: list[int], other: list[int]) -> float:
    mask = (1 << SIGNS) - 1
    return sum(((a ^ b) & mask).bit_count() for a, b in zip(one, other, strict=True)) / BLOCKS / SIGNS


def size(value: int) -> float:
    return float(2 ** ((value >> SIGNS) / SIZE_STEPS - SIZE_OFFSET))


def eight_bits(values: Any) -> Any:
    scale = values.abs().amax(1, keepdim=True) / 127
    return (values / scale).round() * scale


def two_bits(values: Any) -> Any:
    low, high = values.amin(0, keepdim=True), values.amax(0, keepdim=True)
    return ((values - low) / (high - low) * 3).round() / 3 * (high - low) + low


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [
        (lambda values: values.to(torch.bfloat16).to(values.dtype), 0.0, 0.01),
        (eight_bits, 0.0, 0.02),
        (two_bits, 0.0, 0.13),
        (lambda values: values * 3, 0.0, 0.0),
        (lambda values: values.roll(1, 0), 0.4, 0.6),
        (lambda values: values.flip(1), 0.4, 0.6),
        (lambda values: torch.randn_like(values), 0.4, 0.6),
    ],
    ids=["half the bits", "eight bits", "two bits", "larger", "another block", "another order", "no KV"],
)
def test_rounding_changes_few_signs_and_other_kv_half(change: Any, least: float, most: float) -> None:
    before = kv()
    after = [change(values) for values in before]
    assert least <= differing(sketched(before), sketched(after)) <= most


def test_two_bits_go_as_far_as_reports_say() -> None:
    before, rounded = kv(), [two_bits(values) for values in kv()]
    others = [values.roll(1, 0) for values in before]
    way = differing(sketched(before), sketched(rounded)) / differing(sketched(before), sketched(others))
    assert way == pytest.approx(TWO_BITS, abs=0.05)


def test_layers_that_change_places_have_nothing_in_common() -> None:
    one, two, three = kv()
    assert 0.4 <= differing(sketched([one, two, three]), sketched([two, three, one])) <= 0.6


def test_how_large_the_numbers_are_is_kept() -> None:
    one, other = sketched(kv()), sketched([values * 3 for values in kv()])
    assert [size(b) / size(a) for a, b in zip(one, other, strict=True)] == pytest.approx(
        [3] * BLOCKS, rel=0.01
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_sketch_is_of_numbers_not_of_bytes(dtype: Any) -> None:
    assert differing(sketched(kv()), sketched(kv(dtype))) <= 0.02


def test_what_is_no_number_or_nothing_has_a_sketch_too() -> None:
    empty = [torch.zeros(BLOCKS, NUMBERS) for _ in range(LAYERS)]
    odd = [torch.full((BLOCKS, NUMBERS), float("nan")) for _ in range(LAYERS)]
    assert sketched(empty) == sketched(odd) and all(sketched(empty))
