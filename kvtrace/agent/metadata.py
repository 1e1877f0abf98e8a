"""What a connector's metadata declares: a reader by structure, for any connector.

``build_connector_meta`` returns an object that only its connector understands. Most have a
common shape: containers of entries, an entry with a request id, a store or load flag, and
slot mapping, block ids, positions or token ids. This module reads that shape, by names
(``metadata_words.py``) and by values (a text that is a request's id, numbers that are its
blocks), and says so where it can't (``readable`` false): neither an unknown shape nor an entry
whose size is not understood must ever look like "nothing to store".

Sources: ``distributed/kv_transfer/kv_connector/v1/*`` of vLLM from 0.8.5 on and LMCache's
``vllm_v1_adapter.py`` (``ReqMeta``: ``save_spec``, ``load_spec``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvtrace.agent import metadata_words as words
from kvtrace.trace.format import UNKNOWN, Flag

_MAX_ENTRIES = 4096
# In these, an entry whose store flag is false is a load (exclusive by design).
_STORE_OR_LOAD = {"ExampleConnectorMetadata", "SharedStorageConnectorMetadata"}
_SCALARS = (str, bytes, int, float, bool, type(None))
_CONTAINERS = (list, tuple, set, frozenset, dict)
_MAX_CLASSES = 64
_MAX_DEPTH = 3
_MAX_NUMBERS = 1 << 16


@dataclass
class Entry:
    """One request's part in a step's metadata. Counts are -1 where the entry doesn't say."""

    req_id: str | None = None
    direction: int = 0
    slots: int = UNKNOWN
    tokens: int = UNKNOWN
    start: int = UNKNOWN
    end: int = UNKNOWN
    first_slot: int = UNKNOWN
    block_ids: list[int] | None = None
    numbers: list[list[int]] = field(default_factory=list)
    """Lists of numbers under names that say nothing: the request's blocks, perhaps."""
    unsure: bool = False
    """It holds a number that is not understood: how much of its blocks is meant can't be said."""


@dataclass
class Totals:
    """A step's metadata in numbers."""

    readable: bool = True
    store_slots: int = 0
    store_entries: int = 0
    load_slots: int = 0
    load_entries: int = 0
    undirected: int = 0
    """Entries that say neither store nor load."""


@dataclass
class Declared(Totals):
    entries: list[Entry] = field(default_factory=list)

    def totals(self) -> tuple[bool | int, ...]:
        """The fields of :class:`Totals`, in order."""
        return (
            self.readable,
            self.store_slots,
            self.store_entries,
            self.load_slots,
            self.load_entries,
            self.undirected,
        )


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
    """Block ids of the first KV cache group: of a list, a tuple, an array, or one of these a group."""
    return _integers(block_ids[0] if _is_groups(block_ids) else block_ids) or []


def _integers(value: Any) -> list[int] | None:
    """The numbers of a list, tuple, set, range or array of integers on the host; None elsewhere."""
    if _is_array(value):
        host = getattr(getattr(value, "device", None), "type", "cpu") in ("cpu", None)
        whole = not getattr(getattr(value, "dtype", None), "is_floating_point", False)
        if not host or not whole or len(getattr(value, "shape", ())) != 1 or len(value) > _MAX_NUMBERS:
            return None
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)) or len(value) > _MAX_NUMBERS:
        return None
    if isinstance(value, range) or all(type(number) is int for number in value):
        return list(value)
    try:  # numpy's integers, one by one
        return [number.__index__() for number in value if not isinstance(number, bool)]
    except (AttributeError, TypeError):
        return None


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and callable(getattr(value, "tolist", None))


def totals(meta: Any) -> Declared:
    """What can be said without knowing the requests of the step (worker side)."""
    declared = _read(meta, None, 0)
    _sum(declared, None)
    return declared


def is_empty(meta: Any) -> bool:
    """Whether a step's metadata holds containers, all empty, and nothing but scalars beside them.

    What :func:`read` would find out as well, by a longer way: most steps are decode steps.
    """
    cls = meta.__class__
    plain = _plain.get(cls)
    if plain is None:
        if len(_plain) > _MAX_CLASSES:
            _plain.clear()
        slots = any(base.__dict__.get("__slots__") for base in cls.__mro__)
        plain = _plain[cls] = hasattr(meta, "__dict__") and not slots and not isinstance(meta, (dict, tuple))
    if not plain:
        return False
    found = False
    for value in meta.__dict__.values():
        kind = value.__class__
        if kind in _CONTAINERS:
            if value:
                return False
            found = True
        elif kind not in _SCALARS:
            return False
    return found


_plain: dict[type, bool] = {}
"""Classes of metadata: whether all that an instance holds stands in its ``__dict__``."""


def read(meta: Any, blocks: Blocks) -> Declared:
    """Entries with request and position where the metadata and the block tables give them."""
    declared = _read(meta, blocks, 0)
    _match(declared.entries, blocks)
    _sum(declared, blocks)
    return declared


def _read(meta: Any, blocks: Blocks | None, depth: int) -> Declared:
    declared = Declared()
    if meta is None:
        return declared
    known = blocks.known if blocks is not None else ()
    exclusive = type(meta).__name__ in _STORE_OR_LOAD
    seen_container = False
    for name, value in _fields(meta) or ([("", meta)] if _is_container(meta) else []):
        if name in known and not isinstance(value, _SCALARS):
            # a dictionary of requests
            seen_container = True
            _take(declared, _entry(name, value, 0, known, exclusive), value)
            continue
        hint = words.direction(name)
        if not _is_container(value):
            if _looks_like_metadata(value) or (depth < _MAX_DEPTH and _holds_container(value, depth + 1)):
                _merge(declared, _read(value, blocks, depth + 1), hint)
                seen_container = True
            continue
        seen_container = True
        for key, item in _items(value):
            if _looks_like_metadata(item):
                _merge(declared, _read(item, blocks, depth + 1), hint)
            else:
                _take(declared, _entry(key, item, hint, known, exclusive), item)
            if len(declared.entries) >= _MAX_ENTRIES:
                declared.readable = False
                break
    if not seen_container:
        # Nothing in it that could name a request: the worker decides by itself what to store.
        declared.readable = False
    return declared


def _take(declared: Declared, entry: Entry | None, item: Any) -> None:
    if entry is not None:
        declared.entries.append(entry)
    elif not isinstance(item, (int, float, bool, type(None))):
        declared.readable = False


def _merge(into: Declared, other: Declared, hint: int) -> None:
    for entry in other.entries:
        entry.direction = entry.direction or hint
    into.entries.extend(other.entries)
    into.readable = into.readable and other.readable


def _sum(declared: Declared, blocks: Blocks | None) -> None:
    """Sizes and totals, once it is known whose entry each one is."""
    size = blocks.block_size if blocks is not None else 0
    for entry in declared.entries:
        _settle_size(entry, size)
        if entry.direction & Flag.STORE:
            declared.store_entries += 1
            declared.store_slots += max(0, entry.slots, entry.tokens if entry.slots < 0 else 0)
            # How much of the request it means is not understood: what the step stores is not known.
            if blocks is not None and entry.slots < 0 and entry.tokens < 0:
                declared.readable = False
        if entry.direction & Flag.LOAD:
            declared.load_entries += 1
            declared.load_slots += max(0, entry.slots)
        declared.undirected += not entry.direction


def _settle_size(entry: Entry, size: int) -> None:
    if entry.slots >= 0:
        return
    if entry.end >= 0:
        entry.tokens = max(0, entry.end - max(0, entry.start))
    if entry.unsure:
        entry.tokens = UNKNOWN
        return
    if entry.block_ids is not None and size:
        whole = len(entry.block_ids) * size
        entry.slots = min(whole, entry.tokens) if entry.tokens >= 0 else whole


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
    return isinstance(value, _CONTAINERS) and not hasattr(value, "_fields")


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    else:
        for item in value:
            yield None, item


def _looks_like_metadata(value: Any) -> bool:
    return any(cls.__name__ == "KVConnectorMetadata" for cls in type(value).__mro__)


def _holds_container(value: Any, depth: int) -> bool:
    """Whether an object of the connector's own (no array, no scalar) has containers in it."""
    if isinstance(value, (*_SCALARS, type, Enum)) or _is_array(value) or callable(value):
        return False
    inner = [item for _, item in _fields(value)]
    return any(_is_container(item) for item in inner) or (
        depth < _MAX_DEPTH and any(_holds_container(item, depth + 1) for item in inner)
    )


def _entry(key: Any, item: Any, hint: int, known: Any, exclusive: bool) -> Entry | None:
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
        entry.direction = hint or (0 if unnamed else words.direction(type(item).__name__))
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
            word = words.direction(lowered)
            if word and not words.negated(lowered):
                said = True
                if value:
                    entry.direction |= word
                elif exclusive and word == Flag.STORE:
                    entry.direction |= Flag.LOAD
        elif isinstance(value, str):
            if (lowered in words.ID_FIELDS or value in known) and entry.req_id is None:
                entry.req_id = value
            elif lowered in _OPERATION or value.lower() in _OPERATIONS:
                entry.direction |= words.direction(value)
                said = said or bool(entry.direction)
        elif lowered in words.SLOT_FIELDS:
            entry.slots = _length(value)
            entry.first_slot = _first(value)
        elif lowered in words.BLOCK_FIELDS:
            entry.block_ids = _first_group(value)
        elif lowered in words.TOKEN_FIELDS:
            entry.tokens = value if isinstance(value, int) else _length(value)
        elif lowered.endswith("_spec") or lowered in ("save", "store", "load"):
            said = True
            _read_spec(entry, lowered, value)
        elif isinstance(value, Enum):
            word = words.direction(str(getattr(value, "name", "")))
            if word:
                entry.direction |= word
                said = True
        else:
            _read_number(entry, lowered, value)
    return said


_OPERATION = {"direction", "op", "kind", "action", "type"}
_OPERATIONS = {"store", "save", "put", "write", "send", "offload", "load", "recv", "fetch", "read", "restore"}


def _read_number(entry: Entry, name: str, value: Any) -> None:
    """Positions, and numbers whose name says nothing known."""
    if isinstance(value, int):
        if words.counts_nothing(name):
            return
        if words.is_range(name) or not (words.is_start(name) or words.is_end(name)):
            entry.unsure = True
        elif words.is_start(name):
            entry.start = value
        else:
            entry.end = value
        return
    if isinstance(value, slice):
        pair: list[int] | None = [value.start or 0, value.stop] if isinstance(value.stop, int) else None
    else:
        numbers = _integers(value[0] if _is_groups(value) else value)
        pair = numbers if words.is_range(name) and numbers and len(numbers) == 2 else None
        if pair is None and numbers and words.may_be_blocks(name):
            entry.numbers.append(numbers)
    if pair is not None:
        entry.start, entry.end = pair


def _is_groups(value: Any) -> bool:
    """One list of blocks for each KV cache group."""
    return isinstance(value, (list, tuple)) and bool(value) and _integers(value[0]) is not None


def _read_spec(entry: Entry, name: str, value: Any) -> None:
    """LMCache's style: ``save_spec`` / ``load_spec`` objects that are None when not wanted."""
    word = words.direction(name)
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
        if entry.req_id is None or not size:
            continue
        own = blocks.of(entry.req_id)
        if entry.block_ids is None:
            entry.block_ids = next((run for run in entry.numbers if _is_run(run, own)), None)
        if entry.start >= 0:
            continue
        if entry.first_slot >= 0 and entry.first_slot // size in own:
            entry.start = own.index(entry.first_slot // size) * size + entry.first_slot % size
        elif entry.block_ids and entry.block_ids[0] in own:
            entry.start = own.index(entry.block_ids[0]) * size


def _is_run(numbers: list[int], own: list[int]) -> bool:
    """Whether the numbers are some of a request's blocks, one after the other."""
    at = own.index(numbers[0]) if numbers and numbers[0] in own else -1
    return at >= 0 and own[at : at + len(numbers)] == numbers


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
