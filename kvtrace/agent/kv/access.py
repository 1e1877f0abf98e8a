"""What one tensor operation reads from, or writes into, a tensor: all of it, or what an index picks.

An operation is seen below autograd, by the name in its schema. For those that pick (an index, a gather, a
mask) the values of the index are needed: on the host they are read at once; on a device they are copied
aside, behind the operation on its stream, and read when that copy is done. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from kvtrace.agent.kv.host import aside, event_behind, on_host
from kvtrace.agent.kv.late import Array, np
from kvtrace.agent.kv.touch import Pattern

INDICES, ALONG, PICKED, FLAT, MASK = "indices", "along", "picked", "flat", "mask"
"""How elements are named: by an index a dimension; by one index along a dimension; by an index for each
element along a dimension; by a place in the flattened tensor; by a mask."""

Table = dict[str, tuple[str, str, str]]
"""Name in the schema -> (argument that is picked from or into, argument that names, how)."""

READS: Table = {
    "index": ("self", "indices", INDICES),
    "_unsafe_index": ("self", "indices", INDICES),
    "index_select": ("self", "index", ALONG),
    "embedding": ("weight", "indices", ALONG),
    "gather": ("self", "index", PICKED),
    "take": ("self", "index", FLAT),
    "masked_select": ("self", "mask", MASK),
}
WRITES: Table = {
    "index_put_": ("self", "indices", INDICES),
    "_index_put_impl_": ("self", "indices", INDICES),
    "index_copy_": ("self", "index", ALONG),
    "index_add_": ("self", "index", ALONG),
    "index_fill_": ("self", "index", ALONG),
    "index_reduce_": ("self", "index", ALONG),
    "scatter_": ("self", "index", PICKED),
    "scatter_add_": ("self", "index", PICKED),
    "scatter_reduce_": ("self", "index", PICKED),
    "put_": ("self", "index", FLAT),
    "masked_fill_": ("self", "mask", MASK),
    "masked_scatter_": ("self", "mask", MASK),
}


class View(NamedTuple):
    """Where a tensor lies in its storage: bytes from its begin, strides in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def view_of(tensor: Any) -> View:
    itemsize = tensor.element_size()
    return View(tensor.storage_offset() * itemsize, tuple(tensor.shape), tensor.stride(), itemsize)


class Access(NamedTuple):
    """What is touched of a view. ``values``: the tensors that name elements, on the host or being copied
    there; () for all of the view. ``dim``: of ALONG and PICKED."""

    view: View
    how: str = ""
    dim: int = 0
    values: tuple[Any, ...] = ()

    def ready(self) -> bool:
        return all(not isinstance(value, Aside) or value.done() for value in self.values)

    def key(self) -> tuple[Any, ...]:
        """Equal for accesses that touch the same, the values included; call it when they are ready."""
        return (*self[:3], *(None if value is None else _key(value) for value in self.values))


def access_of(tensor: Any, table: Table, name: str, named: dict[str, Any]) -> Access:
    """What an operation touches of ``tensor``, one of its arguments.

    Args:
        table: READS or WRITES.
        name: of the operation, without its overload.
        named: all of its arguments by name.
    """
    row = table.get(name)
    picked_from: Any = named.get(row[0]) if row is not None else None
    if row is None or picked_from is not tensor:
        return Access(view_of(tensor))
    given: Any = named.get(row[1])
    values = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    dim = int(named.get("dim") or 0)
    dim = dim + len(tensor.shape) if dim < 0 else dim
    return Access(view_of(tensor), row[2], dim, tuple(None if v is None else _kept(v) for v in values))


# --- values of an index ---------------------------------------------------------------------------------


class Aside:
    """A copy of an index on the host, on its way there. ``shape``: of the index, what it repeats included."""

    def __init__(self, index: Any) -> None:
        self.shape = tuple(index.shape)
        self.host = aside(index if str(index.dtype) == "torch.bool" else _thin(index))
        self._event = event_behind(index.device)

    def done(self) -> bool:
        return bool(self._event.query())


def _kept(index: Any) -> Any:
    return index if on_host(index) else Aside(index)


def _thin(index: Any) -> Any:
    """Without what ``expand`` only repeats: less to copy. Sizes of 1 in their place."""
    for at, (size, stride) in enumerate(zip(index.shape, index.stride(), strict=True)):
        if size > 1 and not stride:
            index = index.narrow(at, 0, 1)
    return index


def _host(value: Any) -> Any:
    return value.host if isinstance(value, Aside) else value


def _key(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape), _host(value).dtype, _array(_thin(_host(value))).tobytes()


def _array(value: Any) -> Any:
    return value.detach().numpy()


def _numbers(value: Any, size: int) -> Array:
    """An index as int64, counted from the begin."""
    numbers: Array = _array(value).astype(np.int64, copy=False)
    return np.where(numbers < 0, numbers + size, numbers) if numbers.size and numbers.min() < 0 else numbers


# --- patterns -------------------------------------------------------------------------------------------


def pattern_of(access: Access, start: int) -> Pattern:
    """The memory of an access that is ready, counted from byte ``start`` of the storage."""
    view = access.view
    first = view.offset - start
    values: list[Any] = [None if value is None else _host(value) for value in access.values]
    if not values:
        return Pattern(np.array([first], dtype=np.int64), _dims(view, range(len(view.shape))), view.itemsize)
    if access.how == PICKED:
        shape = tuple(getattr(access.values[0], "shape", ()))
        return _picked(view, first, access.dim, values[0], shape)
    if access.how == FLAT:
        places = np.unravel_index(_numbers(values[0], prod(view.shape)).ravel(), view.shape)
        return Pattern(first + _sum(view, places), (), view.itemsize)
    if access.how == ALONG:
        values = [*[None] * access.dim, values[0]]
    elif access.how == MASK:
        return _masked(view, first, values[0])
    return _indexed(view, first, values)


def _dims(view: View, which: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((view.shape[at], view.strides[at] * view.itemsize) for at in which)


def _sum(view: View, places: Sequence[Array], first: int = 0) -> Array:
    total: Array = sum(
        (own * (view.strides[first + at] * view.itemsize) for at, own in enumerate(places)),
        np.zeros(1, dtype=np.int64),
    )
    return total


def _indexed(view: View, first: int, values: Sequence[Any]) -> Pattern:
    """``view[values]``: those that are no None are broadcast together; a mask stands for its dimensions."""
    offsets: Any = np.zeros(1, dtype=np.int64)
    others: list[int] = []
    at = 0
    for value in values:
        if value is None:
            others.append(at)
            at += 1
        elif str(value.dtype) in ("torch.bool", "torch.uint8"):
            offsets = offsets + _sum(view, np.nonzero(_array(value)), at)
            at += value.dim()
        else:
            offsets = offsets + _numbers(value, view.shape[at]) * (view.strides[at] * view.itemsize)
            at += 1
    others.extend(range(at, len(view.shape)))
    return Pattern(first + offsets.ravel(), _dims(view, others), view.itemsize)


def _picked(view: View, first: int, dim: int, index: Any, shape: tuple[int, ...]) -> Pattern:
    """``gather`` and ``scatter_``: along ``dim`` the index says which, elsewhere its own place does."""
    if not view.shape:
        return Pattern(np.array([first], dtype=np.int64), (), view.itemsize)
    thin = _numbers(_thin(index), view.shape[dim])
    offsets = thin * (view.strides[dim] * view.itemsize)
    dims: list[tuple[int, int]] = []
    for at, size in enumerate(shape):
        if at == dim:
            continue
        stride = view.strides[at] * view.itemsize
        if thin.shape[at] != size:
            dims.append((size, stride))
        else:
            along = [1] * thin.ndim
            along[at] = size
            offsets = offsets + (np.arange(size, dtype=np.int64) * stride).reshape(along)
    return Pattern(first + offsets.ravel(), tuple(dims), view.itemsize)


def _masked(view: View, first: int, mask: Any) -> Pattern:
    """A mask that is broadcast over the view: dimensions over which it is repeated stay as they are."""
    thin = _thin(mask if mask.dim() else mask.reshape(1))
    places = np.nonzero(_array(thin))
    if not len(places[0]):
        return Pattern(np.empty(0, dtype=np.int64), (), view.itemsize)
    ahead = len(view.shape) - mask.dim()
    whole = [*range(ahead), *(ahead + at for at in range(mask.dim()) if thin.shape[at] == 1)]
    offsets: Any = np.zeros(1, dtype=np.int64)
    for at, own in enumerate(places[: mask.dim()]):
        if thin.shape[at] > 1:
            offsets = offsets + own * (view.strides[ahead + at] * view.itemsize)
    return Pattern(first + offsets, _dims(view, whole), view.itemsize)
