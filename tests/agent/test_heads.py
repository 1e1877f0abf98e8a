"""The order in which the heads of a slot stand where KV is found again."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.left.pieces import Op, Pool, turned  # noqa: E402
from kvtrace.agent.watch.caches import Caches  # noqa: E402
from kvtrace.agent.watch.touch import Touch  # noqa: E402

BLOCKS, SLOTS, HEADS, SIZE = 6, 8, 4, 16


def shaped(kind):
    """A KV tensor of random numbers, as backends lay it out, and {kind: what vLLM says of it}."""
    shape = {
        "blocks, heads, slots": (BLOCKS, HEADS, SLOTS, 2 * SIZE),
        "K and V first": (2, BLOCKS, SLOTS, HEADS, SIZE),
        "blocks first": (BLOCKS, 2, SLOTS, HEADS, SIZE),
        "no heads": (BLOCKS, SLOTS, SIZE),
        "one head": (BLOCKS, 1, SLOTS, SIZE),
        "K and V only": (2, BLOCKS, SLOTS, SIZE),
    }[kind]
    return torch.randn(shape)


def known(kv, kind):
    caches = Caches()
    caches.add("layer", kv)
    caches._blocks["layer"] = BLOCKS, SLOTS
    hint = (0, 2) if kind in ("blocks, heads, slots", "one head") else None
    caches._hints["layer"] = {kv.dim(): hint}
    return caches, caches.layers["layer"]


def whole_blocks(kv, kind):
    """Two blocks as [slot, heads, numbers]; K and V side by side."""
    if kind == "blocks, heads, slots":
        return kv[1:3].permute(0, 2, 1, 3).reshape(2 * SLOTS, HEADS, 2 * SIZE)
    kv = kv if kind == "blocks first" else kv.transpose(0, 1)
    return kv[1:3].permute(1, 0, 2, 3, 4).reshape(2 * 2 * SLOTS, HEADS, SIZE)


def looked_for(kv, kind):
    caches, layer = known(kv, kind)
    np = pytest.importorskip("numpy")
    op = Op(1, 1, "layer")
    slots = Touch(np.arange(SLOTS, 3 * SLOTS), None)
    assert Pool().take(op, layer.start, caches.layout(layer), [slots], caches.heads(layer)) is not None
    return op


KINDS = ("blocks, heads, slots", "K and V first", "blocks first")


@pytest.mark.parametrize("kind", KINDS)
def test_heads_in_another_order_are_seen_whatever_the_layout(kind):
    kv = shaped(kind)
    op, blocks = looked_for(kv, kind), whole_blocks(kv, kind)
    for stored in (blocks, blocks.transpose(0, 1)):  # slot by slot, and head by head: both are healthy
        dim = 1 if stored is blocks else 0
        for data, said in ((stored, False), (stored.flip(dim), True)):
            assert turned(op, b"head" + data.contiguous().numpy().tobytes(), 4) is said


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_where_the_same_kv_stands_twice_or_not_whole(kind):
    kv = shaped(kind)
    op, data = looked_for(kv, kind), whole_blocks(kv, kind).contiguous().numpy().tobytes()
    op.bytes *= 2
    assert turned(op, data + data, 0) is None
    assert turned(op, data[:SIZE], 0) is None


@pytest.mark.parametrize("kind", ["no heads", "one head", "K and V only"])
def test_k_and_v_are_not_taken_for_heads(kind):
    caches, layer = known(shaped(kind), kind)
    assert caches.heads(layer) is None


def test_the_tensor_says_how_many_heads_there_are_and_how_far_apart():
    caches, layer = known(shaped("K and V first"), "K and V first")
    assert caches.heads(layer) == (HEADS, SIZE * 4)
    caches, layer = known(shaped("blocks, heads, slots"), "blocks, heads, slots")
    assert caches.heads(layer) == (HEADS, SLOTS * 2 * SIZE * 4)
