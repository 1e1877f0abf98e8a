"""Which slots an operation touches, against brute force: each element of the storage holds its own number,
the same operation runs, and the numbers that come out (or are gone) say which slots it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch")

from kvtrace.agent.kv.caches import Caches  # noqa: E402
from kvtrace.agent.kv.layout import hint_of, layout_of  # noqa: E402
from kvtrace.agent.watch.operations import GIVEN_OUT, READ, WRITTEN, CopyWatch  # noqa: E402

from .fakes import kv_cache_config  # noqa: E402

HEADS, CONTENT = 3, 4
# name -> (shape, which dimension counts blocks, which slots)
SHAPES = {
    "K and V first": (("2", "B", "N", "H", "D"), 1, 2),
    "blocks first": (("B", "2", "N", "H", "D"), 0, 2),
    "heads before slots": (("2", "B", "H", "N", "D"), 1, 3),
    "K and V in the content": (("B", "H", "N", "D"), 0, 2),
    "MLA": (("B", "N", "D"), 0, 1),
    "slots last": (("B", "H", "D", "N"), 0, 3),
}


class Cache:
    """Layers in one storage, or in one each.

    Args:
        order: of the dimensions in memory, the outermost first; the layers' among them where they share it.
        ratio: kernel blocks in a block of the manager.
    """

    def __init__(self, kind: str, blocks: int, size: int, ratio: int, order: list[int], layers: int) -> None:
        names, block, slot = SHAPES[kind]
        sizes = {"2": 2, "B": blocks * ratio, "N": size // ratio, "H": HEADS, "D": CONTENT}
        shape = [sizes[name] for name in names]
        self.names = [f"layer.{n}" for n in range(layers)]
        whole = [*shape, layers]
        memory = torch.arange(float(torch.tensor(whole).prod()))
        self.memory = memory
        laid = memory.view([whole[at] for at in order]).permute([order.index(at) for at in range(len(order))])
        self.tensors = {name: laid[..., n] for n, name in enumerate(self.names)}
        self.caches = Caches()
        self.caches.register(self.tensors)
        self.caches.configure(kv_cache_config(blocks, size, self.names), {})
        for name in self.names:  # as the backend would say it
            self.caches._hints[name] = {len(self.caches.layers[name].shape): (block, slot)}
        # slot of each element, by layer
        self.slot_of = {}
        grid = torch.arange(shape[block]).view([-1 if at == block else 1 for at in range(len(shape))])
        place = torch.arange(shape[slot]).view([-1 if at == slot else 1 for at in range(len(shape))])
        for name, tensor in self.tensors.items():
            numbers = (grid * shape[slot] + place).expand(shape)
            self.slot_of[name] = dict(
                zip(tensor.flatten().long().tolist(), numbers.flatten().tolist(), strict=True)
            )
        self.per_slot = memory.numel() // layers // (blocks * size)

    def expected(self, elements: set[int]) -> dict[str, tuple[set[int], set[int]]]:
        """(slots touched in full, in part) of each layer that was touched."""
        found = {}
        for name in self.names:
            counts: dict[int, int] = {}
            for element in elements & self.slot_of[name].keys():
                slot = self.slot_of[name][element]
                counts[slot] = counts.get(slot, 0) + 1
            if counts:
                full = {slot for slot, count in counts.items() if count == self.per_slot}
                found[name] = (full, set(counts) - full)
        return found


def parsed(text: str) -> tuple[set[int], set[int]]:
    def runs(part: str) -> set[int]:
        pairs = [tuple(map(int, run.split("+"))) for run in part.split(",") if run]
        numbers = [first + n for first, count in pairs for n in range(count)]
        assert numbers == sorted(set(numbers)), "ascending, no slot twice"
        return set(numbers)

    full, _, partly = text.partition("/")
    return runs(full), runs(partly)


@contextmanager
def watching(here: Cache, named: str | None = None) -> Iterator[CopyWatch]:
    watch = CopyWatch(here.caches, named)
    assert watch.start()
    try:
        yield watch
    finally:
        watch.stop()


NOTHING: tuple[set[int], set[int]] = (set(), set())


def seen(watch: CopyWatch, way: str) -> dict[str, Any]:
    assert watch.settled() and not watch.failed
    found: dict[str, Any] = {}
    for (layer, its_way), touched in watch.touched().items():
        if its_way == way:
            found[layer] = None if touched is None else parsed(touched.text)
            if touched is not None:
                assert (touched.full, touched.partly) == tuple(map(len, found[layer]))
    return found


@st.composite
def made_caches(draw: Any, layers: int | None = None) -> Cache:
    kind = draw(st.sampled_from(sorted(SHAPES)))
    ratio = draw(st.sampled_from((1, 1, 2)))
    size, blocks = draw(st.sampled_from((4, 8))), draw(st.integers(2, 4))
    count = layers or draw(st.sampled_from((1, 2, 3)))
    rank = len(SHAPES[kind][0]) + 1
    outer = [rank - 1, *range(rank - 1)]
    order = draw(st.one_of(st.just(outer), st.permutations(range(rank))))
    return Cache(kind, blocks, size, ratio, list(order), count)


VIEWS = ("slice", "select", "transpose", "flatten", "split", "unfold", "strided", "last")
READS = ("clone", "to", "cat", "out", "scaled", "index", "index", "along", "gather", "take", "mask", "rows")
WRITES = ("fill", "copy", "put", "copy along", "fill along", "scatter", "flat", "mask", "add", "source")


def viewed(draw: Any, tensor: Any, steps: int = 3) -> Any:
    """A random view of a tensor, as connectors make them."""
    for _ in range(draw(st.integers(0, steps))):
        if not tensor.dim():
            return tensor
        dim = draw(st.integers(0, tensor.dim() - 1))
        size = tensor.shape[dim]
        how = draw(st.sampled_from(VIEWS))
        if how == "slice" and size:
            begin = draw(st.integers(0, size - 1))
            end = draw(st.integers(begin + 1, size))
            tensor = tensor[(slice(None),) * dim + (slice(begin, end, draw(st.sampled_from((1, 1, 2)))),)]
        elif how == "select" and size:
            tensor = tensor.select(dim, draw(st.integers(-size, size - 1)))
        elif how == "transpose":
            tensor = tensor.transpose(dim, draw(st.integers(0, tensor.dim() - 1)))
        elif how == "flatten" and dim + 1 < tensor.dim():
            try:
                tensor = tensor.view([*tensor.shape[:dim], -1, *tensor.shape[dim + 2 :]])
            except RuntimeError:
                continue
        elif how == "split" and size % 2 == 0 and size:
            tensor = tensor.unflatten(dim, (2, size // 2))
        elif how == "unfold" and size > 1:
            tensor = tensor.unfold(dim, 2, 1)
        elif how == "strided" and tensor.dim() < 5 and size:
            tensor = tensor.diagonal(0, 0, -1) if tensor.dim() > 1 and dim else tensor.unsqueeze(0)
        elif how == "last" and dim + 1 < tensor.dim():
            try:
                tensor = tensor.view(-1, tensor.shape[-1])
            except RuntimeError:
                continue
    return tensor


def indexes(draw: Any, size: int, shape: tuple[int, ...], negative: bool = True) -> Any:
    low = -size if negative else 0
    count = int(torch.tensor(shape).prod()) if shape else 1
    values = draw(st.lists(st.integers(low, size - 1), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.int64).view(shape)


def index_list(draw: Any, tensor: Any) -> list[Any]:
    """What stands between the brackets: index tensors that broadcast, masks, Nones."""
    count = draw(st.integers(1, 5))
    picked = draw(st.lists(st.booleans(), min_size=tensor.dim(), max_size=tensor.dim()))
    found: list[Any] = []
    for size, pick in zip(tensor.shape, picked, strict=True):
        if not pick or not size:
            found.append(slice(None))
        elif draw(st.integers(0, 5)) == 0 and not any(torch.is_tensor(one) for one in found):
            found.append(torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))))
            count = max(1, int(found[-1].sum()))
            if not found[-1].any():
                found[-1][0] = True
        else:
            shape = draw(st.sampled_from(((count,), (1,), ())))
            found.append(indexes(draw, size, shape))
    return found


def read(draw: Any, tensor: Any) -> Any:
    how = draw(st.sampled_from(READS))
    if not tensor.numel() or how == "clone":
        return tensor.clone()
    if how == "to":
        return tensor.to(torch.float64)
    if how == "cat":
        return (
            torch.cat([tensor.reshape(-1) if tensor.is_contiguous() else tensor, tensor])[: len(tensor)]
            if tensor.dim() and not tensor.is_contiguous()
            else torch.stack([tensor, tensor])
        )
    if how == "out":
        return torch.empty(tensor.shape).copy_(tensor)
    if how == "scaled":
        return (tensor * 2.0) / 2.0
    if not tensor.dim():
        return tensor.contiguous().clone()
    dim = draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    if how == "index":
        return tensor[tuple(index_list(draw, tensor))].clone()
    if how == "along":
        return torch.index_select(tensor, dim, indexes(draw, size, (draw(st.integers(1, 4)),), False))
    if how == "gather":
        shape = [draw(st.integers(1, n)) for n in tensor.shape]
        spread = [draw(st.booleans()) and at != dim for at in range(tensor.dim())]
        index = indexes(draw, size, tuple(1 if s else n for s, n in zip(spread, shape, strict=True)), False)
        return torch.gather(tensor, dim, index.expand(shape))
    if how == "take":
        return torch.take(tensor, indexes(draw, tensor.numel(), (draw(st.integers(1, 6)),)))
    if how == "mask":
        mask_shape = [draw(st.sampled_from((1, n))) for n in tensor.shape[draw(st.integers(0, dim)) :]]
        return torch.masked_select(tensor, torch.rand(mask_shape) < 0.5)
    return torch.nn.functional.embedding(indexes(draw, len(tensor), (3,), False), tensor) \
        if tensor.dim() == 2 else tensor.contiguous().clone()  # fmt: skip


def write(draw: Any, tensor: Any) -> None:
    """Put -1 into what an operation names."""
    how = draw(st.sampled_from(WRITES))
    if not tensor.numel() or how == "fill" or not tensor.dim():
        tensor.fill_(-1.0)
        return
    dim = draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    if how == "copy":
        tensor.copy_(torch.full((), -1.0))
    elif how == "put":
        tensor[tuple(index_list(draw, tensor))] = -1.0
    elif how in ("copy along", "fill along"):
        index = indexes(draw, size, (draw(st.integers(1, 4)),), False)
        if how == "fill along":
            tensor.index_fill_(dim, index, -1.0)
        else:
            shape = list(tensor.shape)
            shape[dim] = len(index)
            tensor.index_copy_(dim, index, torch.full(shape, -1.0))
    elif how == "scatter":
        shape = [draw(st.integers(1, n)) for n in tensor.shape]
        index = indexes(draw, size, tuple(shape), False)
        tensor.scatter_(dim, index, torch.full(shape, -1.0))
    elif how == "flat":
        index = indexes(draw, tensor.numel(), (draw(st.integers(1, 6)),))
        tensor.put_(index, torch.full((len(index),), -1.0))
    elif how == "mask":
        tensor.masked_fill_(torch.rand(tensor.shape[dim:]) < 0.5, -1.0)
    elif how == "add":
        tensor.sub_(1e7)
    else:
        shape = tensor.shape
        tensor.masked_scatter_(torch.rand(shape) < 0.5, torch.full((tensor.numel(),), -1.0))


@settings(max_examples=400)
@given(data=st.data())
def test_what_is_read(data: st.DataObject) -> None:
    cache = data.draw(made_caches())
    layer = data.draw(st.sampled_from(cache.names))
    numbers: set[int] = set()
    mode = data.draw(st.sampled_from((torch.inference_mode, torch.no_grad, torch.enable_grad)))
    with mode(), watching(cache, layer) as watch:
        for _ in range(data.draw(st.integers(1, 3))):
            out = read(data.draw, viewed(data.draw, cache.tensors[layer]))
            numbers.update(out.detach().flatten().long().tolist())
    found = seen(watch, READ)
    # A mask or an index may pick nothing: then the layer stands there, with no slot of it.
    assert {name: slots for name, slots in found.items() if slots != NOTHING} == cache.expected(numbers)
    assert seen(watch, WRITTEN) == {}


@settings(max_examples=400)
@given(data=st.data())
def test_what_is_written(data: st.DataObject) -> None:
    cache = data.draw(made_caches())
    layer = data.draw(st.sampled_from(cache.names))
    mode = data.draw(st.sampled_from((torch.inference_mode, torch.no_grad)))
    with mode(), watching(cache, layer) as watch:
        for _ in range(data.draw(st.integers(1, 3))):
            view = viewed(data.draw, cache.tensors[layer], 2)
            if 0 in view.stride() or view.numel() != len(set(_places(view))):
                continue  # elements on top of each other
            write(data.draw, view)
    changed = (cache.memory != torch.arange(float(cache.memory.numel()))).nonzero().flatten()
    assert seen(watch, WRITTEN) == cache.expected(set(changed.tolist()))


def _places(view: Any) -> list[int]:
    found = [view.storage_offset()]
    for size, stride in zip(view.shape, view.stride(), strict=True):
        found = [place + n * stride for place in found for n in range(size)]
    return found


@settings(max_examples=200)
@given(data=st.data())
def test_other_item_sizes_and_memory_of_all_layers(data: st.DataObject) -> None:
    """A cache seen as bytes, as int64, or as one tensor with all layers of a block together."""
    cache = data.draw(made_caches())
    size = data.draw(st.sampled_from((1, 2, 4, 8)))
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.float32, 8: torch.float64}[size]
    if cache.memory.numel() % 2:
        return
    whole = cache.memory.view(dtype)
    begin = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(begin + 1, len(whole)))
    with watching(cache) as watch:
        whole[begin:end].clone()
    first, last = begin * size, end * size
    inside = {n for n in range(cache.memory.numel()) if first <= 4 * n and 4 * n + 4 <= last}
    cut = {n for n in range(cache.memory.numel()) if first < 4 * n + 4 and 4 * n < last} - inside
    expected = cache.expected(inside)
    for name, (full, partly) in cache.expected(inside | cut).items():
        before = expected.get(name, (set(), set()))[0]
        expected[name] = (before, (full | partly) - before)
    assert seen(watch, READ) == expected


# --- what is not understood is not known, never guessed --------------------------------------------------


def plain(layers: int = 1) -> Cache:
    rank = len(SHAPES["MLA"][0]) + 1
    return Cache("MLA", 4, 4, 1, [rank - 1, *range(rank - 1)], layers)


@pytest.mark.parametrize(
    ("operation", "way", "found"),
    [
        (lambda kv: kv.sum(), READ, {}),
        (lambda kv: kv.amax(-1), READ, {}),
        (lambda kv: kv.isnan().any(), READ, {}),
        (lambda kv: torch.empty_like(kv), READ, {}),
        (lambda kv: kv[1:2].topk(2), READ, {"layer.0": None}),
        (lambda kv: kv[1] @ torch.ones(CONTENT, 9), READ, {"layer.0": None}),
        (lambda kv: kv[2].numpy().copy(), GIVEN_OUT, {"layer.0": ({8, 9, 10, 11}, set())}),
        (lambda kv: kv[2, :, 1:].numpy().copy(), GIVEN_OUT, {"layer.0": (set(), {8, 9, 10, 11})}),
        (lambda kv: kv.numpy(), GIVEN_OUT, {}),
        (lambda kv: kv[3].copy_(kv[1]), READ, {}),
        (lambda kv: kv[3].copy_(kv[1]), WRITTEN, {"layer.0": ({12, 13, 14, 15}, set())}),
        (lambda kv: kv[:0].clone(), READ, {}),
        (lambda kv: kv[torch.zeros(0, dtype=torch.int64)], READ, {"layer.0": (set(), set())}),
        (lambda kv: kv[torch.zeros(0, dtype=torch.int64)][1:].clone(), WRITTEN, {}),
        (
            lambda kv: (kv[torch.zeros(0, dtype=torch.int64)], kv[1].clone()),
            READ,
            {"layer.0": ({4, 5, 6, 7}, set())},
        ),
        (lambda kv: (kv[torch.zeros(0, dtype=torch.int64)], kv.data_ptr()), READ, {}),  # or by its address
    ],
)
def test_single_operations(operation: Any, way: str, found: dict[str, Any]) -> None:
    cache = plain()
    with watching(cache) as watch:
        operation(cache.tensors["layer.0"])
    assert seen(watch, way) == found


def test_k_then_v_is_all_of_a_slot_and_head_after_head_too() -> None:
    cache = Cache("K and V first", 3, 4, 1, [5, 0, 1, 2, 3, 4], 1)
    kv = cache.tensors["layer.0"]
    with watching(cache) as watch:
        kv[0, 1].clone()
        kv[1, 1, :3].clone()
        for head in range(HEADS):
            kv[:, 2, 1:3, head].clone()
    assert seen(watch, READ) == {"layer.0": ({4, 5, 6, 9, 10}, {7})}


def test_a_layout_with_two_readings_is_none() -> None:
    assert layout_of((2, 4, 16, 16, 8), (8192, 2048, 128, 8, 1), 2, 4, 16) is None
    assert layout_of((2, 4, 16, 16, 8), (8192, 2048, 128, 8, 1), 2, 4, 16, (1, 2)) is not None
    assert layout_of((4, 8), (8, 1), 2, 5, 8) is None, "not the manager's numbers"
    assert layout_of((4, 8), (8, 1), 2, 4, 8) is not None
    assert layout_of((4, 8), (8, 1), 2, 4, 8, ()) is None, "the backend was asked, and did not say"
    overlapping = layout_of((4, 8, 2), (8, 1, 1), 2, 4, 8)
    assert overlapping is None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (lambda b, n, h, d: (2, b, n, h, d), (1, 2)),
        (lambda b, n, h, d: (b, 2, n, h, d), (0, 2)),
        (lambda b, n, h, d: (2, b, h, n, d), (1, 3)),
        (lambda b, n, h, d: (b, n, d), (0, 1)),
        (lambda b, n, h, d: (2, b, n * h * d), ()),
    ],
)
def test_the_backend_says_which_dimension_is_which(shape: Any, expected: Any) -> None:
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_kv_cache_shape=shape))
    assert hint_of(layer, 5, 16) == expected


def test_a_view_without_the_one_head_is_the_registered_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLA from 0.29 on: four dimensions are registered, the save hook gets three."""
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", SimpleNamespace())
    latents = torch.zeros(6, 1, 4, 8)
    caches = Caches()
    caches.register({"layer.0": latents})
    caches.configure(kv_cache_config(6, 4, ["layer.0"]), {})
    registered = caches.layout(caches.layers["layer.0"])
    caches.add("layer.0", latents.squeeze(1))
    seen_in_a_hook = caches.layout(caches.layers["layer.0"])
    assert registered is not None and seen_in_a_hook is not None
    assert registered.slots == seen_in_a_hook.slots == 24


def test_layers_of_one_memory_are_told_apart_where_they_can_be() -> None:
    """Two layers of different groups on the same bytes: both may be meant, but for the one that was named."""
    cache = plain()
    cache.caches.register({"layer.0": cache.tensors["layer.0"], "other": cache.tensors["layer.0"]})
    cache.caches.configure(kv_cache_config(4, 4, ["layer.0"], ["other"]), {})
    for named, names in ((None, {"layer.0", "other"}), ("other", {"other"})):
        with watching(cache, named) as watch:
            cache.tensors["layer.0"][1].clone()
        assert set(seen(watch, READ)) == names


def test_where_the_watch_itself_fails_any_slot_may_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = plain()

    def failing(*_: Any) -> NoReturn:
        raise KeyError("stands for a mistake of ours")

    monkeypatch.setattr(CopyWatch, "_note", failing)
    with watching(cache) as watch:
        cache.tensors["layer.0"][1].clone()
    assert watch.unsure and watch.blind == set(cache.names)


def test_runs_are_written_short() -> None:
    cache = plain()
    kv = cache.tensors["layer.0"]
    with watching(cache) as watch:
        kv[torch.tensor([1, 2, 0])].clone()
        kv[3, 2:].clone()
        kv[3, 0, :1].clone()
    ((_, touched),) = watch.touched().items()
    assert touched is not None and touched.text == "0+12,14+2/12+1"
