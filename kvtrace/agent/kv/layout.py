"""How a layer's KV tensor lies in memory: which bytes are which slot.

A slot is one token's place: ``block * slots in a block + offset in the block``. Attention backends lay the
cache out in many ways (K and V first, blocks first, heads before slots, permuted strides, layers packed
between each other, a block of the manager split into smaller ones for the kernel); all that is needed here
is which dimension of the tensor counts blocks, and which the slots in one. Numbers only, no tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

BLOCK, SLOT, INNER = "block", "slot", "inner"

Hint = tuple[int, ...] | None
"""A tensor's dimensions for blocks and for slots; () where vLLM was asked and did not say, None where there
was nobody to ask."""


@dataclass(frozen=True)
class Dim:
    """One dimension of the tensor. ``stride`` in bytes; ``part``: BLOCK, SLOT or INNER."""

    size: int
    stride: int
    part: str


@dataclass(frozen=True)
class Layout:
    """A layer's KV tensor.

    Attributes:
        cell: bytes of one slot that follow each other.
        dims: the dimensions above that by falling stride. The one with part BLOCK and that with part SLOT are
            always there, others of size 1 are left out. Each stride holds all that lies below it.
    """

    cell: int
    dims: tuple[Dim, ...]

    @cached_property
    def in_block(self) -> int:
        """Slots in a block."""
        return next(dim.size for dim in self.dims if dim.part == SLOT)

    @cached_property
    def slots(self) -> int:
        return self.in_block * next(dim.size for dim in self.dims if dim.part == BLOCK)

    @cached_property
    def slot_bytes(self) -> int:
        return self.cell * prod(dim.size for dim in self.dims if dim.part == INNER)


@lru_cache(maxsize=256)
def layout_of(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    blocks: int,
    block_size: int,
    hint: Hint = None,
) -> Layout | None:
    """The layout of a KV tensor; None where it is not understood, or two readings of it are possible.

    Args:
        shape, strides: of the tensor; strides in elements.
        blocks, block_size: of the KV cache manager: number of blocks, tokens in one.
        hint: what the attention backend says; where nobody does, the sizes must leave one reading.
    """
    pair = dims_of(shape, blocks, block_size, hint)
    if pair is None:
        return None
    block, slot = pair
    parts = [BLOCK if at == block else SLOT if at == slot else INNER for at in range(len(shape))]
    dims = [
        Dim(size, stride * itemsize, part)
        for size, stride, part in zip(shape, strides, parts, strict=True)
        if size > 1
    ]
    dims.sort(key=lambda dim: -dim.stride)
    span = itemsize
    for dim in reversed(dims):
        if dim.stride < span:
            return None  # elements on top of each other
        span = dim.stride * dim.size
    cell = itemsize
    while dims and dims[-1].part == INNER and dims[-1].stride == cell:
        cell *= dims.pop().size
    for part in (BLOCK, SLOT):
        if not any(dim.part == part for dim in dims):
            dims.insert(0, Dim(1, span, part))  # one of them: its stride says nothing
    return Layout(cell, tuple(dims))


def dims_of(
    shape: tuple[int, ...], blocks: int, block_size: int, hint: Hint = None
) -> tuple[int, int] | None:
    """Which dimensions of a KV tensor count blocks, and slots; arguments as of :func:`layout_of`."""
    pairs: list[tuple[int, ...]] = [*_pairs(shape, blocks, block_size)] if hint is None else [hint]
    pairs = [pair for pair in pairs if _fits(shape, pair, blocks, block_size)]
    return (pairs[0][0], pairs[0][1]) if len(pairs) == 1 else None


def _fits(shape: Sequence[int], pair: tuple[int, ...], blocks: int, block_size: int) -> bool:
    if len(pair) != 2 or max(pair) >= len(shape):
        return False
    block, slot = (shape[at] for at in pair)
    whole = block_size > 0 and block_size % slot == 0 if slot else False
    return whole and block == blocks * (block_size // slot)


def _pairs(shape: Sequence[int], blocks: int, block_size: int) -> list[tuple[int, int]]:
    """Dimensions that may count blocks and slots: those of exactly the manager's sizes, else of smaller
    blocks for the kernel."""
    every = [(a, b) for a in range(len(shape)) for b in range(len(shape)) if a != b]
    exact = [(a, b) for a, b in every if (shape[a], shape[b]) == (blocks, block_size)]
    return exact or [pair for pair in every if shape[pair[1]] > 1 and _fits(shape, pair, blocks, block_size)]


def hint_of(layer: Any, rank: int, block_size: int) -> Hint:
    """What vLLM says of a layer's KV tensor. ``layer``: vLLM's attention layer, ``rank``: dimensions of the
    tensor."""
    backend = getattr(layer, "attn_backend", None)
    shape_of = getattr(backend, "get_kv_cache_shape", None)
    if shape_of is not None:  # up to 0.28
        return _asked(shape_of, block_size)
    if "vllm.v1.kv_cache_layout" in sys.modules:
        # One logical shape for all: blocks, heads, slots, content. MLA leaves its one head out.
        return {4: (0, 2), 3: (0, 1)}.get(rank, ())
    return None


def _asked(shape_of: Any, block_size: int) -> tuple[int, ...]:
    """The dimensions that change with the number of blocks, and with the block size."""
    try:
        given = (997, block_size), (1009, block_size), (997, block_size * 2)
        plain, blocks, slots = (tuple(shape_of(*sizes, 1, 64)) for sizes in given)
    except Exception:
        return ()
    if not len(plain) == len(blocks) == len(slots):
        return ()
    block = [at for at, change in enumerate(zip(plain, blocks, strict=True)) if change == (997, 1009)]
    doubled = block_size, block_size * 2
    slot = [at for at, change in enumerate(zip(plain, slots, strict=True)) if change == doubled]
    return (block[0], slot[0]) if len(block) == len(slot) == 1 else ()
