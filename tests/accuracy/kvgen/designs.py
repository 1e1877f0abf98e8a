"""Deliberate choices of healthy connectors: what they leave out, or store in another form, by design.

A run with one of them must get no finding of severity fault. What each takes stands in the truth of the run
(harness/choices.py says how much, from the plan alone).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.catalogue import HOOKS, PUSH, SYNC
from kvgen.stores import FILE_KINDS, SERVER_KINDS


@dataclass(frozen=True)
class Design:
    """Attributes:
    title: in plain words.
    allow: field of the plan -> its possible values.
    work: kinds of workload in which it shows.
    """

    name: str
    title: str
    allow: Mapping[str, tuple[Any, ...]]
    work: tuple[str, ...]


def _design(name: str, title: str, work: str, **allow: tuple[Any, ...]) -> Design:
    return Design(name, title, allow, tuple(work.split()))


# The scheduler's side decides when a request goes forward, with the prompt's length in hand.
OFFERS = {
    "decide": ("stream", "prompt-end"),
    "form": ("entries", "flat", "ragged", "map", "blob", "array", "combined"),
}
PROMPTS = {**OFFERS, "decode": (False,), "unit_from": ("option", "constant", "block")}
IN_ORDER = {
    "place": ("end",), "run": ("inline",), "record": ("stack",), "dedupe": ("none",), "decode": (False,),
    "unit_from": ("option", "constant", "block"), "prefix_caching": (False,),
}  # fmt: skip
"""One record for each unit, put in the order of the prompts."""
FILLED = {
    "store_kind": (*FILE_KINDS, "sqlite", *SERVER_KINDS), "chain": ("chain", "prefix"), "lookup": ("ask",),
    "unit_from": ("option", "constant", "block"),
}  # fmt: skip

DESIGNS: tuple[Design, ...] = (
    _design("large-unit", "the unit is larger than a block; what does not fill it is left out",
            "mostly-below tails", unit_blocks=(2, 4), unit_from=("option", "constant"), decode=(False,),
            **PUSH),
    _design("whole-blocks", "the last, partial block of a prompt is never stored", "shorts",
            unit_from=("block",), unit_blocks=(1,), decode=(False,),
            family=("units", "prefix", "request", "request-whole"), **PUSH),
    _design("first-chunk", "only the chunk that a request's first step computes is stored", "chunked-alone",
            decide=("stream",), tracker=("table", "requests", "blockstate"), decode=(False,),
            form=("entries", "flat", "ragged", "blob", "map"), prefix_caching=(False,),
            unit_from=("option", "constant", "block"), **PUSH),
    _design("minimum-length", "prompts below a minimum length from the configuration are not stored",
            "mixed one-by-one together", **PROMPTS, **PUSH),
    _design("reads-only", "a consumer by its role: it loads and stores nothing", "repeats longer",
            role=("both",), load=(*SYNC, "async"), **FILLED, **OFFERS),
    _design("writes-only", "a producer by its role: it stores and loads nothing", "repeats longer",
            role=("both",), prefix_caching=(False,), decode=(False,), **OFFERS),
    _design("second-use", "a unit is stored when it is used for the second time", "repeats longer",
            family=("units",), dedupe=("none",), lookup=("ask",), prefix_caching=(False,), **PROMPTS,
            **PUSH),
    _design("quota", "a quota of units, bytes or prompts, and nothing after it", "one-by-one",
            family=("units", "request"), dedupe=("none",), lookup=("ask",), prefix_caching=(False,),
            **PROMPTS, **PUSH),
    _design("head-only", "only the head of a prompt is stored", "one-by-one long together",
            family=("units", "prefix", "request"), **PROMPTS, **PUSH),
    _design("end-left-out", "the last units of a prompt are left out, as they will change", "one-by-one long",
            family=("units", "prefix", "request"), **PROMPTS, **PUSH),
    _design("ring", "a ring of places: the oldest record makes room for the newest", "one-by-one long",
            store_flaw=("ring",), family=("units", "request"), role=("producer",), **IN_ORDER),
    _design("evicts", "a store of limited size evicts the oldest record", "one-by-one long",
            store_flaw=("evict",), family=("units", "request"), role=("producer",), **IN_ORDER),
    _design("time-to-live", "records live for a time, and are removed after it", "apart",
            store_flaw=("ttl",), lookup=("ask",), run=("inline",), dedupe=("none",), decode=(False,),
            # nothing is put, and so nothing removed, between a lookup and the load that it promises
            load=("none", "sync"), async_scheduling=(False,),
            prefix_caching=(False,), unit_from=("option", "constant", "block"), **PUSH),
    _design("decode-stored", "tokens of the answer are stored as well", "decode", decode=(True,), **PUSH),
    _design("prompt-only", "tokens of the answer are not stored", "decode", decode=(False,), **PUSH),
    _design("eight-bit", "KV is stored in eight bits, with a bounded error", "repeats longer mixed",
            pack=("int8", "int8-rows")),
    _design("fp8", "KV is stored as fp8, with a bounded error", "repeats longer mixed", pack=("fp8",)),
    _design("half", "KV is stored in half precision, with a bounded error", "repeats longer mixed",
            pack=("bf16",)),
    _design("kept-under-preemption", "blocks are held until they are saved, also while memory is short",
            "pressure", place=("held", "deferred"), role=("producer",)),
    _design("one-load", "of the requests of a step at most one loads, the others compute", "together-again",
            role=("both",), load=(*SYNC, "async"), prefix_caching=(False,), family=("units", "prefix"),
            unit_from=("option", "constant", "block")),
    _design("opt-out", "a request may ask not to be stored (kv_transfer_params)", "opt-out", place=HOOKS,
            prefix_caching=(False,), **PROMPTS, **PUSH),
)  # fmt: skip
DESIGN_BY_NAME = {design.name: design for design in DESIGNS}

LOSSY = frozenset(("eight-bit", "fp8", "half"))
GONE_LATER = frozenset(("ring", "evicts", "time-to-live"))
"""What is kept out of the store by them was stored before: it was read, and it is not at rest in the end."""
