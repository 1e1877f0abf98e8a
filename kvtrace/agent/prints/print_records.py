"""The records of fingerprints: what :mod:`~kvtrace.agent.prints.prints` found, as it is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from kvtrace.agent.state import AGENT
from kvtrace.agent.steps.block_tables import NULL
from kvtrace.agent.steps.prompts import Filled
from kvtrace.trace.format import Kind, Role, pack_head
from kvtrace.trace.rows import NUMBER_BITS, NUMBERS, BlockPrints, LayerPrints

_MASK = (1 << 64) - 1
_A_RECORD = 4
_A_WORD = 3


def write_prints(step: int, filled: Sequence[Filled], sums: Sequence[int], kind: Kind = Kind.PRINTS) -> None:
    """``sums``: of each block of ``filled``, in their order."""
    at = 0
    for one in filled:
        own = sums[at : at + len(one.blocks)]
        at += len(one.blocks)
        # 0 means "none": the null block is nobody's.
        prints = [
            0 if block == NULL else (value & _MASK) >> 1 or 1
            for block, value in zip(one.blocks, own, strict=True)
        ]
        head = pack_head(kind, Role.WORKER, detail=one.group)
        with AGENT.passing_request(one.request) as ident:
            for place in range(0, len(prints), _A_RECORD):
                four = (*prints[place : place + _A_RECORD], 0, 0, 0)[:_A_RECORD]
                AGENT.add(BlockPrints(head, ident, step, one.first + place, *four))


def write_layers(step: int, one: Filled, names: Sequence[str], sums: Any) -> None:
    """``sums``: int64 on the host, of shape (blocks of ``one``, ``names``)."""
    torch = sys.modules["torch"]
    numbers = (sums >> (64 - NUMBER_BITS)) & ((1 << NUMBER_BITS) - 1)
    numbers[(numbers == 0) & (sums != 0)] = 1
    numbers[torch.tensor(one.blocks) == NULL] = 0
    head = pack_head(Kind.LAYERS, Role.WORKER, detail=one.group)
    with AGENT.passing_request(one.request) as ident:
        for at in range(0, len(names), NUMBERS):
            own = names[at : at + NUMBERS]
            layer_set = AGENT.id(json.dumps([AGENT.id(name) for name in own]))
            at_once = NUMBERS // len(own)
            count = -(-len(one.blocks) // at_once)
            padded = torch.zeros((count * at_once, len(own)), dtype=torch.int64)
            padded[: len(one.blocks)] = numbers[:, at : at + NUMBERS]
            flat = torch.zeros((count, NUMBERS), dtype=torch.int64)
            flat[:, : at_once * len(own)] = padded.reshape(count, -1)
            words = sum(flat[:, part::_A_WORD] << part * NUMBER_BITS for part in range(_A_WORD))
            for number, three in enumerate(words.tolist()):
                place = one.first + number * at_once
                AGENT.add(LayerPrints(head, ident, step, place, layer_set, *three))
