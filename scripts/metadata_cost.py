#!/usr/bin/env python3
"""What reading a step's connector metadata costs, as ratios to what building that metadata takes.

    python scripts/metadata_cost.py [--rounds N]

Metadata of common shapes, for batches of 8, 64 and 256 requests with 1600 tokens each, is built and read in
turn; the ratio is taken round by round, and its median and quartiles are printed. Each is a step in which
every request of the batch has an entry: most decode steps have none, and those cost one look. Needs torch, no
vLLM. Only ratios: absolute times of a shared machine prove nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from kvtrace.agent.metadata import Declared, StepRequests, read  # noqa: E402

BLOCK = 16
TOKENS = 1600


@dataclass
class Spec:
    skip_leading_tokens: int
    can_save: bool


@dataclass
class Prefix:
    """An id, the prompt's tokens, a slot mapping, a save spec."""

    req_id: str
    token_ids: list[int]
    slot_mapping: Any
    save_spec: Spec


@dataclass
class Pages:
    """An id, a list of blocks and an end."""

    rid: str
    upto: int
    put: bool
    pages: list[int]


@dataclass
class Nameless:
    """Tokens and slots, and no id."""

    token_ids: Any
    slot_mapping: Any
    is_store: bool


@dataclass
class Meta:
    requests: list[Any] = field(default_factory=list)


@dataclass
class Flat:
    """One list of blocks for the whole step."""

    store_gpu_blocks: list[int]
    store_cpu_blocks: list[int]


class World:
    """A step that computes a whole prompt of each request."""

    def __init__(self, requests: int) -> None:
        blocks = TOKENS // BLOCK
        self.tables = {
            f"req-{at}-0123abcd": list(range(1 + at * blocks, 1 + (at + 1) * blocks))
            for at in range(requests)
        }
        self.tokens = {name: torch.randint(0, 150_000, (TOKENS,)).tolist() for name in self.tables}
        known = {
            name: SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=TOKENS, _all_token_ids=tokens)
            for name, tokens in self.tokens.items()
        }
        self.scheduler = SimpleNamespace(
            block_size=BLOCK,
            requests=known,
            kv_cache_manager=SimpleNamespace(get_block_ids=lambda name: (list(self.tables[name]),)),
        )
        self.output = SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens=dict.fromkeys(known, TOKENS)
        )

    def slots(self, name: str) -> Any:
        blocks = torch.tensor(self.tables[name])
        return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()

    def prefixes(self) -> Any:
        return Meta(
            [
                Prefix(name, tokens[:TOKENS], self.slots(name), Spec(0, True))
                for name, tokens in self.tokens.items()
            ]
        )

    def pages(self) -> Any:
        return Meta([Pages(name, TOKENS, True, list(table)) for name, table in self.tables.items()])

    def nameless(self) -> Any:
        return Meta(
            [Nameless(torch.tensor(tokens), self.slots(name), True) for name, tokens in self.tokens.items()]
        )

    def flat(self) -> Any:
        blocks = [block for table in self.tables.values() for block in table]
        return Flat(blocks, [block + 50_000 for block in blocks])


SHAPES: dict[str, Callable[[World], Any]] = {
    "id, tokens, slot mapping": World.prefixes,
    "id, blocks, an end": World.pages,
    "tokens and slots, no id": World.nameless,
    "one flat list of blocks": World.flat,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    print(f"{'metadata':28} {'requests':>8} {'median':>7}   quartiles")
    for name, build in SHAPES.items():
        for requests in (8, 64, 256):
            world = World(requests)
            ratios = [ratio(world, build) for _ in range(rounds)]
            low, median, high = statistics.quantiles(ratios, n=4)
            print(f"{name:28} {requests:8} {median:7.2f}   [{low:.2f} - {high:.2f}]")


def ratio(world: World, build: Callable[[World], Any]) -> float:
    started = time.thread_time_ns()
    meta = build(world)
    built = time.thread_time_ns()
    declared: Declared = read(meta, StepRequests(world.scheduler, world.output))
    ended = time.thread_time_ns()
    if not declared.readable or declared.store_slots != len(world.tables) * TOKENS:
        raise SystemExit(f"read {declared.store_slots} slots: {declared.problems}")
    return (ended - built) / max(1, built - started)


if __name__ == "__main__":
    main()
