"""What a row of the matrix is: how it differs from the plain engine, and what kvtrace must say of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spec import ENGINE

STORE = "@STORE@"
"""Stands in options for the folder of the run's store."""

MODEL = "@MODEL@"
"""Stands in arguments of the engine for the folder of the row's model."""

Act = dict[str, Any]
"""One thing that the workload does: ``do`` names a function of acts.py, the rest are its arguments."""


@dataclass(frozen=True)
class Connector:
    """A connector as the engine is told of it.

    Attributes:
        module: outside vLLM; "" for one of vLLM's own.
        extra: its options; :data:`STORE` in them becomes the folder of the store.
        first: ids that are right as the first finding; none: it is healthy, there must be no fault.
        engine: arguments of the engine that this connector needs.
        at_rest: false where its store holds rows of other tokens, which are not to be called saved.
    """

    name: str
    module: str = ""
    role: str = "kv_both"
    extra: dict[str, Any] = field(default_factory=dict)
    first: frozenset[str] = frozenset()
    engine: dict[str, Any] = field(default_factory=dict)
    at_rest: bool = True

    def options(self, store: str, role: str = "") -> dict[str, Any]:
        """The ``kv_transfer_config``. The role of an engine's own goes before the connector's."""
        config = {
            "kv_connector": self.name,
            "kv_role": role or self.role,
            "kv_connector_extra_config": filled(self.extra, {STORE: store}),
        }
        return {**config, **({"kv_connector_module_path": self.module} if self.module else {})}


UNIT = {"path": STORE, "unit": 32}
CHUNKS = Connector("ChunkStore", "chunk_store", extra=UNIT)
SHORT = Connector("ShortStore", "saves", extra=UNIT, first=frozenset({"slots-short"}))


def multi(*children: Connector, first: frozenset[str] = frozenset()) -> Connector:
    """vLLM's MultiConnector; each child has a folder of its own in the store."""
    parts = [child.options(f"{STORE}/{at}") for at, child in enumerate(children)]
    return Connector("MultiConnector", extra={"connectors": parts}, first=first)


@dataclass(frozen=True)
class Row:
    """One line of the matrix.

    Attributes:
        name: for ``--only`` and the folders of its runs.
        title: what is different from the plain engine, in words.
        acts: the workload; see acts.py.
        engine: arguments of ``LLM(...)`` (of ``vllm serve``: as options), on top of those of scenarios.
        engines: of each of several engines in one script its own arguments; ``role`` among them is the
            connector's. None: one engine.
        how: ``one`` (engine in the process of the script), ``many`` (vLLM's own processes), ``serve``
            (``vllm serve``), ``stream`` (``many``, prompts in parts), ``torchrun`` (each rank a script, with
            the engine in it).
        alone: of ``one``: not after another engine in the same process.
        model: a name of weights.py.
        images: its engine needs torchvision (vision.py), which the environment has not.
        healthy, planted: the connectors of its two kinds of runs.
        shows: what the report of the healthy run must prove beside, by names of proofs.py.
        at_rest: whether each saved token lies once in the store, so that the rows there are what must
            be called saved.
        note: what a reader of the page should know.
    """

    name: str
    title: str
    acts: tuple[Act, ...]
    engine: dict[str, Any] = field(default_factory=dict)
    engines: tuple[dict[str, Any], ...] = ()
    how: str = "one"
    alone: bool = False
    model: str = "tiny"
    images: bool = False
    env: dict[str, str] = field(default_factory=dict)
    healthy: Connector = CHUNKS
    planted: Connector = SHORT
    shows: tuple[str, ...] = ()
    at_rest: bool = True
    note: str = ""

    @property
    def shares_process(self) -> bool:
        """Whether its engines may run one after another with those of other rows."""
        return self.how == "one" and not self.alone and not self.images

    def acts_of(self, model: str) -> list[Act]:
        """Its workload, with the folder of its model in it."""
        return list(filled(list(self.acts), {MODEL: model}))

    def connector(self, kind: str) -> Connector:
        return self.healthy if kind == "healthy" else self.planted

    def engine_args(self, kind: str, model: str, store: str) -> list[dict[str, Any]]:
        """Arguments of each engine of a run of this row."""
        connector = self.connector(kind)
        found = []
        for own in self.engines or ({},):
            role = str(own.get("role", ""))
            args = {
                **ENGINE, **self.engine, **connector.engine,
                **{name: value for name, value in own.items() if name != "role"},
                "model": model, "kv_transfer_config": connector.options(store, role),
            }  # fmt: skip
            found.append(filled(args, {MODEL: model}))
        return found


def prompts(seed: str, *lengths: int) -> list[list[int]]:
    """A prompt of each length, in token ids; the same each time."""
    source = random.Random(f"matrix: {seed}")
    return [[source.randrange(3, 500) for _ in range(length)] for length in lengths]


def generate(seed: str, *lengths: int, max_tokens: int = 1, **more: Any) -> Act:
    """The act of asking for prompts of these lengths, all at once unless ``together`` is false."""
    params = {"max_tokens": max_tokens, **more.pop("params", {})}
    return {"do": "generate", "prompts": prompts(seed, *lengths), "params": params, **more}


def filled(value: Any, words: Mapping[str, str]) -> Any:
    """A value of options with some words in its texts replaced."""
    if isinstance(value, dict):
        return {name: filled(one, words) for name, one in value.items()}
    if isinstance(value, list):
        return [filled(one, words) for one in value]
    for word, text in words.items() if isinstance(value, str) else ():
        value = value.replace(word, text)
    return value
