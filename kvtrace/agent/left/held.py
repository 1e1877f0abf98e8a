"""What a connector still holds in plain memory when it is shut down: a dict of tensors, arrays or bytes.

Looked at once before its ``shutdown`` and, where something waits still, once after it: what was on its way
has come to rest then. From the connector's own objects, and the modules and classes of its package, this goes
through dicts, lists, tuples, sets, attributes and slots, never by the user's code: no property, no method of
theirs is called. What lies in queues, deques and lists without a key is on its way and no store; what shares
memory with a KV cache is the KV cache. KV is recognised by its content (``pieces.py``).

Bounded in objects, bytes and time. Where a bound was met, what was found says so (no Flag.KEPT): what is not
found may be where nobody looked.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from kvtrace.agent import owners
from kvtrace.agent.left.leaving import Left
from kvtrace.agent.left.pieces import LENGTH, POOL
from kvtrace.agent.owners import Owner
from kvtrace.agent.state import AGENT, clock
from kvtrace.agent.watch.caches import CACHES
from kvtrace.agent.watch.tensors import OWN

_MOST_OBJECTS = 20_000
_MOST_BYTES = 16 << 20
_MOST_NS = 300_000_000
_LEAST_BYTES = 64
_AT_ONCE = 1 << 20
"""Bytes that are looked through between two looks at the clock."""
_BETWEEN = b"\xa5" * (2 * LENGTH)

_mro: Any = type.__dict__["__mro__"].__get__
_names: Any = type.__dict__["__dict__"].__get__
_BYTES = (bytes, bytearray, memoryview)


def look(connector: Any, index: int) -> None:
    """Write FOUND records of the KV that it holds. Never raises."""
    before, OWN.busy = OWN.busy, True
    try:
        recorder, owner = AGENT.recorder, owners.owner_of(index)
        if owner is None or recorder is None or not recorder.alive or not len(POOL):
            return
        left, until = Left(index), clock() + _MOST_NS
        walk = _Walk(connector, owner, until)
        for name, first, data in _joined(iter(walk)):
            if clock() > until:
                walk.whole = False
                break
            left.held(name, data, first)
        left.write_held(clock(), walk.whole)
        AGENT.flush()
    except Exception:
        AGENT.failed("what is held")
    finally:
        OWN.busy = before


def _joined(walk: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, int, bytes]]:
    """(name of the place, bytes before these, bytes): what is held in one place, side by side."""
    waiting: dict[str, list[bytes]] = {}
    before: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, data in walk:
        waiting.setdefault(name, []).extend((data, _BETWEEN))
        sizes[name] = sizes.get(name, 0) + len(data) + len(_BETWEEN)
        if sizes[name] >= _AT_ONCE:
            yield name, before.get(name, 0), b"".join(waiting.pop(name))
            before[name] = before.get(name, 0) + sizes.pop(name)
    for name, parts in waiting.items():
        yield name, before.get(name, 0), b"".join(parts)


class _Way(IntEnum):
    """How something is held."""

    PLAIN = 0
    """As an attribute, or a global one."""
    KEYED = 1
    """As the value of a key."""
    LISTED = 2
    """In a list that is none: it waits for something."""


class _At(NamedTuple):
    value: Any
    name: str
    way: _Way = _Way.PLAIN


_CONTAINERS: tuple[tuple[type, Any, _Way], ...] = (
    (dict, lambda value: list(dict.values(value)), _Way.KEYED),
    (list, lambda value: list.__getitem__(value, slice(None)), _Way.LISTED),
    (set, lambda value: list(set.__iter__(value)), _Way.LISTED),
    (frozenset, lambda value: list(frozenset.__iter__(value)), _Way.LISTED),
    (tuple, lambda value: tuple.__getitem__(value, slice(None)), _Way.PLAIN),
)


class _Walk:
    """Iterates over (name of the place, bytes) of what is held. The name has no key of the user's: modules,
    classes and attributes only."""

    def __init__(self, connector: Any, owner: Owner, until: int) -> None:
        self._owner, self._until = owner, until
        self._own: dict[str, bool] = {}
        self._seen: set[int] = set()
        self.whole = True
        """Whether all was looked at, so far."""
        self._objects = 0
        self._bytes = 0
        kind = type(connector)
        self._next = [_At(connector, str(_names(kind).get("__qualname__", kind.__name__)))]
        self._classes: set[int] = set()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        return self._found()

    def _found(self) -> Iterator[tuple[str, bytes]]:
        yield from self._from()
        for name in self._owner.modules():
            module = sys.modules.get(name)
            if type(module) is types.ModuleType and self._is_own(name):
                self._next = [_At(value, f"{name}.{key}") for key, value in list(vars(module).items())]
                yield from self._from()

    def _from(self) -> Iterator[tuple[str, bytes]]:
        held: list[Any] = []  # lists made here stay alive, so that no id comes twice
        self._next.reverse()
        while self._next:
            at = self._next.pop()
            value = at.value
            if id(value) in self._seen:
                continue
            self._objects += 1
            late = not self._objects % 256 and clock() > self._until
            if self._objects > _MOST_OBJECTS or late:
                self.whole = False
                return
            self._seen.add(id(value))
            held.append(value)
            data = self._bytes_of(value)
            if data is not None:
                if len(data) >= _LEAST_BYTES and at.way != _Way.LISTED:
                    self._bytes += len(data)
                    yield at.name, data
                continue
            with contextlib.suppress(Exception):  # it changes while it is looked at
                self._next.extend(reversed(self._inside(at)))

    def _is_own(self, module: Any) -> bool:
        if type(module) is not str:
            return False
        known = self._own.get(module)
        if known is None:
            file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
            known = type(file) is str and self._owner.surely_owns(file)
            self._own[module] = known
        return known

    def _inside(self, at: _At) -> list[_At]:
        kind = type(at.value)
        for base, all_of, way in _CONTAINERS:
            if issubclass(kind, base):
                way = at.way if at.way == _Way.KEYED or way == _Way.PLAIN else way
                return [at._replace(value=one, way=way) for one in all_of(at.value)]
        if issubclass(kind, type):
            return self._of_class(at.value)
        if not self._is_own(_names(kind).get("__module__")):
            return []
        return [*self._attributes(at, kind), *self._of_class(kind)]

    def _of_class(self, kind: type) -> list[_At]:
        found = []
        for cls in _mro(kind):
            if id(cls) not in self._classes and self._is_own(_names(cls).get("__module__")):
                self._classes.add(id(cls))
                place = f"{_names(cls)['__module__']}.{cls.__name__}"
                found += [_At(one, f"{place}.{key}") for key, one in list(_names(cls).items())]
        return found

    def _attributes(self, at: _At, kind: type) -> Iterator[_At]:
        for cls in _mro(kind):
            for key, member in list(_names(cls).items()):
                if type(member) is types.MemberDescriptorType:
                    with contextlib.suppress(AttributeError):
                        yield _At(member.__get__(at.value, kind), f"{at.name}.{key}", at.way)
                elif key == "__dict__" and type(member) is types.GetSetDescriptorType:
                    own = member.__get__(at.value, kind)
                    yield from [_At(one, f"{at.name}.{key}", at.way) for key, one in list(dict.items(own))]

    # --- bytes ----------------------------------------------------------------------------

    def _bytes_of(self, value: Any) -> bytes | None:
        """None where it is none of those that hold bytes; b"" where it is not to be looked at."""
        kind = type(value)
        try:
            if kind in _BYTES:
                with memoryview(value) as view:
                    return view.tobytes() if self._fits(view.nbytes) else b""
            if kind is _of("torch", "Tensor"):
                return self._of_tensor(value)
            if kind is _of("numpy", "ndarray"):
                own = not value.dtype.hasobject and not CACHES.around(value.__array_interface__["data"][0])
                return value.tobytes() if own and self._fits(value.nbytes) else b""
        except Exception:
            return b""  # released, not contiguous, without memory
        return None

    def _fits(self, size: int) -> bool:
        fits = self._bytes + size <= _MOST_BYTES
        self.whole &= fits
        return fits

    def _of_tensor(self, tensor: Any) -> bytes:
        """All of the memory that it lies in, once."""
        if tensor.device.type != "cpu":
            return b""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not address or -address in self._seen or CACHES.around(address):
            return b""
        self._seen.add(-address)
        return ctypes.string_at(address, size) if self._fits(size) else b""


def _of(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
