"""Reading a foreign object without touching it: its fields as they lie there, its lists of integers.

No method of the object's own class is called and no property is read: fields come from ``__dict__``, from
the descriptors of ``__slots__`` and from named tuples' items, containers are walked with the methods of the
builtin types. Arrays of numpy and torch are read where they lie in host memory, never copied from a device.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum
from functools import lru_cache
from itertools import islice
from types import MemberDescriptorType
from typing import Any

MAX_ITEMS = 1 << 16
"""Items of one container that are looked at."""
_MAX_TYPES = 1024
_CHECKED_WHOLE = 256
_PROBES = 32


class FieldShape(IntEnum):
    NOTHING = 0
    FLAG = 1
    NUMBER = 2
    TEXT = 3
    BYTES = 4
    ENUM = 5
    ARRAY = 6
    SLICE = 7
    LIST = 8
    MAP = 9
    RECORD = 10
    """An object with fields, a named tuple."""
    OPAQUE = 11


SCALARS = frozenset(
    {
        FieldShape.NOTHING,
        FieldShape.FLAG,
        FieldShape.NUMBER,
        FieldShape.TEXT,
        FieldShape.BYTES,
        FieldShape.ENUM,
    }
)

_CLOSED = frozenset(sys.stdlib_module_names) - {"types", "collections", "__main__"} | {
    "torch",
    "numpy",
    "zmq",
}
_CLOSED_PATHS = (
    "vllm.config", "vllm.lora", "vllm.multimodal", "vllm.sampling_params", "vllm.v1.engine",
    "vllm.v1.request",
)  # fmt: skip


def kind_of(value: Any) -> FieldShape:
    """What a value is, by its type alone."""
    cls: type = type(value)
    return _kind(cls)


@lru_cache(_MAX_TYPES)
def _kind(cls: type) -> FieldShape:
    for kind, bases in _BASES:
        if issubclass(cls, bases):
            return kind
    if issubclass(cls, tuple):
        named = any(isinstance(base.__dict__.get("_fields"), tuple) for base in cls.__mro__)
        return FieldShape.RECORD if named else FieldShape.LIST
    for base in cls.__mro__:
        package = base.__module__.partition(".")[0]
        if package == "numpy" and base.__name__ in _NUMPY:
            return _NUMPY[base.__name__]
        if package == "torch" and base.__name__ == "Tensor":
            return FieldShape.ARRAY
    module = cls.__module__
    if module.partition(".")[0] in _CLOSED or module.startswith(_CLOSED_PATHS):
        return FieldShape.OPAQUE
    if issubclass(cls, type) or callable(getattr(cls, "__get__", None)):
        return FieldShape.NOTHING
    has_fields = cls.__dictoffset__ != 0 or any("__slots__" in base.__dict__ for base in cls.__mro__)
    return FieldShape.RECORD if has_fields and cls is not object else FieldShape.OPAQUE


_BASES: tuple[tuple[FieldShape, Any], ...] = (
    (FieldShape.ENUM, Enum),
    (FieldShape.NOTHING, (type(None), float, complex, type)),
    (FieldShape.FLAG, bool),
    (FieldShape.NUMBER, int),
    (FieldShape.TEXT, str),
    (FieldShape.BYTES, (bytes, bytearray, memoryview)),
    (FieldShape.SLICE, slice),
    (FieldShape.MAP, dict),
    (FieldShape.LIST, (list, set, frozenset, deque, range)),
)
_NUMPY = {
    "ndarray": FieldShape.ARRAY,
    "integer": FieldShape.NUMBER,
    "bool": FieldShape.FLAG,
    "bool_": FieldShape.FLAG,
    "generic": FieldShape.NOTHING,
}


# --- fields and items -----------------------------------------------------------------------


def fields(record: Any) -> list[tuple[str, Any]]:
    """The fields of a record, as they lie there; none of what has to be asked for."""
    if isinstance(record, tuple):
        names = next(base.__dict__["_fields"] for base in type(record).__mro__ if "_fields" in base.__dict__)
        return list(zip(names, tuple.__iter__(record), strict=False))
    found: list[tuple[str, Any]] = []
    cls: type = type(record)
    if cls.__dictoffset__:
        try:
            found.extend(object.__getattribute__(record, "__dict__").items())
        except (AttributeError, RuntimeError):
            pass
    for name, member in _members(cls):
        try:
            found.append((name, member.__get__(record, cls)))
        except AttributeError:
            continue  # never set
    return found


@lru_cache(_MAX_TYPES)
def _members(cls: type) -> tuple[tuple[str, MemberDescriptorType], ...]:
    return tuple(
        (name, member)
        for base in cls.__mro__
        for name, member in base.__dict__.items()
        if isinstance(member, MemberDescriptorType) and not name.startswith("__")
    )


def items(container: Any) -> list[Any]:
    """The items of a list, tuple, set or deque, by the builtin's own iterator."""
    for cls in (list, tuple, set, frozenset, deque, range):
        if isinstance(container, cls):
            walk: Iterator[Any] = cls.__iter__(container)  # type: ignore[arg-type]
            return list(islice(walk, MAX_ITEMS))
    return []


def pairs(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(islice(dict.items(mapping), MAX_ITEMS))


def is_child(value: Any) -> bool:
    """Whether it is a metadata of its own: a connector of connectors holds one for each."""
    return any(cls.__name__ == "KVConnectorMetadata" for cls in type(value).__mro__)


# --- lists of integers -----------------------------------------------------------------------


class Integers:
    """A list of integers of any kind, read only as far as it is asked for.

    ``ordered`` is false for a set. ``hidden``: its numbers lie on a device, only their count is known.
    """

    __slots__ = ("_raw", "hidden", "length", "ordered")

    def __init__(self, raw: Any, length: int, ordered: bool = True, hidden: bool = False) -> None:
        self._raw = raw
        self.length = length
        self.ordered = ordered
        self.hidden = hidden

    def at(self, index: int) -> int:
        return int(self._raw[index])

    def part(self, start: int, end: int, step: int) -> list[int]:
        """Every ``step``-th of them."""
        return _listed(self._raw[start:end:step])

    def whole(self) -> list[int]:
        """All of them; shared with the metadata where that is a list: not to be changed."""
        numbers = self._raw = _listed(self._raw)
        return numbers

    def is_run(self) -> bool:
        """Whether they are consecutive."""
        if not self.length or self.at(self.length - 1) - self.at(0) != self.length - 1:
            return False
        numbers = self.whole()
        return numbers == list(range(numbers[0], numbers[0] + self.length))


def _listed(raw: Any) -> list[int]:
    """A list as it is, else a list of the same numbers."""
    found: list[int] = raw
    if type(raw) is not list:
        found = raw.tolist() if hasattr(raw, "tolist") else list(raw)
    return found


def integers(value: Any, kind: FieldShape) -> Integers | None:
    """The integers of a list, tuple, set, range or one-dimensional array; None where it is none of them."""
    if kind is FieldShape.ARRAY:
        return _array(value)
    if kind is not FieldShape.LIST:
        return None
    if isinstance(value, range):
        return Integers(value, len(value)) if abs(value.step) >= 1 else None
    size = len(value)
    if not size or size > 1 << 24:
        return None
    if isinstance(value, (set, frozenset)):
        return Integers(sorted(value), size, ordered=False) if _all_int(value) else None
    if type(value) is list or type(value) is tuple:
        if size <= _CHECKED_WHOLE:
            if _all_int(value):
                return Integers(value, size)
        else:
            probes = (value[at] for at in range(0, size, max(1, size // _PROBES)))
            return Integers(value, size) if _all_int(probes) else None
    listed = items(value)
    if all(kind_of(one) is FieldShape.NUMBER for one in listed):
        return Integers([int(one) for one in listed], len(listed))
    return None


def _all_int(values: Iterable[Any]) -> bool:
    return set(map(type, values)) == {int}


_INTEGER_TYPES = ("int", "uint", "torch.int", "torch.uint")


def _array(value: Any) -> Integers | None:
    """A one-dimensional array of integers; of several dimensions none but with a single row or column."""
    if not str(value.dtype).startswith(_INTEGER_TYPES):
        return None
    size = math.prod(map(int, value.shape))
    if not value.shape or size != max(value.shape) or size > 1 << 24:
        return None
    if getattr(getattr(value, "device", None), "type", "cpu") not in ("cpu", None):
        return Integers(None, size, hidden=True)
    flat = value
    if hasattr(flat, "numpy"):  # a tensor: the same memory, cheaper to index
        try:
            flat = flat.detach().numpy()
        except (RuntimeError, TypeError):
            return Integers(None, size, hidden=True)
    return Integers(flat.reshape(-1) if len(flat.shape) != 1 else flat, size)


_NO_NUMBERS_OF_KV = ("float", "bfloat", "bool", "complex", "torch.float", "torch.bfloat", "torch.bool")


def may_name_kv(value: Any) -> bool:
    """Whether an array can hold numbers of blocks, slots or tokens."""
    return bool(math.prod(map(int, value.shape))) and not str(value.dtype).startswith(_NO_NUMBERS_OF_KV)


def describe(value: Any, depth: int = 0) -> str:
    """A value's shape in words, nothing of its content: ``list of tuple of int``."""
    kind, cls = kind_of(value), type(value)
    if kind is FieldShape.ARRAY:
        return f"{cls.__name__} of {value.dtype}, shape {tuple(int(n) for n in value.shape)}"
    first = items(value)[:1] if kind is FieldShape.LIST and depth < 3 else []
    return f"{cls.__name__} of {describe(first[0], depth + 1)}" if first else cls.__name__
