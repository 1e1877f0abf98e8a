"""What a connector's metadata declares: a reader by structure, for any connector.

``build_connector_meta`` returns an object that only its connector understands. Most have a
common shape: containers of entries, an entry with a request id, a store or load flag, and
slot mapping, block ids or token ids. This module reads that shape and says so where it
can't (``readable`` false): an unknown shape must never look like "nothing to store".

Sources: ``distributed/kv_transfer/kv_connector/v1/*`` of vLLM 0.8.5 .. 0.33.0 and LMCache's
``vllm_v1_adapter.py`` (``ReqMeta``: ``save_spec``, ``load_spec``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvtrace.trace.format import UNKNOWN, Flag

_ID_FIELDS = ("req_id", "request_id", "rid", "id")
_SLOT_FIELDS = ("slot_mapping", "slots", "slot_ids", "slot_indices")
_BLOCK_FIELDS = ("block_ids", "blocks", "block_table", "gpu_block_ids", "local_block_ids")
_TOKEN_FIELDS = ("num_tokens", "token_ids", "tokens", "num_token", "token_count", "prompt_token_ids")
_STORE_WORDS = ("store", "save", "put", "write", "send", "offload")
_LOAD_WORDS = ("load", "recv", "receive", "fetch", "read", "restore", "retrieve", "onload")
_MAX_ENTRIES = 4096
# In these, an entry whose store flag is false is a load (exclusive by design).
_STORE_OR_LOAD = {"ExampleConnectorMetadata", "SharedStorageConnectorMetadata"}
_SCALARS = (str, bytes, int, float, bool, type(None))


@dataclass
class Entry:
    """One request's part in a step's metadata. Counts are -1 where the entry doesn't say."""

    req_id: str | None = None
    direction: int = 0
    slots: int = UNKNOWN
    tokens: int = UNKNOWN
    start: int = UNKNOWN
    first_slot: int = UNKNOWN
    block_ids: list[int] | None = None


@dataclass
class Declared:
    readable: bool = True
    entries: list[Entry] = field(default_factory=list)
    store_slots: int = 0
    store_entries: int = 0
    load_slots: int = 0
    load_entries: int = 0


class Blocks:
    """Where the requests of a step keep their KV: matches entries to requests by block.

    Args:
        scheduler: vLLM's Scheduler, or None.
        output: the SchedulerOutput that the metadata was built from, or None.
    """

    def __init__(self, scheduler: Any, output: Any) -> None:
        self._scheduler = scheduler
        self.new_reqs: list[str] = []
        self._block_ids: dict[str, list[int]] = {}
        for new in getattr(output, "scheduled_new_reqs", None) or ():
            self.new_reqs.append(new.req_id)
            self._block_ids[new.req_id] = _first_group(new.block_ids)
        requests = getattr(scheduler, "requests", None)
        self.known: Any = requests if isinstance(requests, dict) else self._block_ids
        size = getattr(scheduler, "block_size", None)
        self.block_size = size if isinstance(size, int) and size > 0 else 0

    def of(self, req_id: str) -> list[int]:
        """Block ids of the first KV cache group, in order of position."""
        ids = self._block_ids.get(req_id)
        if ids is None:
            manager = getattr(self._scheduler, "kv_cache_manager", None)
            try:
                ids = _first_group(manager.get_block_ids(req_id)) if manager is not None else []
            except Exception:
                ids = []
            self._block_ids[req_id] = ids
        return ids

    def owner(self, block: int) -> str | None:
        """The one request of this step that holds a block; None where several share it."""
        owners = [req for req, ids in self._block_ids.items() if block in ids]
        return owners[0] if len(owners) == 1 else None


def _first_group(block_ids: Any) -> list[int]:
    if isinstance(block_ids, (list, tuple)) and block_ids and isinstance(block_ids[0], (list, tuple)):
        block_ids = block_ids[0]
    return [int(block) for block in block_ids] if isinstance(block_ids, (list, tuple)) else []


def totals(meta: Any) -> Declared:
    """Counts of store and load entries and slots; no matching to requests (worker side)."""
    return _read(meta, None)


def read(meta: Any, blocks: Blocks) -> Declared:
    """Entries with request and position where the metadata and the block tables give them."""
    declared = _read(meta, blocks)
    _match(declared.entries, blocks)
    return declared


def _read(meta: Any, blocks: Blocks | None) -> Declared:
    declared = Declared()
    if meta is None:
        return declared
    known = blocks.known if blocks is not None else ()
    size = blocks.block_size if blocks is not None else 0
    exclusive = type(meta).__name__ in _STORE_OR_LOAD
    seen_container = False
    for name, value in _fields(meta):
        if not _is_container(value):
            nested = not isinstance(value, _SCALARS) and _looks_like_metadata(value)
            if nested:
                _merge(declared, _read(value, blocks))
                seen_container = True
            continue
        seen_container = True
        hint = _direction_of_name(name)
        for key, item in _items(value):
            if _looks_like_metadata(item):
                _merge(declared, _read(item, blocks))
                continue
            entry = _entry(key, item, hint, known, size, exclusive)
            if entry is None:
                if not isinstance(item, (int, float, bool, type(None))):
                    declared.readable = False
                continue
            declared.entries.append(entry)
            if len(declared.entries) >= _MAX_ENTRIES:
                declared.readable = False
                break
    if not seen_container:
        # Nothing in it that could name a request: the worker decides by itself what to store.
        declared.readable = False
    for entry in declared.entries:
        if entry.direction & Flag.STORE:
            declared.store_entries += 1
            declared.store_slots += max(0, entry.slots)
        if entry.direction & Flag.LOAD:
            declared.load_entries += 1
            declared.load_slots += max(0, entry.slots)
    return declared


def _merge(into: Declared, other: Declared) -> None:
    into.entries.extend(other.entries)
    into.readable = into.readable and other.readable


def _fields(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    names = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and names:
        return [(name, getattr(value, name)) for name in names]
    found = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found.append((name, getattr(value, name)))
    return found


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset, dict)) and not hasattr(value, "_fields")


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    else:
        for item in value:
            yield None, item


def _looks_like_metadata(value: Any) -> bool:
    return any(cls.__name__ == "KVConnectorMetadata" for cls in type(value).__mro__)


def _direction_of_name(name: str) -> int:
    lowered = name.lower()
    if any(word in lowered for word in _LOAD_WORDS):
        return Flag.LOAD
    if any(word in lowered for word in _STORE_WORDS):
        return Flag.STORE
    return 0


def _entry(key: Any, item: Any, hint: int, known: Any, block_size: int, exclusive: bool) -> Entry | None:
    if isinstance(item, str):
        # A bare request id in a container whose name says what for.
        return Entry(req_id=item, direction=hint) if hint and item in known else None
    if isinstance(item, _SCALARS):
        if isinstance(key, str) and key in known and hint:
            count = item if isinstance(item, int) and not isinstance(item, bool) else UNKNOWN
            return Entry(req_id=key, direction=hint, tokens=count, slots=count)
        return None
    entry = Entry(direction=0, req_id=key if isinstance(key, str) and key in known else None)
    unnamed = isinstance(item, (list, tuple)) and not hasattr(item, "_fields")
    fields = _unnamed(item, known, entry.req_id is not None) if unnamed else _fields(item)
    if not fields:
        return None
    said = _read_fields(entry, fields, known, exclusive)
    if not entry.direction and not said:
        entry.direction = hint
    if entry.slots == UNKNOWN and entry.block_ids is not None and block_size:
        whole = len(entry.block_ids) * block_size
        entry.slots = min(whole, entry.tokens) if entry.tokens >= 0 else whole
    if not entry.direction and not said:
        return None
    return entry


def _unnamed(item: Any, known: Any, keyed: bool) -> list[tuple[str, Any]]:
    """Fields of a plain tuple: a known request id, and a list of integers as its blocks.

    ``keyed``: the id was the key under which the tuple stood.
    """
    if keyed and item and all(type(number) is int for number in item):
        return [("block_ids", item)]
    fields: list[tuple[str, Any]] = []
    for value in item:
        if isinstance(value, str) and value in known:
            fields.append(("req_id", value))
        elif isinstance(value, (list, tuple)) and all(type(number) is int for number in value):
            fields.append(("block_ids", value))
    return fields if keyed or any(name == "req_id" for name, _ in fields) else []


def _read_fields(entry: Entry, fields: list[tuple[str, Any]], known: Any, exclusive: bool) -> bool:
    """Fill ``entry``; true where the entry itself says what is (not) to be done."""
    said = False
    for name, value in fields:
        lowered = name.lower().lstrip("_")
        if isinstance(value, bool):
            word = _direction_of_name(lowered)
            if word and not lowered.startswith(("skip", "no_", "disable")):
                said = True
                if value:
                    entry.direction |= word
                elif exclusive and word == Flag.STORE:
                    entry.direction |= Flag.LOAD
        elif isinstance(value, str):
            if (lowered in _ID_FIELDS or value in known) and entry.req_id is None:
                entry.req_id = value
            elif lowered in ("direction", "op", "kind", "action", "type"):
                entry.direction |= _direction_of_name(value)
                said = said or bool(entry.direction)
        elif lowered in _SLOT_FIELDS:
            entry.slots = _length(value)
            entry.first_slot = _first(value)
        elif lowered in _BLOCK_FIELDS:
            entry.block_ids = _first_group(value)
        elif lowered in _TOKEN_FIELDS:
            entry.tokens = value if isinstance(value, int) else _length(value)
        elif lowered.endswith("_spec") or lowered in ("save", "store", "load"):
            said = True
            _read_spec(entry, lowered, value)
        elif isinstance(value, Enum):
            word = _direction_of_name(str(getattr(value, "name", "")))
            if word:
                entry.direction |= word
                said = True
    return said


def _read_spec(entry: Entry, name: str, value: Any) -> None:
    """LMCache's style: ``save_spec`` / ``load_spec`` objects that are None when not wanted."""
    word = _direction_of_name(name)
    if value is None or not word:
        return
    inner = dict(_fields(value)) if not isinstance(value, _SCALARS) else {}
    allowed = inner.get("can_save" if word == Flag.STORE else "can_load", True)
    if not allowed:
        return
    entry.direction |= word
    skip = inner.get("skip_leading_tokens")
    if word == Flag.STORE and isinstance(skip, int) and skip >= 0:
        entry.start = skip


def _length(value: Any) -> int:
    numel = getattr(value, "numel", None)
    if callable(numel):
        return int(numel())
    size = getattr(value, "size", None)
    if isinstance(size, int):
        return size
    try:
        return len(value)
    except TypeError:
        return UNKNOWN


def _first(value: Any) -> int:
    """First slot of a slot mapping on the host; never reads device memory."""
    try:
        if getattr(getattr(value, "device", None), "type", "cpu") != "cpu" or not len(value):
            return UNKNOWN
        return int(value[0])
    except Exception:
        return UNKNOWN


def _match(entries: list[Entry], blocks: Blocks) -> None:
    """Give entries their request and start: by id, by block, then by order."""
    size = blocks.block_size
    for entry in entries:
        if entry.req_id is None and entry.first_slot >= 0 and size:
            entry.req_id = blocks.owner(entry.first_slot // size)
        elif entry.req_id is None and entry.block_ids:
            entry.req_id = blocks.owner(entry.block_ids[0])
    _match_by_order(entries, blocks.new_reqs)
    for entry in entries:
        if entry.req_id is None or entry.start >= 0 or not size:
            continue
        own = blocks.of(entry.req_id)
        if entry.first_slot >= 0 and entry.first_slot // size in own:
            entry.start = own.index(entry.first_slot // size) * size + entry.first_slot % size
        elif entry.block_ids and entry.block_ids[0] in own:
            entry.start = own.index(entry.block_ids[0]) * size


def _match_by_order(entries: list[Entry], new_reqs: list[str]) -> None:
    """Entries without id or slots follow the order of the new requests (as vLLM's own
    connectors build them). Only where the gap between two known neighbours leaves exactly
    as many requests as entries is there no doubt."""
    if not any(entry.req_id is None for entry in entries):
        return
    position = {req: at for at, req in enumerate(new_reqs)}
    run: list[Entry] = []
    last = -1
    for entry in [*entries, Entry(req_id="")]:
        if entry.req_id is None:
            run.append(entry)
            continue
        at = len(new_reqs) if entry.req_id == "" else position.get(entry.req_id, -1)
        if at < 0:
            continue
        gap = new_reqs[last + 1 : at]
        if run and len(gap) == len(run):
            for lost, req in zip(run, gap, strict=True):
                lost.req_id = req
        run, last = [], at
