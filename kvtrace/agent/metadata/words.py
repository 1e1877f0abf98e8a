"""What a name in a connector's metadata says: store or load, a beginning, an end or a count, no KV at all.

Names never say what a list of numbers is: that follows from its values (:mod:`.identify`). They are read by
words, not by letters: ``already`` is no read, ``num_saved_tokens`` no order to save.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from kvtrace.trace.format import Flag


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _verbs(text: str) -> frozenset[str]:
    """The verbs, their third person and their -ing: no past tense, what was done is no order."""
    verbs = _set(text)
    bare = {verb.removesuffix("e") for verb in verbs}
    return (
        verbs | {verb + "s" for verb in verbs} | {verb + "es" for verb in verbs} | {v + "ing" for v in bare}
    )


_STORE = _verbs("store save put putt write send offload dump persist push upload")
_LOAD = _verbs("load recv receive fetch read restore retrieve onload reload prefetch get gett pull download")
_ORDERED = {"saved": Flag.STORE, "stored": Flag.STORE, "written": Flag.STORE, "loaded": Flag.LOAD}
"""Orders behind ``to``: ``blocks_to_be_saved``."""
_NEGATION = _set("skip skips no not disable disabled never without dont")
_DONE = _set("already completed done failed error errors saved stored loaded was")
"""Words of what is or was the case: beside them a verb orders nothing."""

_START = _set("start begin first from offset skip since")
_END = _set("end stop upto until")
_COUNT = _set("num count n len length lengths counts lens")
_SPAN = _set("span range interval positions slice")
_UNITS = {
    **dict.fromkeys(("block", "blocks", "page", "pages"), "block"),
    **dict.fromkeys(("slot", "slots"), "slot"),
    **dict.fromkeys(("token", "tokens"), "token"),
    **dict.fromkeys(("chunk", "chunks"), "chunk"),
}
_OF_A_UNIT = _set("size sizes hash hashes")
"""Words beside which a unit is not what is listed or counted."""
_ORDER = ("slot", "block", "token", "chunk")
_FACT = _set("prompt computed cached existing hit hits matched total scheduled") | {*_ORDERED}
"""Words of what tells of the request, not of what is to be done."""
_FOREIGN = _set("cpu host remote disk file peer decode donor heartbeat dp port")
"""Memory or engines that are not this engine's KV cache."""
_OTHER = _set(
    "clock config deadline engine epoch event events group groups hash hashes job jobs layer layers op order "
    "port priority priorities rank ranks seq size sizes state stats status step task tasks time version"
)
"""Words of numbers that are neither blocks nor positions, unless a unit stands beside them."""
_STATE = _set("state status")
"""Words beside which a verb orders nothing."""
_LABEL = _set("id ids index")
"""Words of a single number that says which, and not how much."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_OPERATIONS = _set("op operation action direction kind type mode way cmd command verb")


def words(name: str) -> tuple[str, ...]:
    """``numTokens_toSave`` -> num, tokens, to, save."""
    return tuple(word.lower() for word in _WORD.findall(name))


@dataclass(frozen=True)
class Meaning:
    """What a name says.

    Attributes:
        direction: Flag.STORE, Flag.LOAD, or 0 where it says neither, or both.
        negated: it says what shall not be done.
        done: it says what is or was the case.
        role: ``start``, ``end``, ``count``, ``span`` of positions, "" for none.
        unit: ``block``, ``slot``, ``token``, ``chunk``, or "".
        fact: it tells of the request, not of what is to be done.
        foreign: memory that is not this engine's KV cache.
        other: its numbers are neither blocks nor positions. label: a single number of it says which one.
    """

    direction: int = 0
    negated: bool = False
    done: bool = False
    role: str = ""
    unit: str = ""
    fact: bool = False
    foreign: bool = False
    other: bool = False
    label: bool = False


@lru_cache(maxsize=4096)
def read(name: str) -> Meaning:
    """What a name says, remembered."""
    found = frozenset(words(name))
    unit = (
        ""
        if found & _OF_A_UNIT
        else min((_UNITS[w] for w in found if w in _UNITS), key=_ORDER.index, default="")
    )
    roles = [
        role
        for role, known in (("span", _SPAN), ("start", _START), ("end", _END), ("count", _COUNT))
        if found & known
    ]
    role = "span" if {"start", "end"} <= {*roles} else roles[0] if roles else ""
    return Meaning(
        direction=_direction(found),
        negated=bool(found & _NEGATION),
        done=bool(found & _DONE),
        role=role,
        unit=unit,
        fact=bool(found & _FACT),
        foreign=bool(found & _FOREIGN) and "gpu" not in found,
        other=bool(found & _OTHER) and not unit and role in ("", "count"),
        label=bool(found & _LABEL) and not role,
    )


def _direction(found: frozenset[str]) -> int:
    if found & _STATE:
        return 0
    said = (Flag.STORE if found & _STORE else 0) | (Flag.LOAD if found & _LOAD else 0)
    if "to" in found:
        for word in found & _ORDERED.keys():
            said |= _ORDERED[word]
    return said if said in (Flag.STORE, Flag.LOAD) else 0


def operation(name: str, value: str) -> int:
    """The direction that a text says: ``action="put"``, and ``("a", "put", [4])`` where nothing names it."""
    if _OPERATIONS & {*words(name)} or {*words(value)} <= _STORE | _LOAD:
        return read(value).direction
    return 0
