"""What a name in a connector's metadata says: store or load, whose memory, a position or a count.

Names never say what a list of numbers is: that follows from its values (:mod:`.identify`). They say
the direction, tell two readings of the same numbers apart, and rule out what can't be KV of this engine. By
words, not by letters: ``already`` is no read, ``num_saved_tokens`` no order to save.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from kvtrace.trace.format import Flag

ID_FIELDS = {"req_id", "request_id", "rid", "req", "request", "id"}

_STORE = (
    "store storing save saving put putting write writing send sending offload offloading dump dumping "
    "persist persisting push pushing upload uploading"
)
_LOAD = (
    "load loading recv receive receiving fetch fetching read reading restore restoring retrieve retrieving "
    "retrieval onload onloading reload reloading prefetch prefetching get getting pull pulling download "
    "downloading"
)


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _verbs(text: str) -> frozenset[str]:
    """The verbs and their third person: no past tense (what was done is no order), no doer of it."""
    verbs = _set(text)
    return verbs | {verb + "s" for verb in verbs} | {verb + "es" for verb in verbs}


_STORE_WORDS = _verbs(_STORE)
_LOAD_WORDS = _verbs(_LOAD)
_STORED = _set("stored saved written sent offloaded dumped persisted pushed uploaded")
_LOADED = _set("loaded received fetched restored retrieved onloaded reloaded prefetched pulled downloaded")
_NEGATION = _set("skip skips no not disable disabled never without dont")
_OVER = _set("failed done completed already error errors")
_STATE = _OVER | _set(
    "state status phase fail finished finish complete pending ok ready was were has had last"
)
"""Words of what is or was the case: beside them a verb orders nothing."""

_START = _set("start begin from frm offset skip first starts leading lo low lower since")
_END = _set("end stop upto until till ends hi high upper")
_COUNT = _set("num count n amount len length counts lens lengths")
_EACH = _set("starts ends offsets lengths lens counts nums begins stops")
_RANGE = _set("span range rng interval extent position positions slice")
_TIME = _set("time ts timestamp deadline expiry expire clock ms ns sec ttl")
_HIT = _set("cached hit hits matched")
_FACT = (
    _HIT
    | _STORED
    | _LOADED
    | _set("prompt computed prefill scheduled completed existing context total transferred")
)
"""Words of numbers and token lists that tell of the request, not of what is to be done."""

_BLOCK = _set("block blocks page pages blk blks")
_SLOT = _set("slot slots")
_TOKEN = _set("token tokens tok toks")
_CHUNK = _set("chunk chunks unit units")
_ONE = _set("block page blk slot")

_FOREIGN = _set(
    "cpu host remote disk ssd nvme file files peer donor receiver sender decode decoder heartbeat l1 l2 "
    "l3 dram cxl bucket s3"
)
"""Memory or engines that are not this engine's KV cache."""
_HERE = _set("gpu device hbm vram local here")
_SOURCE = _set("src source")
_TARGET = _set("dst dest destination")

_NO_SIZE = _set(
    "async attempt attempts batch bytes clock config counter cycle dcp deadline dim dp dtype engine epoch "
    "event events expiry format generation group groups hash hashes heads id ids idx index iteration job "
    "jobs layer layers level mode node now number pid pod port ports pp pcp proto protocol priorities "
    "priority rank "
    "ranks refs remote retries retry rev revision round salt seed seq serial size status step steps task "
    "tasks tick tier time timeout timestamp tp transfer transfers ts ttl uid version worker workers world "
    "op kind action type verb operation command cmd direction opcode opcodes code codes"
)
"""Words of numbers that count no tokens and no blocks."""
_NO_KV = _set(
    "hash hashes layer layers rank ranks job jobs event events step steps worker workers group groups "
    "size sizes count counts num number len lens length lengths index indices idx task tasks seq seqs "
    "order port ports head heads shape time times timestamp timestamps version versions priority "
    "priorities offset offsets id hosts expert experts dim dims stride strides op ops mode kind direction "
    "opcode opcodes code codes"
)
"""Words of lists whose numbers are neither blocks nor slots nor token ids, unless one of these is named."""
_VAGUE = _set("id ids idx index indices order offset offsets all flat list kv cache gpu mem local")
"""Words of numbers of anything: a name of these alone rules nothing out."""
_TABLE = _set("tables running active current")
"""Words of what a worker may want to know, beside what it is to do."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def words(name: str) -> tuple[str, ...]:
    """``numTokens_toSave`` -> num, tokens, to, save."""
    return tuple(word.lower() for word in _WORD.findall(name))


@dataclass(frozen=True)
class Name:
    """What a name says.

    Attributes:
        direction: Flag.STORE, Flag.LOAD, or 0 where it says neither, or both.
        negated: it says what shall not be done.
        start, end, count: it is a position where something begins or ends, or how much there is.
        skip: a beginning that is found as what is left out.
        span: a pair of positions.
        unit: ``block``, ``slot``, ``token``, ``chunk``, or "" for none of them.
        hit: tells of what is in a cache already.
        fact: tells of the request, not of what is to be done.
        foreign: memory that is not this engine's KV cache. source, target: where from, where to.
        no_size: a number of this name is surely no size and no position.
        vague: it says nothing of what its numbers are.
        no_kv: a list of this name holds neither blocks nor slots nor token ids.
        state: of a flag or a word: what is or was the case, not what is to be done.
        over: of a container: its orders are carried out.
        table: what a worker may want to know.
        one: a number of this name is the id of a block or a slot.
        each: a list of this name says where something begins or ends, or how much it is.
    """

    direction: int = 0
    negated: bool = False
    start: bool = False
    end: bool = False
    count: bool = False
    skip: bool = False
    span: bool = False
    unit: str = ""
    hit: bool = False
    fact: bool = False
    foreign: bool = False
    here: bool = False
    source: bool = False
    target: bool = False
    no_size: bool = False
    no_kv: bool = False
    vague: bool = False
    state: bool = False
    over: bool = False
    table: bool = False
    one: bool = False
    each: bool = False


@lru_cache(maxsize=4096)
def read(name: str) -> Name:
    """What a name says, remembered."""
    found = frozenset(words(name))
    if not found:
        return Name()
    unit = _unit(found)
    is_time = bool(_TIME & found)
    start, end = bool(_START & found) and not is_time, bool(_END & found) and not is_time
    places = unit in ("block", "slot", "token")
    here = bool(_HERE & found)
    amount = start or end or bool(_COUNT & found)
    index = bool({"idx", "index"} & found)
    return Name(
        direction=_direction(found),
        negated=bool(_NEGATION & found),
        start=start and not end,
        end=end and not start,
        count=bool(_COUNT & found) and not start and not end,
        skip=bool({"skip", "leading"} & found),
        span=bool(_RANGE & found) or (start and end),
        unit=unit,
        hit=bool(_HIT & found),
        fact=bool(_FACT & found),
        foreign=bool(_FOREIGN & found) and not here,
        here=here,
        source=bool(_SOURCE & found),
        target=bool(_TARGET & found),
        no_size=is_time or (bool(_NO_SIZE & found) and not (start or end or places)),
        no_kv=(bool(_NO_KV & found) and not places) or bool({"hash", "hashes", "num", "count"} & found),
        vague=found <= _VAGUE,
        state=bool(_STATE & found),
        over=bool(_OVER & found),
        table=bool(_TABLE & found),
        one=bool(_ONE & found) and not (amount or index or {"size", "sizes"} & found),
        each=(amount and bool(unit or _EACH & found))
        or bool(_EACH & found)
        or found <= _COUNT | _START | _END,
    )


def _unit(found: frozenset[str]) -> str:
    if "size" in found or "sizes" in found:
        return ""
    for unit, known in (("slot", _SLOT), ("block", _BLOCK), ("token", _TOKEN), ("chunk", _CHUNK)):
        if known & found:
            return unit
    return ""


def _direction(found: frozenset[str]) -> int:
    stores, loads = bool(_STORE_WORDS & found), bool(_LOAD_WORDS & found)
    if {"be", "to"} & found:  # blocks_to_be_saved
        stores, loads = stores or bool(_STORED & found), loads or bool(_LOADED & found)
    if stores == loads:
        return 0
    return Flag.STORE if stores else Flag.LOAD


def direction(name: str) -> int:
    """Flag.STORE, Flag.LOAD, or 0 where the name says neither."""
    return read(name).direction


_OPERATION = {
    "direction",
    "op",
    "kind",
    "action",
    "type",
    "verb",
    "operation",
    "command",
    "cmd",
    "what",
    "mode",
}
_NO_OPERATION = {"src", "source", "origin", "dst", "dest", "target", "backend", "tier", "medium", "where"}


def operation(name: str, value: str) -> int:
    """The direction that a text says: ``action="put"``, and ``("a", "put", [4])`` where nothing names it."""
    lowered = name.lower().lstrip("_")
    if lowered in _OPERATION or (
        set(words(value)) <= _STORE_WORDS | _LOAD_WORDS and lowered not in _NO_OPERATION
    ):
        return read(value).direction
    return 0
