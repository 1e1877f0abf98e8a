"""Fingerprints of KV: whether a load gave back what was computed. PRINTS records.

At the end of a watched step each block that the step filled with prompt tokens is hashed, over all KV
layers of its group: the bytes as whole numbers, each times a secret odd factor for its place in the block,
summed with wrap-around; the layers' sums, each times a factor of the layer's, summed again; 63 bits of that
are kept. It is one number for thousands, and none of them can be got back from it. It is computed where the
KV lies. On a device that is put behind the step's own work, the numbers are copied aside and read in a later
step: nothing is waited for, and nothing is done while a CUDA graph is captured.

Loaded blocks that hold what they held before are hashed again later (``again.py``): REPRINTS records. Where
some of their layers do, and others not, STAYED records say which.

It costs several times a copy of these blocks, and has an account of its own beside the watch's. What it does
not allow is left out, and what was not printed is compared with nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtrace.agent import describe, graphs
from kvtrace.agent.budget import Sampler
from kvtrace.agent.state import AGENT, clock
from kvtrace.agent.watch.again import Again
from kvtrace.agent.watch.caches import CACHES
from kvtrace.agent.watch.prompts import LOADED_ATTRIBUTE, Filled, Prompts
from kvtrace.agent.watch.tensors import OWN, tensors
from kvtrace.trace.format import Flag, Kind, Role, pack_head
from kvtrace.trace.rows import BlockPrints, LayerStayed

CREDIT = 2_000_000_000
"""ns of host time that fingerprints may take before they have to keep to the budget."""
_DEVICE_RATE = 0.01
"""ns for a byte on a device, on the safe side: the host does not see how long it takes there."""
_GATHERED = {"cpu": 1 << 18, "cuda": 4 << 20}
"""Bytes of KV that are hashed at once: what a core's cache holds, and what a device has room for. It takes
about four times that while it lasts."""
_LARGEST_BLOCK = 8 << 20
_MOST_WAITING = 64
_MASK = (1 << 64) - 1
_NULL = 0
_A_RECORD = 4


class _Layer(NamedTuple):
    """``dim``: which dimension of its tensor counts blocks; ``split``: how many of these make a block of the
    request's table; ``nbytes``: of such a block."""

    name: str
    dim: int
    split: int
    nbytes: int
    factor: int


class _Planned(NamedTuple):
    """What is hashed at the end of a step. ``tensors``: the layers'. ``loaded``: requests for which the
    connector loads -> leading tokens that the step did not compute; None: it is hashed once more."""

    step: int
    filled: list[Filled]
    tensors: Mapping[_Layer, Any]
    loaded: Mapping[str, int] | None


@dataclass
class _Waiting:
    """Fingerprints on their way from a device."""

    planned: _Planned
    sums: Any
    event: Any


class Prints:
    """Of this process's worker."""

    def __init__(self) -> None:
        self._groups: list[list[_Layer]] = []
        self._sizes: list[int] = []
        self._prompts = Prompts()
        self._planned: tuple[int, Any, list[Filled], dict[str, int]] | None = None
        self._again = Again()
        self._waiting: deque[_Waiting] = deque()
        self._weights: dict[tuple[Any, int], Any] = {}
        self._account = Sampler("sampled", 0.0)
        self._rate = 0.0
        """ns for a byte; 0.0: nothing was hashed yet."""
        self._capturing: Any = None

    def open(self, wrapper: Any, kv_cache_config: Any) -> None:
        """The worker's KV cache is made, and CACHES knows it."""
        self._groups, self._sizes, self._prompts, self._planned = [], [], Prompts(), None
        self._waiting.clear()
        self._again = Again()
        self._weights.clear()
        config = AGENT.config
        parallel = describe.get(wrapper, "vllm_config.parallel_config")
        apart = [getattr(parallel, name, 1) for name in _SPREAD]
        if config is None or any(isinstance(size, int) and size > 1 for size in apart):
            return  # a block's tokens are spread over ranks
        self._account = Sampler("sampled", config.budget, CREDIT)
        self._capturing = graphs.capturing_probe()
        for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
            spec = getattr(group, "kv_cache_spec", None)
            size = getattr(spec, "block_size", 0)
            layers = [_layer(str(name), config.salt) for name in getattr(group, "layer_names", ())]
            known = [layer for layer in layers if layer is not None]
            whole = len(known) == len(layers) > 0 and type(spec).__name__ != "CrossAttentionSpec"
            self._groups.append(known if whole else [])
            self._sizes.append(size if whole and isinstance(size, int) else 0)
        tensors_of = _tensors(wrapper, self._groups)
        if tensors_of is None:
            self._sizes = []
        for layer, tensor in (tensors_of or {}).items():
            self._weights_of(tensor, layer.nbytes)  # now: making them waits for the device

    # --- steps ----------------------------------------------------------------------------

    def plan(self, wrapper: Any, output: Any) -> None:
        """``execute_model`` is over: note which blocks it filled. They are hashed by :meth:`take`, when the
        step is over: a draft model still writes KV in between."""
        self._planned = None
        if not any(self._sizes):
            return
        worker, recorder = AGENT.worker, AGENT.recorder
        live = recorder is not None and recorder.alive and not recorder.full
        wanted = live and bool(worker.step) and bool(worker.watched & Flag.STORE)
        try:
            filled = self._prompts.scheduled(output, self._sizes, wanted)
        except Exception:  # the step's own records must not miss it
            self._sizes = []
            AGENT.failed("fingerprints")
            return
        if filled:
            self._planned = worker.step, wrapper, filled, _loaded(output)

    def drop(self) -> None:
        """The end of the step was not seen: its blocks may have been given out again."""
        self._planned = None

    def begins(self, output: Any, step: int) -> None:
        """A step begins."""
        if self._again.waiting and step:
            self._look_again(lambda: self._again.leaving(output))
            self._again.step = step

    def ends(self) -> None:
        """The connector was shut down."""
        if self._again.waiting:
            self._look_again(self._again.rest, last=True)

    def take(self) -> None:
        """Hash what was planned; write what has come from the device since."""
        planned, self._planned = self._planned, None
        if planned is not None or self._waiting:
            self._safely(lambda: self._of_step(planned))
        if self._again.waiting and any(one.due <= self._again.step for one in self._again.waiting):
            self._look_again(self._again.due)

    def passed(self, busy: int) -> None:
        """A step took ``busy`` ns of host time."""
        self._account.passed(busy)

    def _safely(self, work: Callable[[], None]) -> None:
        """Never raises."""
        before, OWN.busy = OWN.busy, True
        try:
            if self._capturing is not None and self._capturing():
                return
            torch = sys.modules["torch"]
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                work()
        except Exception:
            self._sizes = []
            self._waiting.clear()
            self._again = Again()
            AGENT.failed("fingerprints")
        finally:
            OWN.busy = before

    def _of_step(self, planned: tuple[int, Any, list[Filled], dict[str, int]] | None) -> None:
        self._settle()
        if planned is None:
            return
        step, wrapper, filled, loaded = planned
        found = _tensors(wrapper, self._groups)
        if found is not None:
            self._take(_Planned(step, sorted(filled, key=_group), found, loaded))

    def _look_again(self, which: Callable[[], list[Filled]], last: bool = False) -> None:
        """``last``: nothing will ask for what is still on its way from a device then."""

        def look() -> None:
            filled = sorted(which(), key=_group)
            found = {layer: CACHES.tensor(layer.name) for layers in self._groups for layer in layers}
            if not filled or any(tensor is None for tensor in found.values()):
                return
            if not last or all(tensor.device.type == "cpu" for tensor in found.values()):
                self._take(_Planned(self._again.step, filled, found, None))

        self._safely(look)

    def _take(self, planned: _Planned) -> None:
        began, torch, filled = clock(), sys.modules["torch"], planned.filled
        of_block = [sum(layer.nbytes for layer in layers) for layers in self._groups]
        nbytes = sum(len(one.blocks) * of_block[one.group] for one in filled)
        if not self._account.holds(nbytes * self._rate):
            return
        sums = []
        for group, layers in enumerate(self._groups):
            blocks = [block for one in filled if one.group == group for block in one.blocks]
            if blocks:
                sums.append(self._sums(torch, [(layer, planned.tensors[layer]) for layer in layers], blocks))
        device = sums[0].device
        if device.type == "cpu":
            self._came(planned, [block for of_group in sums for block in of_group.tolist()])
        else:
            aside = [of_group.to("cpu", non_blocking=True) for of_group in sums]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._waiting.append(_Waiting(planned._replace(tensors={}), aside, event))
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
        cost = clock() - began
        if device.type != "cpu":
            cost = max(cost, round(nbytes * _DEVICE_RATE))
        self._rate = cost / nbytes if not self._rate else self._rate + (cost / nbytes - self._rate) / 4
        self._account.spent(cost)

    def _settle(self) -> None:
        while self._waiting and self._waiting[0].event.query():
            one = self._waiting.popleft()
            self._came(one.planned, [block for of_group in one.sums for block in of_group.tolist()])

    def _came(self, planned: _Planned, sums: Sequence[Sequence[int]]) -> None:
        """``sums``: of each block, one a layer."""
        step, filled = planned.step, planned.filled
        totals = [sum(of_block) for of_block in sums]
        if planned.loaded is None:
            _write(step, filled, totals, Kind.REPRINTS)
            return
        _write(step, filled, totals)
        for one in self._again.printed(step, filled, sums, planned.loaded, self._sizes):
            head = pack_head(Kind.STAYED, Role.WORKER, detail=one.group)
            layer = AGENT.id(self._groups[one.group][one.layer].name)
            with AGENT.passing_request(one.request) as ident:
                AGENT.add(LayerStayed(head, ident, step, layer, one.first, one.blocks, int(one.zeroes)))
        self._again.step = max(self._again.step, step)

    # --- the hash -------------------------------------------------------------------------

    def _sums(self, torch: Any, layers: Sequence[tuple[_Layer, Any]], blocks: list[int]) -> Any:
        """int64 of shape (blocks, layers)."""
        device = layers[0][1].device
        ids = torch.tensor(blocks, dtype=torch.int64)
        if device.type != "cpu":
            ids = ids.pin_memory().to(device, non_blocking=True)
        sums = torch.zeros((len(blocks), len(layers)), dtype=torch.int64, device=device)
        for column, (layer, tensor) in enumerate(layers):
            weights = self._weights_of(tensor, layer.nbytes)
            whole = tensor.view(_INTEGERS[tensor.element_size()](torch))
            at_once = max(1, _GATHERED[device.type] // layer.nbytes)
            for at in range(0, len(blocks), at_once):
                some = ids[at : at + at_once]
                count = len(some)
                if layer.split > 1:
                    own = torch.arange(layer.split, device=device)
                    some = (some[:, None] * layer.split + own).reshape(-1)
                words = whole.index_select(layer.dim, some).movedim(layer.dim, 0).reshape(count, -1)
                words = words.view(_INTEGERS[_word(layer.nbytes)](torch))
                sums[at : at + count, column] = (words * weights).sum(1) * layer.factor
        return sums

    def _weights_of(self, tensor: Any, nbytes: int) -> Any:
        """Secret odd factors for the words of a block, the same in every process of the run."""
        key = tensor.device, nbytes // _word(nbytes)
        known = self._weights.get(key)
        if known is None and AGENT.config is not None:
            torch = sys.modules["torch"]
            seed = hashlib.blake2b(b"fingerprints", key=AGENT.config.salt, digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
            made = torch.randint(-(1 << 63), (1 << 63) - 1, (key[1],), generator=generator, device="cpu")
            known = self._weights[key] = (made | 1).to(tensor.device)
        return known


PRINTS = Prints()

_SPREAD = ("decode_context_parallel_size", "prefill_context_parallel_size")
_INTEGERS: dict[int, Any] = {
    1: lambda torch: torch.int8,
    2: lambda torch: torch.int16,
    4: lambda torch: torch.int32,
    8: lambda torch: torch.int64,
}


def _word(nbytes: int) -> int:
    """Bytes that are taken as one number."""
    return 4 if nbytes % 4 == 0 else 2 if nbytes % 2 == 0 else 1


def _layer(name: str, salt: bytes) -> _Layer | None:
    """None where it is not known how blocks lie in its tensor."""
    known = CACHES.layers.get(name)
    at = CACHES.block_dim(known) if known is not None else None
    if known is None or at is None:
        return None
    dim, split = at
    nbytes = known.nbytes // known.shape[dim] * split
    digest = hashlib.blake2b(name.encode("utf-8", "replace"), key=salt, digest_size=8).digest()
    factor = int.from_bytes(digest, "little", signed=True) | 1
    return _Layer(name, dim, split, nbytes, factor) if 0 < nbytes <= _LARGEST_BLOCK else None


def _tensors(wrapper: Any, layers: Sequence[Sequence[_Layer]]) -> dict[_Layer, Any] | None:
    """The layers' KV tensors; None where one is no longer what it was, or lies on no known device."""
    context = describe.get(wrapper, "vllm_config.compilation_config.static_forward_context", {})
    found: dict[_Layer, Any] = {}
    for layer in (layer for group in layers for layer in group):
        held = tensors(getattr(context.get(layer.name), "kv_cache", None))
        known = CACHES.layers.get(layer.name)
        if len(held) != 1 or known is None or tuple(held[0].shape) != known.shape:
            return None
        if held[0].device.type not in _GATHERED:
            return None
        found[layer] = held[0]
    return found


def _group(filled: Filled) -> int:
    return filled.group


def _loaded(output: Any) -> dict[str, int]:
    """Requests of a step for which the connector loads -> leading tokens that the step does not compute."""
    loaded = getattr(output, LOADED_ATTRIBUTE, ())
    return {
        new.req_id: new.num_computed_tokens
        for new in (output.scheduled_new_reqs if loaded else ())
        if new.req_id in loaded
    }


def _write(step: int, filled: Sequence[Filled], sums: Sequence[int], kind: Kind = Kind.PRINTS) -> None:
    at = 0
    for one in filled:
        own = sums[at : at + len(one.blocks)]
        at += len(one.blocks)
        # 0 means "none": the null block is nobody's.
        prints = [
            0 if block == _NULL else (value & _MASK) >> 1 or 1
            for block, value in zip(one.blocks, own, strict=True)
        ]
        head = pack_head(kind, Role.WORKER, detail=one.group)
        with AGENT.passing_request(one.request) as ident:
            for place in range(0, len(prints), _A_RECORD):
                four = (*prints[place : place + _A_RECORD], 0, 0, 0)[:_A_RECORD]
                AGENT.add(BlockPrints(head, ident, step, one.first + place, *four))
