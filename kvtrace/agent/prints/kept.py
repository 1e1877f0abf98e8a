"""How far what is loaded is from what was computed, in numbers: LOAD_ERRORS, of ``kvtrace verify`` alone.

Of the latest prompt blocks that a worker computes, so many as its configuration says, a copy is kept, on the
device where the KV lies, under the keyed digest of all tokens up to the block's end. Where a block with the
same tokens is loaded later, or computed once more, both are compared there, layer by layer: the largest
difference of one number, and the mean one, each as a share of what the numbers are. From the device come
these shares, later, behind the step's own work; nothing waits for them, and no value leaves the process.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvtrace.agent.kv.host import aside, event_behind
from kvtrace.agent.state import AGENT
from kvtrace.agent.steps.block_tables import NULL
from kvtrace.agent.steps.prompts import Filled
from kvtrace.trace.facts import LoadErrorsFact
from kvtrace.trace.format import Role

_MOST_WAITING = 64
_MOST_BYTES = 512 << 20
"""Of all copies, about: those that were made together go together."""
_HUGE = 1e9
"""Of a number that is none."""


class _Pair(NamedTuple):
    """Block ``block``, at place ``place`` of its table, and the copy that its tokens had before."""

    place: int
    block: int
    copy: Sequence[Any]
    """A tensor a layer."""


class _Comparing(NamedTuple):
    fact: LoadErrorsFact
    errors: Any
    """Of shape (layers, blocks, largest and mean)."""
    event: Any


class StepBlocks(NamedTuple):
    """Blocks that are looked at when a step is over. ``ids``: of the tokens of prompts; ``loaded``: requests
    for which the connector loads -> leading tokens that the step did not compute; ``tensors``: the layers';
    ``recheck``: they were looked at in an earlier step."""

    step: int
    filled: Sequence[Filled]
    ids: Mapping[str, Sequence[int]]
    loaded: Mapping[str, int]
    tensors: Mapping[Any, Any]
    recheck: bool = False


class KeptCopies:
    """Copies of computed blocks of this process's worker.

    Args:
        most: blocks, of all KV cache groups.
        groups: the layers of each KV cache group; sizes: tokens in a block of each.
    """

    def __init__(self, most: int, groups: Sequence[Sequence[Any]], sizes: Sequence[int]) -> None:
        self._most, self._groups, self._sizes = most, groups, sizes
        self._copies: OrderedDict[tuple[int, bytes], Sequence[Any]] = OrderedDict()
        self._waiting: deque[_Comparing] = deque()

    def take(self, step: StepBlocks) -> None:
        """The current stream is behind the step's work."""
        self.settle()
        for one in step.filled:
            tokens = step.ids.get(one.request)
            if not tokens:
                continue
            size = self._sizes[one.group]
            digests = list(_digests(tokens, size, one, AGENT.config.salt))
            came = min(len(digests), one.came(step.loaded, size))
            self._part(step, one, digests, range(came), True)
            self._part(step, one, digests, range(came, len(digests)), False)

    def _part(
        self, step: StepBlocks, one: Filled, digests: Sequence[bytes], numbers: range, arrived: bool
    ) -> None:
        """Of blocks that were loaded (``arrived``), or computed."""
        pairs: list[_Pair] = []
        fresh: list[int] = []
        for number in numbers:
            block = one.blocks[number]
            copy = self._copies.get((one.group, digests[number]))
            if block == NULL:
                continue
            if copy is not None:
                pairs.append(_Pair(one.first + number, block, copy))
            elif not arrived:
                fresh.append(number)
        if pairs:
            self._compare(step, one, pairs, arrived)
        if fresh:
            self._keep(step, one, {number: digests[number] for number in fresh})

    def _keep(self, step: StepBlocks, one: Filled, fresh: Mapping[int, bytes]) -> None:
        layers = self._groups[one.group]
        of_block = sum(
            step.tensors[layer].nbytes // step.tensors[layer].shape[layer.dim] * layer.split
            for layer in layers
        )
        most = min(self._most, _MOST_BYTES // max(1, of_block))
        numbers = list(fresh)[:most]
        blocks = [one.blocks[number] for number in numbers]
        rows = [_rows(layer, step.tensors[layer], blocks) for layer in layers]
        for at, number in enumerate(numbers):
            self._copies[one.group, fresh[number]] = [of_layer[at] for of_layer in rows]
        while len(self._copies) > most:
            self._copies.popitem(last=False)

    def _compare(self, step: StepBlocks, one: Filled, pairs: Sequence[_Pair], arrived: bool) -> None:
        torch, layers = sys.modules["torch"], self._groups[one.group]
        blocks = [pair.block for pair in pairs]
        errors = torch.stack(
            [
                _errors(
                    _rows(layer, step.tensors[layer], blocks), torch.stack([pair.copy[at] for pair in pairs])
                )
                for at, layer in enumerate(layers)
            ]
        )
        fact = LoadErrorsFact(
            one.request, arrived,
            tuple(pair.place for pair in pairs), tuple(layer.name for layer in layers),
        )  # fmt: skip
        if errors.device.type == "cpu":
            _write(fact, errors)
            return
        self._waiting.append(_Comparing(fact, aside(errors), event_behind(errors.device)))
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()

    def settle(self) -> None:
        """Write what has come from the device."""
        while self._waiting and self._waiting[0].event.query():
            one = self._waiting.popleft()
            _write(one.fact, one.errors)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)


def _digests(tokens: Sequence[int], size: int, one: Filled, key: bytes) -> Iterator[bytes]:
    """Of all tokens up to the end of each of the blocks."""
    data = memoryview(array("q", tokens)).cast("B")
    hasher = hashlib.blake2b(data[: one.first * size * 8], key=key, digest_size=8)
    for place in range(one.first, one.first + len(one.blocks)):
        if (place + 1) * size > len(tokens):
            return
        hasher.update(data[place * size * 8 : (place + 1) * size * 8])
        yield hasher.digest()


def _rows(layer: Any, tensor: Any, blocks: Sequence[int]) -> Any:
    """A layer's KV of these blocks, one row a block."""
    torch = sys.modules["torch"]
    ids = torch.tensor([block * layer.split + at for block in blocks for at in range(layer.split)])
    if tensor.device.type != "cpu":
        ids = ids.pin_memory().to(tensor.device, non_blocking=True)
    return tensor.index_select(layer.dim, ids).movedim(layer.dim, 0).reshape(len(blocks), -1)


def _errors(now: Any, before: Any) -> Any:
    """(blocks, 2): the largest and the mean difference, as shares."""
    torch = sys.modules["torch"]
    if not now.is_floating_point() and now.element_size() == 1:  # vLLM keeps fp8 as bytes
        now, before = now.view(torch.float8_e4m3fn), before.view(torch.float8_e4m3fn)
    now, before = now.to(torch.float32), before.to(torch.float32)
    usual = before.pow(2).mean(1, keepdim=True).sqrt().clamp_min(1e-12)
    apart = (now - before).abs()
    largest = (apart / before.abs().maximum(usual)).amax(1)
    mean = apart.pow(2).mean(1).sqrt() / usual.squeeze(1)
    return torch.stack((largest, mean), 1).nan_to_num(_HUGE, _HUGE, _HUGE).clamp_max(_HUGE)


def _write(fact: LoadErrorsFact, errors: Any) -> None:
    largest, mean = errors.amax(1), errors.mean(1)
    of_blocks = errors[:, :, 0].amax(0)
    AGENT.fact(
        replace(
            fact,
            largest=tuple(_short(value) for value in largest[:, 0].tolist()),
            mean=tuple(_short(value) for value in mean[:, 1].tolist()),
            differing=int((of_blocks > 0).sum()),
        ),
        Role.WORKER,
        flush=False,
    )  # fmt: skip


def _short(value: float) -> float:
    return float(f"{value:.3g}")
