"""NIXL's transfers: descriptor lists are prepared once, transfers name their descriptors by index.

What a list holds is noted when it is prepared (``prep_xfer_dlist``, at registration, of this process's memory
alone), which of it a transfer takes when that is made, and both count when it is posted (``transfer``). The
notes are numbers beside NIXL's handles, by the handle's own number; a list that is too long, and a transfer
that was made out of a watched call's sight, are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvtrace.agent.kv.late import Array, np
from kvtrace.agent.kv.memory import MOST, Copy, Memory, NotKnown, Ranges, numbers
from kvtrace.agent.kv.tensors import is_tensor
from kvtrace.agent.watch.modes import seeing_here

_MOST_LISTED = 1 << 22
"""Descriptors of all lists."""
_MOST_TRANSFERS = 1 << 12
_LOCAL = ("NIXL_INIT_AGENT", "")


class _Side(NamedTuple):
    """A list in this process: addresses, and the bytes of each."""

    firsts: Array
    sizes: Array

    def of(self, indices: Array | None = None) -> Ranges:
        if indices is None:
            return Ranges(self.firsts, self.sizes)
        return Ranges(self.firsts[indices], self.sizes[indices])


_lists: dict[int, _Side | None] = {}
"""Handle -> list; None: not known."""
_transfers: dict[int, tuple[Copy, ...]] = {}


def _key(handle: Any) -> int:
    """Handles are objects with a number; in older versions the number itself."""
    number = getattr(handle, "_handle", handle)
    if type(number) is not int:
        raise NotKnown
    return number


def _side(descs: Any) -> _Side:
    """Of (address, length, device) tuples, an Nx3 array, tensors, or NIXL's own list."""
    if is_tensor(descs):
        descs = [descs]
    count = getattr(descs, "descCount", None)
    if count is not None:
        if count() > MOST:
            raise NotKnown
        descs = [descs[at] for at in range(count())]
    if isinstance(descs, list) and descs and is_tensor(descs[0]):
        descs = [(one.data_ptr(), one.numel() * one.element_size(), 0) for one in descs]
    if len(descs) > MOST // 3:
        descs = np.asarray(descs)
        if descs.ndim != 2 or len(descs) > MOST:
            raise NotKnown
        return _Side(numbers(descs[:, 0]), numbers(descs[:, 1]))
    table = numbers(descs).reshape(-1, 3)
    return _Side(table[:, 0].copy(), table[:, 1].copy())


def prepared(named: Mapping[str, Any], result: Any) -> Iterable[Copy]:
    """``prep_xfer_dlist``: what the handle stands for. Nothing is copied."""
    key = _key(result)
    agent = named["agent_name"]
    if agent not in _LOCAL and agent != getattr(named["self"], "name", None):
        _lists.pop(key, None)
        return ()
    _lists[key] = None
    side = _side(named["xfer_list"])
    if sum(len(one.firsts) for one in _lists.values() if one is not None) + len(side.firsts) <= _MOST_LISTED:
        _lists[key] = side
    return ()


def _pair(operation: str, local: Memory | None, remote: Memory | None, loopback: bool) -> tuple[Copy, ...]:
    if operation not in ("READ", "WRITE"):
        raise NotKnown
    written = operation == "READ"  # into local memory, from the remote one
    return ((written, local), (not written, remote)) if loopback else ((written, local),)


def made(named: Mapping[str, Any], result: Any) -> Iterable[Copy]:
    """``make_prepped_xfer``: which descriptors of the lists a transfer takes. Nothing is copied yet."""
    key = _key(result)
    _transfers.pop(key, None)
    if not seeing_here():
        return ()
    local, remote = _key(named["local_xfer_side"]), _key(named["remote_xfer_side"])
    mine = _taken(local, named["local_indices"])
    theirs = _taken(remote, named["remote_indices"])
    _put(key, _pair(named["operation"], mine, theirs, remote in _lists))
    return ()


def _taken(handle: int, indices: Any) -> Memory | None:
    side = _lists.get(handle)
    return None if side is None else side.of(numbers(indices))


def initialized(named: Mapping[str, Any], result: Any) -> Iterable[Copy]:
    """``initialize_xfer``: a transfer of whole lists. Nothing is copied yet."""
    key = _key(result)
    _transfers.pop(key, None)
    if not seeing_here():
        return ()
    loopback = named["remote_agent"] == getattr(named["self"], "name", None)
    remote = _side(named["remote_descs"]).of() if loopback else None
    _put(key, _pair(named["operation"], _side(named["local_descs"]).of(), remote, loopback))
    return ()


def _put(key: int, copies: tuple[Copy, ...]) -> None:
    if len(_transfers) >= _MOST_TRANSFERS:
        del _transfers[next(iter(_transfers))]
    _transfers[key] = copies


def posted(named: Mapping[str, Any], result: Any) -> Iterable[Copy]:
    """``transfer``: the transfer began, or is done."""
    if result == "ERR":
        return ()
    copies = _transfers.get(_key(named["handle"]))
    if copies is None:
        raise NotKnown
    return copies
