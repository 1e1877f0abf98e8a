"""Fingerprints of KV: whether a load gave back what was computed. PRINTS records.

At the end of a watched step each block that the step filled with prompt tokens is hashed, over all KV
layers of its group: the bytes as whole numbers, each times a secret odd factor for its place in the block,
summed with wrap-around; the layers' sums, each times a factor of the layer's, summed again; 63 bits of that
are kept. It is one number for thousands, and none of them can be got back from it. It is computed where the
KV lies. On a device that is put behind the step's own work, the numbers are copied aside and read in a later
step: nothing is waited for, and nothing is done while a CUDA graph is captured.

Where the connector may load at all, a block gets a second number, a sketch (SKETCHES): of KV that is nearly
the same it is nearly the same. It tells a store of fewer bits from KV that has nothing in common with what
was stored.

Of each layer's own sum 21 bits are kept as well (LAYERS), of loaded blocks and of as many computed ones as
there is room for, where the connector may load at all: they say which layers differ, and where a layer holds
another one's KV.

Loaded blocks are hashed again later (``rechecks.py``): REPRINTS records.

It costs several times a copy of these blocks, and has an account of its own beside the watch's. What it does
not allow is left out, and what was not printed is compared with nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

from kvtrace.agent.budget import BudgetAccount
from kvtrace.agent.facts import describe
from kvtrace.agent.kv.caches import CACHES
from kvtrace.agent.kv.host import aside, event_behind, on_host
from kvtrace.agent.kv.tensors import OWN, tensors
from kvtrace.agent.prints.kept import KeptCopies, StepBlocks
from kvtrace.agent.prints.print_records import write_layers, write_prints
from kvtrace.agent.prints.rechecks import Rechecks
from kvtrace.agent.prints.sketches import PARTS, Signs, parts_of, secret, sketches_of
from kvtrace.agent.state import AGENT, processor_clock
from kvtrace.agent.steps import graphs
from kvtrace.agent.steps.prompts import LOADED_ATTRIBUTE, Filled, PromptBlocks
from kvtrace.trace.format import Flag, Kind

_DEVICE_RATE = 0.01
"""ns for a byte on a device, on the safe side: the host does not see how long it takes there."""
_GATHERED = {"cpu": 1 << 18, "cuda": 4 << 20}
"""Bytes of KV that are hashed at once: what a core's cache holds, and what a device has room for. It takes
about four times that while it lasts."""
_LARGEST_BLOCK = 8 << 20
_SPARE = 4
"""A second look at blocks is taken where the account holds as much as so many of it: the first look at
others goes before."""
_MOST_WAITING = 64
MOST_NUMBERS = 1 << 20
"""Of single layers that a worker writes, of computed blocks and of loaded ones: 8 MB of its trace, or more
where a group has few layers."""


class _HashedLayer(NamedTuple):
    """``dim``: which dimension of its tensor counts blocks; ``split``: how many of these make a block of the
    request's table; ``nbytes``: of such a block."""

    name: str
    dim: int
    split: int
    nbytes: int
    factor: int


def _nobody() -> None:
    """No worker."""


@dataclass
class _OnItsWay:
    """Fingerprints on their way from a device."""

    planned: StepBlocks
    sums: list[Any]
    event: Any


class Prints:
    """Of this process's worker."""

    def __init__(self) -> None:
        self._worker: Callable[[], Any] = _nobody
        """Says vLLM's worker, as long as vLLM has it."""
        self.account = BudgetAccount("sampled", 0.0)
        self._rate = 0.0
        """ns for a byte; 0.0: nothing was hashed yet."""
        self._capturing: Any = None
        self.idle = True
        """Whether a step that admits nobody has nothing to hash."""
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of a KV cache."""
        self._groups: list[list[_HashedLayer]] = []
        self._sizes: list[int] = []
        self._prompts = PromptBlocks()
        self._planned: StepBlocks | None = None
        """What is hashed, the tensors not yet asked for."""
        self._rechecks = Rechecks()
        self._waiting: deque[_OnItsWay] = deque()
        self._weights: dict[tuple[Any, int], Any] = {}
        self._signs: Signs | None = None
        """None where blocks are not sketched."""
        self._factors: dict[tuple[Any, int], Any] = {}
        self._own: list[list[int]] = []
        """Of each group its layers (numbers) that lie on no other one's bytes; none where the connector
        never loads."""
        self._room = [MOST_NUMBERS, MOST_NUMBERS]
        """Numbers of single layers that may still be written: of computed blocks, of loaded ones."""
        self._kept: KeptCopies | None = None

    def open(self, wrapper: Any, kv_cache_config: Any) -> None:
        """The worker's KV cache is made, and CACHES knows it."""
        self._worker = ref(wrapper)
        self._forget()
        config = AGENT.config
        parallel = describe.get(wrapper, "vllm_config.parallel_config")
        apart = [getattr(parallel, name, 1) for name in _SPREAD]
        if any(isinstance(size, int) and size > 1 for size in apart):
            return  # a block's tokens are spread over ranks
        self.account = BudgetAccount(config.watching, config.share, round(config.credit * 1e9))
        self._capturing = graphs.capturing_probe()
        for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
            spec = getattr(group, "kv_cache_spec", None)
            size = getattr(spec, "block_size", 0)
            layers = [_layer(str(name), config.salt) for name in getattr(group, "layer_names", ())]
            known = [layer for layer in layers if layer is not None]
            whole = len(known) == len(layers) > 0 and type(spec).__name__ != "CrossAttentionSpec"
            self._groups.append(known if whole else [])
            self._sizes.append(size if whole and isinstance(size, int) else 0)
        tensors_of = self._tensors() or {}
        if not tensors_of:
            self._sizes = []
        elif config.copies:
            self._kept = KeptCopies(config.copies, self._groups, self._sizes)
        if describe.get(wrapper, "vllm_config.kv_transfer_config.kv_role") != "kv_producer":
            self._own = [_lying_apart(layers) for layers in self._groups]
            # What bytes stand for is not known.
            if all(tensor.is_floating_point() for tensor in tensors_of.values()):
                self._signs = Signs()
        for layer, tensor in tensors_of.items():  # now: making them waits for the device
            self._weights_of(tensor, layer.nbytes)
            if self._signs is not None:
                self._signs.of(tensor, layer.nbytes)
            for group in (group for group, layers in enumerate(self._groups) if layer in layers):
                self._factors_of(group, tensor.device)

    # --- steps ----------------------------------------------------------------------------

    def plan(self, output: Any) -> None:
        """``execute_model`` is over: note which blocks it filled. They are hashed by :meth:`take`, when the
        step is over: a draft model still writes KV in between."""
        self._planned, self.idle = None, False
        if not any(self._sizes):
            return
        try:
            if not (self._prompts.any or output.scheduled_new_reqs):
                return
            worker, recorder = AGENT.worker, AGENT.recorder
            live = recorder is not None and recorder.alive and not recorder.full
            wanted = live and bool(worker.step) and bool(worker.watched & Flag.STORE)
            filled = self._prompts.scheduled(output, self._sizes, wanted)
        except Exception:  # the step's own records must not miss it
            self._sizes = []
            AGENT.failed("fingerprints")
            return
        if filled:
            filled.sort(key=_GROUP)
            self._planned = StepBlocks(worker.step, filled, self._prompts.ids, _loaded(output), {})

    def drop(self) -> None:
        """The end of the step was not seen: its blocks may have been given out again."""
        self._planned = None

    def begins(self, output: Any, step: int) -> None:
        """A step begins."""
        if self._rechecks.waiting and step:
            more = any(output.scheduled_cached_reqs.new_block_ids)  # blocks to requests that run
            if self._rechecks.unchanged or output.scheduled_new_reqs or more:
                self._recheck(lambda: self._rechecks.leaving(output, self._sizes))
            self._rechecks.step = step

    def ends(self) -> None:
        """The connector was shut down. What comes from a device later than this is lost."""
        for one in self._rechecks.remaining():  # as far as the account holds
            self._recheck(partial(list, (one,)))
        if self._waiting:
            self._safely(self._settle)

    def take(self) -> None:
        """Hash what was planned; write what has come from the device since."""
        planned, self._planned = self._planned, None
        if planned is not None or self._waiting or (self._kept is not None and self._kept.waiting):
            self._safely(lambda: self._of_step(planned))
        if any(one.due <= self._rechecks.step for one in self._rechecks.unchanged):
            self._recheck(self._rechecks.due)
        copies = self._kept is not None and self._kept.waiting
        self.idle = not (self._prompts.any or self._waiting or self._rechecks.unchanged or copies)

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
            self._failed()
        finally:
            OWN.busy = before

    def _failed(self) -> None:
        self._sizes = []
        self._waiting.clear()
        self._rechecks = Rechecks()
        AGENT.failed("fingerprints")

    def _of_step(self, planned: StepBlocks | None) -> None:
        self._settle()
        if planned is not None:
            self._take(planned)

    def _recheck(self, which: Callable[[], list[Filled]]) -> None:
        try:
            filled = sorted(which(), key=_GROUP)
        except Exception:
            self._failed()
            return
        if filled:  # in few steps: what stands around a look costs as much as ten of the agent's other parts
            again = StepBlocks(self._rechecks.step, filled, {}, {}, {}, recheck=True)
            self._safely(lambda: self._take(again))

    def _take(self, planned: StepBlocks) -> None:
        found = self._tensors()
        if found is None:
            return
        planned = planned._replace(tensors=found)
        began, torch, filled = processor_clock(), sys.modules["torch"], planned.filled
        of_block = [sum(layer.nbytes for layer in layers) for layers in self._groups]
        nbytes = sum(len(one.blocks) * of_block[one.group] for one in filled)
        if not self.account.holds(nbytes * self._rate * (_SPARE if planned.recheck else 1)):
            return
        sums = []
        for group, layers in enumerate(self._groups):
            blocks = [block for one in filled if one.group == group for block in one.blocks]
            if blocks:
                tensors_of = [(layer, planned.tensors[layer]) for layer in layers]
                of_layers, sketches = self._sums(tensors_of, blocks, None if planned.recheck else self._signs)
                total = (of_layers * self._factors_of(group, of_layers.device)).sum(1)
                sums.append(torch.cat((of_layers, sketches[:, None], total[:, None]), dim=1))
        if self._kept is not None and not planned.recheck:
            self._kept.take(planned)
        device = sums[0].device
        if on_host(sums[0]):
            self._came(planned, sums)
        else:
            copies = [aside(of_group) for of_group in sums]
            event = event_behind(device)
            self._waiting.append(_OnItsWay(planned._replace(tensors={}, ids={}), copies, event))
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
        cost = processor_clock() - began
        if device.type != "cpu":
            cost = max(cost, round(nbytes * _DEVICE_RATE))
        self._rate = cost / nbytes if not self._rate else self._rate + (cost / nbytes - self._rate) / 4
        self.account.spent(cost)

    def _settle(self) -> None:
        if self._kept is not None:
            self._kept.settle()
        while self._waiting and self._waiting[0].event.query():
            one = self._waiting.popleft()
            self._came(one.planned, one.sums)

    def _came(self, planned: StepBlocks, sums: Sequence[Any]) -> None:
        """``sums``: of each group in ``planned`` int64 of shape (blocks, layers, sketch and the total)."""
        step, filled = planned.step, planned.filled
        totals = [total for of_group in sums for total in of_group[:, -1].tolist()]
        if planned.recheck:
            write_prints(step, filled, totals, Kind.REPRINTS)
            return
        write_prints(step, filled, totals)
        if self._signs is not None:
            sketches = [sketch for of_group in sums for sketch in of_group[:, -2].tolist()]
            write_prints(step, filled, sketches, Kind.SKETCHES)
        self._write_layers(planned, sums)
        values = [of_block for of_group in sums for of_block in of_group[:, :-2].tolist()]
        self._rechecks.printed(step, filled, values, planned.loaded, self._sizes)
        self._rechecks.step = max(self._rechecks.step, step)

    def _write_layers(self, planned: StepBlocks, sums: Sequence[Any]) -> None:
        """Of single layers, as far as there is room."""
        of_group = dict(zip(sorted({one.group for one in planned.filled}), sums, strict=True))
        at: dict[int, int] = {}
        for one in planned.filled if any(self._own) else ():
            first = at.get(one.group, 0)
            at[one.group] = first + len(one.blocks)
            own = self._own[one.group]
            loaded = one.came(planned.loaded, self._sizes[one.group])
            for kind, low, high in ((1, 0, loaded), (0, loaded, len(one.blocks))):
                numbers = (high - low) * len(own)
                if 0 < numbers <= self._room[kind]:
                    self._room[kind] -= numbers
                    part = Filled(one.request, one.group, one.first + low, one.blocks[low:high])
                    layers = [self._groups[one.group][number].name for number in own]
                    numbers_of = of_group[one.group][first + low : first + high, own]
                    write_layers(planned.step, part, layers, numbers_of)

    def _tensors(self) -> dict[_HashedLayer, Any] | None:
        """The layers' KV tensors; None where one is no longer what it was, or lies on no known device."""
        context = describe.get(self._worker(), "vllm_config.compilation_config.static_forward_context", {})
        found: dict[_HashedLayer, Any] = {}
        for layer in (layer for group in self._groups for layer in group):
            held = tensors(getattr(context.get(layer.name), "kv_cache", None))
            known = CACHES.layers.get(layer.name)
            if len(held) != 1 or known is None or not _alike(tuple(held[0].shape), known.shape, layer.dim):
                return None
            if held[0].device.type not in _GATHERED:
                return None
            found[layer] = held[0]
        return found

    # --- the hash -------------------------------------------------------------------------

    def _sums(
        self, layers: Sequence[tuple[_HashedLayer, Any]], blocks: list[int], signs: Signs | None
    ) -> tuple[Any, Any]:
        """int64 of shapes (blocks, layers) and (blocks,): the hashes, and sketches, or zeroes."""
        torch, device = sys.modules["torch"], layers[0][1].device
        ids = torch.tensor(blocks, dtype=torch.int64)
        if device.type != "cpu":
            ids = ids.pin_memory().to(device, non_blocking=True)
        sums = torch.zeros((len(blocks), len(layers)), dtype=torch.int64, device=device)
        parts = torch.zeros((len(blocks), PARTS), device=device)
        for column, (layer, tensor) in enumerate(layers):
            weights = self._weights_of(tensor, layer.nbytes)
            whole = tensor.view(getattr(torch, _INTEGERS[tensor.element_size()]))
            at_once = max(1, _GATHERED[device.type] // layer.nbytes)
            for at in range(0, len(blocks), at_once):
                some = ids[at : at + at_once]
                count = len(some)
                if layer.split > 1:
                    own = torch.arange(layer.split, device=device)
                    some = (some[:, None] * layer.split + own).reshape(-1)
                words = whole.index_select(layer.dim, some).movedim(layer.dim, 0).reshape(count, -1)
                if signs is not None:
                    own = signs.of(tensor, layer.nbytes)
                    parts[at : at + count] += parts_of(words, tensor.dtype, own, column)
                words = words.view(getattr(torch, _INTEGERS[_word(layer.nbytes)]))
                sums[at : at + count, column] = (words * weights).sum(1)
        return sums, sketches_of(parts, len(layers)) if signs else sums.new_zeros(len(blocks))

    def _factors_of(self, group: int, device: Any) -> Any:
        """Those of the group's layers, int64 of shape (layers,)."""
        known = self._factors.get((device, group))
        if known is None:
            factors = [layer.factor for layer in self._groups[group]]
            known = sys.modules["torch"].tensor(factors, dtype=sys.modules["torch"].int64, device=device)
            self._factors[device, group] = known
        return known

    def _weights_of(self, tensor: Any, nbytes: int) -> Any:
        """Secret odd factors for the words of a block, the same in every process of the run."""
        key = tensor.device, nbytes // _word(nbytes)
        known = self._weights.get(key)
        if known is None:
            torch = sys.modules["torch"]
            generator = secret(b"fingerprints")
            made = torch.randint(-(1 << 63), (1 << 63) - 1, (key[1],), generator=generator, device="cpu")
            known = self._weights[key] = (made | 1).to(tensor.device)
        return known


PRINTS = Prints()

_GROUP = attrgetter("group")
_SPREAD = ("decode_context_parallel_size", "prefill_context_parallel_size")
_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
"""Bytes of a number -> torch's type."""


def _word(nbytes: int) -> int:
    """Bytes that are taken as one number."""
    return 4 if nbytes % 4 == 0 else 2 if nbytes % 2 == 0 else 1


def _layer(name: str, salt: bytes) -> _HashedLayer | None:
    """None where it is not known how blocks lie in its tensor."""
    known = CACHES.layers.get(name)
    at = CACHES.block_dim(known) if known is not None else None
    if known is None or at is None:
        return None
    dim, split = at
    nbytes = known.nbytes // known.shape[dim] * split
    digest = hashlib.blake2b(name.encode("utf-8", "replace"), key=salt, digest_size=8).digest()
    factor = int.from_bytes(digest, "little", signed=True) | 1
    return _HashedLayer(name, dim, split, nbytes, factor) if 0 < nbytes <= _LARGEST_BLOCK else None


def _lying_apart(layers: Sequence[_HashedLayer]) -> list[int]:
    """Of layers on the same bytes only the first."""
    return [
        at
        for at, layer in enumerate(layers)
        if not any(CACHES.on_the_same(layer.name, other.name) for other in layers[:at])
    ]


def _alike(shape: tuple[int, ...], known: tuple[int, ...], dim: int) -> bool:
    """Whether two views have the same blocks. MLA's layers keep theirs without the dimension of its one head,
    with which it was registered (vLLM 0.32.0)."""
    if shape[: dim + 1] != known[: dim + 1]:
        return False
    return [size for size in shape if size > 1] == [size for size in known if size > 1]


def _loaded(output: Any) -> dict[str, int]:
    """Requests of a step for which the connector loads -> leading tokens that the step does not compute."""
    loaded = getattr(output, LOADED_ATTRIBUTE, ())
    return {
        new.req_id: new.num_computed_tokens
        for new in (output.scheduled_new_reqs if loaded else ())
        if new.req_id in loaded
    }
