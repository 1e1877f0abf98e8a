"""What both sides of a generated connector share while it is written: names, expressions, settings."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from kvgen.names import Names
from kvgen.plan import VERSION, Plan
from kvgen.shapes import ShapeSource

PLACE_WORDS = {
    "path": "root path dir location base_path storage_path where folder shared_path",
    "address": "endpoint address server url store_addr remote backend_addr",
    "prefix": "namespace prefix segment_prefix area pool_name",
}
UNIT_WORDS = "chunk_size unit_tokens granularity tokens_per_chunk page_tokens span_tokens segment_size grain"
BLOCK_WORDS = "block_size _block page_size bs _blk tokens_per_block"
PER_WORDS = "per_unit blocks_per_chunk _ratio pages_each _nblk fan"
CONFIG_WORDS = "cfg conf opts settings params knobs options"
DEEP_WORDS = "sizes geometry shape_ layout limits dims"
SWITCH_WORDS = "enable_save write_enabled save_kv offload_on persist store_prompts"
MINIMUM_WORDS = "min_tokens min_prompt threshold smallest min_prefix_tokens"
TOKEN_BYTES = 4 * 2 * 128 * 4
"""KV of a token of the model: layers, heads, key and value, bytes of a number."""
LIMIT_WORDS = "quota most max_entries keep budget_units allowed cap"
CONSTANTS = "CHUNK UNIT GRAIN TOKENS_PER_ENTRY SEGMENT STEP_TOKENS"


@dataclass(frozen=True)
class Method:
    """A method as source: its name, its arguments without self, the lines of its body."""

    name: str
    arguments: str
    body: str


@dataclass
class Writer:
    """Attributes:
    settings: what the user configures, by key; ``@PLACE@`` stands for where the store is.
    unit, block, per_unit: expressions of both sides.
    """

    plan: Plan
    names: Names = field(init=False)
    rng: random.Random = field(init=False)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        self.rng = random.Random(f"source {VERSION}:{plan.seed}:{plan.fault}")
        self.names = Names(self.rng)
        self.holder = self.rng.choice(("self", "self", "config", "deep"))
        self.words = {
            name: self.rng.choice(words.split())
            for name, words in {
                "place": PLACE_WORDS[place_kind(plan)],
                "unit": UNIT_WORDS,
                "block": BLOCK_WORDS,
                "per": PER_WORDS,
                "config": CONFIG_WORDS,
                "deep": DEEP_WORDS,
                "switch": SWITCH_WORDS,
                "minimum": MINIMUM_WORDS,
                "limit": LIMIT_WORDS,
                "constant": CONSTANTS,
            }.items()
        }
        base = {
            "self": "self",
            "config": f"self.{self.words['config']}",
            "deep": f"self.{self.words['config']}.{self.words['deep']}",
        }[self.holder]
        self.block = f"self.{self.words['block']}"
        self.unit = self.words["constant"] if plan.unit_from == "constant" else f"{base}.{self.words['unit']}"
        self.per_unit = f"self.{self.words['per']}"
        if plan.unit_from == "block":
            self.unit = self.block
        self.shape = ShapeSource(plan.shape, self.names, self.block, self.unit, self.per_unit)

    def is_(self, *names: str) -> bool:
        """Whether one of these is planted, or is the connector's design."""
        return (self.plan.fault or self.plan.design) in names

    def attribute(self, concept: str) -> str:
        return f"self.{self.names[f'self:{concept}']}"

    def call(self, concept: str) -> str:
        return f"self.{self.names[f'call:{concept}']}"

    @property
    def saves(self) -> bool:
        return bool(self.plan.role != "consumer")

    @property
    def worker_leaves_stores(self) -> bool:
        """A consumer's scheduler side offers stores all the same, and its workers pass them over."""
        in_hooks = self.plan.place in ("layer", "buffer", "end")  # else blocks are held until they are read
        return self.is_("reads-only") and in_hooks and bool(self.plan.variant % 2)

    @property
    def loads(self) -> bool:
        return bool(self.plan.load != "none")

    @property
    def needs_keys(self) -> bool:
        """The scheduler's side computes keys."""
        return not self.plan.family.startswith("request")

    @property
    def asks(self) -> bool:
        """The scheduler's side asks the store."""
        plan = self.plan
        asks = plan.dedupe == "ask" or (self.loads and plan.lookup == "ask")
        return bool(asks or self.is_("cleans-up"))


def place_kind(plan: Plan) -> str:
    if plan.store.kind in ("frame", "line", "http", "daemon"):
        return "address"
    return "prefix" if plan.store.kind == "shm" else "path"
