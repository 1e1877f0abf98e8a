"""The known native entry points: functions that copy KV by address, past torch's dispatcher.

A row each, by name, with the version whose source says which argument names what. A call whose memory is
known is a read of, or a write into, the KV caches like any tensor operation; an entry point without a row
stays unknown (EFFECT -1), and so does a call whose arguments are not what the row says: never nothing.

- *Functions* and methods are put into a wrapper when their module is imported. It costs one look where this
  thread is not watched, hands all through untouched, and counts after the call came back without an error.
- *Operations* of ``torch.ops`` are seen by the dispatch mode of ``operations.py`` (``OPERATIONS`` here).

Both sides of a copy are looked up: what lies in no KV tensor (the pinned buffer, the other machine) is
nobody's slots. What began without an error counts: of an asynchronous transfer (NIXL, Mooncake's ``async``)
a failure that its status function reports later is not seen here.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

from kvtrace.agent import limits
from kvtrace.agent.kv.memory import Copy, NotKnown, Numbered, Ranges, numbers
from kvtrace.agent.kv.tensors import OWN, is_tensor
from kvtrace.agent.state import AGENT
from kvtrace.agent.watch import modes, nixl
from kvtrace.agent.wrap.imports import when_imported
from kvtrace.agent.wrap.once import wrap_once
from kvtrace.trace.facts import Limit

Named = Mapping[str, Any]
"""The arguments of a call by the names of its row; those that were left to their defaults are missing."""


@dataclass(frozen=True)
class NativeCopy:
    """One entry point.

    Attributes:
        parameters: in the order of the source, without ``self``, as far as they are needed.
        copies: from arguments and result to what was read and written.
        read_in: product and version whose source the row was read in.
        names: what names the memory, and the direction; for the page.
        always: it copies nothing, and later calls refer to it: ``copies`` notes each, watched or not.
        also: modules under whose name the same is found.
    """

    module: str
    attr: str
    parameters: tuple[str, ...]
    copies: Callable[[Named, Any], Iterable[Copy]]
    read_in: str
    names: str
    always: bool = False
    also: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.module}.{self.attr}"


# --- addresses ------------------------------------------------------------------------------------------


def _both(sources: Ranges, targets: Ranges) -> Iterable[Copy]:
    return (False, sources), (True, targets)


def _swap_blocks(named: Named, result: Any) -> Iterable[Copy]:
    source, target = named["src"], named["dst"]
    if not (is_tensor(source) and is_tensor(target)):
        raise NotKnown
    pairs = numbers(named["block_mapping"]).reshape(-1, 2)
    given = named.get("block_size_in_bytes")  # older versions: the stride of the source
    size = source.stride(0) * source.element_size() if given is None else given
    sizes = numbers(size).repeat(len(pairs))
    return _both(
        Ranges(source.data_ptr() + pairs[:, 0] * size, sizes),
        Ranges(target.data_ptr() + pairs[:, 1] * size, sizes),
    )


def _swap_batch(sources: str, targets: str) -> Callable[[Named, Any], Iterable[Copy]]:
    def copies(named: Named, result: Any) -> Iterable[Copy]:
        sizes = numbers(named["sizes"])
        return _both(Ranges(numbers(named[sources]), sizes), Ranges(numbers(named[targets]), sizes))

    return copies


def _address(value: Any) -> Any:
    """Of an integer, of what converts to one (the handles of CUDA's bindings), or of a ctypes object."""
    if type(value).__module__.startswith(("ctypes", "_ctypes", "builtins")) and not isinstance(value, int):
        try:
            value = ctypes.cast(value, ctypes.c_void_p).value or 0
        except ctypes.ArgumentError:
            raise NotKnown from None
    return numbers(int(value))


def _one_copy(size: str) -> Callable[[Named, Any], Iterable[Copy]]:
    """From src to dst. CUDA's bindings return a tuple: first a status, other than 0 for a failure."""

    def copies(named: Named, result: Any) -> Iterable[Copy]:
        if isinstance(result, tuple) and int(result[0]) != 0:
            return ()
        length = numbers(int(named[size]))
        return _both(Ranges(_address(named["src"]), length), Ranges(_address(named["dst"]), length))

    return copies


def _simple_offload(named: Named, result: Any) -> Iterable[Copy]:
    params = named["params"]
    per_block = numbers(params.bpb)
    sides = []
    for bases, ids in ((params.src_bases, "src_block_ids"), (params.dst_bases, "dst_block_ids")):
        blocks = numbers(named[ids])
        firsts = numbers(bases)[:, None] + blocks[None, :] * per_block[:, None]
        sides.append(Ranges(firsts.ravel(), per_block.repeat(len(blocks))))
    return _both(*sides)


def _flexkv(named: Named, result: Any) -> Iterable[Copy]:
    if named.get("gpu_block_type", 0) != 0:
        raise NotKnown  # the layout of another engine
    first = named["start_layer_id"]
    pointers = numbers(named["gpu_tensor_ptrs_tensor"])[first : first + named["num_layers"]]
    sides = numbers(list(range(named.get("kv_dim", 2)))) * named["gpu_kv_stride_in_bytes"]
    blocks = numbers(named["gpu_block_id_tensor"]) * named["gpu_block_stride_in_bytes"]
    firsts = pointers[:, None, None] + sides[None, :, None] + blocks[None, None, :]
    memory = Ranges(firsts.ravel(), numbers(named["chunk_size_in_bytes"]).repeat(firsts.size))
    return ((bool(named.get("is_host_to_device", True)), memory),)


# --- slots ----------------------------------------------------------------------------------------------


def _into_paged(direction: Any) -> bool:
    """LMCache's direction: an enum since 0.4, before that whether the paged memory is read."""
    if isinstance(direction, bool):
        return not direction
    name = getattr(direction, "name", "")
    if name not in ("H2D", "D2H"):
        raise NotKnown
    return bool(name == "H2D")


def _lmcache_layers(named: Named, result: Any) -> Iterable[Copy]:
    skip = int(named.get("skip_prefix_n_tokens", 0))
    memory = Numbered(named["slot_mapping"], named["key_value_ptrs"], skip)
    return ((_into_paged(named["direction"]), memory),)


def _lmcache_layer(named: Named, result: Any) -> Iterable[Copy]:
    cache = named["vllm_key_value_cache"]
    if not is_tensor(cache):
        raise NotKnown
    memory = Numbered(named["slot_mapping"], [cache.data_ptr()])
    return ((_into_paged(named["direction"]), memory),)


def _hf3fs(written: bool) -> Callable[[Named, Any], Iterable[Copy]]:
    def copies(named: Named, result: Any) -> Iterable[Copy]:
        return ((written, Numbered(named["token_indices"], named["kv_caches_ptrs"])),)

    return copies


# --- Mooncake -------------------------------------------------------------------------------------------


def _one(written: bool, address: str, size: str) -> Callable[[Named, Any], Iterable[Copy]]:
    """One buffer; a result below 0 is a failure: nothing was copied."""

    def copies(named: Named, result: Any) -> Iterable[Copy]:
        if type(result) is int and result < 0:
            return ()
        return ((written, Ranges(numbers(named[address]), numbers(named[size]))),)

    return copies


def _many(written: bool, addresses: str, sizes: str) -> Callable[[Named, Any], Iterable[Copy]]:
    """Many buffers; the result is one number for all, or one a key, below 0 for those that failed. Under a
    key there is one buffer, or a list of them."""

    def copies(named: Named, result: Any) -> Iterable[Copy]:
        firsts, lengths = named[addresses], named[sizes]
        if type(result) is int and result < 0:
            return ()
        if isinstance(result, list):
            if len(result) == len(firsts) == len(lengths):
                firsts, lengths = _without_failed(firsts, result), _without_failed(lengths, result)
            elif not result:
                return ()  # the client is not there
        return ((written, Ranges(_flat(firsts), _flat(lengths))),)

    return copies


def _without_failed(values: Any, ends: list[int]) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        raise NotKnown
    return [one for one, end in zip(values, ends, strict=True) if end >= 0]


def _flat(values: Any) -> Any:
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], (list, tuple)):
        values = [one for some in values for one in some]
    return numbers(values)


def _opcode(addresses: str, sizes: str) -> Callable[[Named, Any], Iterable[Copy]]:
    def copies(named: Named, result: Any) -> Iterable[Copy]:
        name = getattr(named["opcode"], "name", "")
        if name not in ("Read", "Write"):
            raise NotKnown
        return _many(name == "Read", addresses, sizes)(named, result)

    return copies


_PEER = ("target_hostname", "buffer", "peer_buffer_address", "length")
_PEERS = ("target_hostname", "buffers", "peer_buffer_addresses", "lengths")
_ENGINE, _STORE = "TransferEngine", "MooncakeDistributedStore"
_MOONCAKE = "Mooncake 0.3.13"


def _mooncake() -> Iterable[NativeCopy]:
    for side, written in (("write", False), ("read", True)):
        what = "buffer(s) of this process, lengths; " + ("written" if written else "read")
        for attr in (f"transfer_sync_{side}", f"transfer_submit_{side}", f"transfer_{side}_on_cuda"):
            copies = _one(written, "buffer", "length")
            yield NativeCopy("mooncake.engine", f"{_ENGINE}.{attr}", _PEER, copies, _MOONCAKE, what)
        for attr in (
            f"batch_transfer_sync_{side}",
            f"batch_transfer_async_{side}",
            f"batch_transfer_{side}_on_cuda",
        ):
            copies = _many(written, "buffers", "lengths")
            yield NativeCopy("mooncake.engine", f"{_ENGINE}.{attr}", _PEERS, copies, _MOONCAKE, what)
    for attr, peers, values in (
        ("transfer_sync", _PEER, ("buffer", "length")),
        ("batch_transfer_sync", _PEERS, ("buffers", "lengths")),
        ("batch_transfer_async", _PEERS, ("buffers", "lengths")),
    ):
        what = "buffer(s) of this process, lengths; opcode says the direction"
        parameters = (*peers, "opcode")
        yield NativeCopy(
            "mooncake.engine", f"{_ENGINE}.{attr}", parameters, _opcode(*values), _MOONCAKE, what
        )
    for attr, written in (("put_from", False), ("upsert_from", False), ("get_into", True)):
        names = ("key", "buffer_ptr", "size")
        copies = _one(written, "buffer_ptr", "size")
        what = "buffer_ptr, size; " + ("written" if written else "read")
        yield NativeCopy("mooncake.store", f"{_STORE}.{attr}", names, copies, _MOONCAKE, what)
        attr = f"batch_{attr}"
        copies = _many(written, "buffer_ptrs", "sizes")
        names, what = ("keys", "buffer_ptrs", "sizes"), what.replace("ptr, size", "ptrs, sizes")
        yield NativeCopy("mooncake.store", f"{_STORE}.{attr}", names, copies, _MOONCAKE, what)
    for attr, written in (
        ("batch_put_from_multi_buffers", False),
        ("batch_get_into_multi_buffers", True),
        ("batch_get_into_multi_buffer_ranges", True),
    ):
        names = ("keys", "all_buffer_ptrs", "all_sizes")
        copies = _many(written, "all_buffer_ptrs", "all_sizes")
        what = "all_buffer_ptrs, all_sizes (a list a key); " + ("written" if written else "read")
        yield NativeCopy("mooncake.store", f"{_STORE}.{attr}", names, copies, _MOONCAKE, what)


# --- NIXL -----------------------------------------------------------------------------------------------


def _nixl() -> Iterable[NativeCopy]:
    also = ("nixl_cu12._api", "nixl_cu13._api", "nixl_rocm._api")
    handle = "handle, of make_prepped_xfer or initialize_xfer"
    for attr, parameters, copies, names in (
        ("prep_xfer_dlist", ("agent_name", "xfer_list"), nixl.prepared, "xfer_list: addresses and lengths"),
        (
            "make_prepped_xfer",
            ("operation", "local_xfer_side", "local_indices", "remote_xfer_side", "remote_indices"),
            nixl.made,
            "local_indices into the list of local_xfer_side; READ: written",
        ),
        (
            "initialize_xfer",
            ("operation", "local_descs", "remote_descs", "remote_agent"),
            nixl.initialized,
            "local_descs: addresses and lengths; READ: written",
        ),
        ("transfer", ("handle",), nixl.posted, handle),
    ):
        always = attr != "transfer"
        yield NativeCopy(
            "nixl._api", f"nixl_agent.{attr}", parameters, copies, "NIXL 1.5.1", names, always, also
        )


# --- the table ------------------------------------------------------------------------------------------

_VLLM = "vLLM 0.32.0"
_HELPER = "vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.utils.gather_scatter_helper"
_SLOTS_3FS = "token_indices are slots, kv_caches_ptrs the layers; "

OPERATIONS: dict[str, NativeCopy] = {
    "_C_cache_ops::swap_blocks": NativeCopy(
        "torch.ops._C_cache_ops", "swap_blocks", ("src", "dst", "block_size_in_bytes", "block_mapping"),
        _swap_blocks, f"{_VLLM}, older ones without block_size_in_bytes",
        "block_mapping: pairs of block ids, from src into dst, block_size_in_bytes apart",
    ),
    "_C_cache_ops::swap_blocks_batch": NativeCopy(
        "torch.ops._C_cache_ops", "swap_blocks_batch", ("src_ptrs", "dst_ptrs", "sizes"),
        _swap_batch("src_ptrs", "dst_ptrs"), _VLLM, "src_ptrs into dst_ptrs, sizes bytes each",
    ),
}  # fmt: skip
"""Name in torch's registry -> row. vLLM calls them through ``vllm._custom_ops``: the offloading connector,
its tiers, HiSparse."""

_FUNCTIONS: tuple[NativeCopy, ...] = (
    *(
        NativeCopy(
            module, attr, ("dst", "src", size), _one_copy(size), version, f"{size} bytes from src to dst",
            also=also,
        )
        for module, attrs, size, version, also in (
            (
                "cuda.bindings.runtime", ("cudaMemcpy", "cudaMemcpyAsync"), "count", "cuda-bindings 13.5.0",
                ("cuda.cudart",),
            ),
            ("cupy_backends.cuda.api.runtime", ("memcpy", "memcpyAsync"), "size", "CuPy 14.2.0", ()),
        )
        for attr in attrs
    ),
    NativeCopy(
        "vllm.v1.kv_offload.cpu.swap_blocks_triton", "swap_blocks_batch",
        ("src_addrs", "dst_addrs", "sizes"), _swap_batch("src_addrs", "dst_addrs"), _VLLM,
        "src_addrs into dst_addrs, sizes bytes each",
    ),
    NativeCopy(
        "vllm.v1.simple_kv_offload.cuda_mem_ops", "copy_blocks",
        ("src_block_ids", "dst_block_ids", "params"), _simple_offload, _VLLM,
        "block ids; params has the base address and bytes of a block of each layer, of both sides",
    ),
    NativeCopy(
        _HELPER, "gather_kv_caches",
        ("kv_caches_ptrs", "total_token_in_kvcache", "dst_tensor", "token_indices"), _hf3fs(False), _VLLM,
        _SLOTS_3FS + "read",
    ),
    NativeCopy(
        _HELPER, "scatter_kv_caches",
        ("kv_caches_ptrs", "total_token_in_kvcache", "src_tensor", "token_indices"), _hf3fs(True), _VLLM,
        _SLOTS_3FS + "written",
    ),
    *(
        NativeCopy(module, attr, parameters, copies, version, names)
        for module, version in (("lmcache.cuda_ops", "LMCache 0.5.6"), ("lmcache.c_ops", "LMCache 0.3.9"))
        for attr, parameters, copies, names in (
            (
                "multi_layer_kv_transfer",
                (
                    "key_value", "key_value_ptrs", "slot_mapping", "paged_memory_device",
                    "page_buffer_size", "direction", "engine_kv_format", "block_size", "head_size",
                    "skip_prefix_n_tokens",
                ),
                _lmcache_layers, "slot_mapping, key_value_ptrs the layers; direction D2H or True: read",
            ),
            (
                "single_layer_kv_transfer",
                ("lmc_key_value_cache", "vllm_key_value_cache", "slot_mapping", "direction"),
                _lmcache_layer, "slot_mapping of vllm_key_value_cache; direction D2H or True: read",
            ),
        )
    ),
    *_mooncake(),
    *_nixl(),
    NativeCopy(
        "flexkv.c_ext", "transfer_kv_blocks",
        (
            "gpu_block_id_tensor", "gpu_tensor_ptrs_tensor", "gpu_kv_stride_in_bytes",
            "gpu_block_stride_in_bytes", "gpu_layer_stride_in_bytes", "cpu_block_id_tensor", "cpu_tensor",
            "cpu_kv_stride_in_bytes", "cpu_layer_stride_in_bytes", "cpu_block_stride_in_bytes",
            "chunk_size_in_bytes", "start_layer_id", "num_layers", "transfer_num_cta", "is_host_to_device",
            "use_ce_transfer", "kv_dim", "num_kv_heads", "gpu_block_type",
        ),
        _flexkv, "FlexKV 34ab141",
        "gpu_block_id_tensor, gpu_tensor_ptrs_tensor and the strides; is_host_to_device: written",
    ),
)  # fmt: skip


# --- seeing a call --------------------------------------------------------------------------------------


class _Inside(threading.local):
    inside = False
    """In a call that has a row: what it calls in turn is part of it."""


_here = _Inside()


def watching(within: bool = False) -> bool:
    """Whether somebody watches this thread, and no outer call speaks for this one.

    Args:
        within: asked by a watch that is at work.
    """
    return bool(modes.seeing_here()) and not _here.inside and (within or not OWN.busy)


def inside() -> bool:
    """Whether this thread is in a watched call that has a row."""
    return _here.inside


def copies_of(row: NativeCopy, args: Sequence[Any], kwargs: Named, result: Any) -> list[Copy]:
    """What a call read and wrote. Never raises: what does not fit the row is not known, both ways."""
    try:
        names = ("self", *row.parameters) if "." in row.attr else row.parameters
        return list(row.copies({**dict(zip(names, args, strict=False)), **kwargs}, result))
    except (NotKnown, AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        pass  # not of the types that the row's source has
    except Exception:
        AGENT.failed("native copy")
    return [(False, None), (True, None)]


def seen(row: NativeCopy, args: Sequence[Any], kwargs: Named, result: Any) -> None:
    """A call of an entry point came back, in a thread that is watched. Never raises."""
    copies = None
    for watcher in modes.seeing_here():
        with watcher.own():
            if copies is None:
                copies = copies_of(row, args, kwargs, result)
            watcher.copied(copies)
    if copies and any(memory is None for _, memory in copies):
        limits.say(Limit.NATIVE, row.where)


def _note(row: NativeCopy, args: Sequence[Any], kwargs: Named, result: Any) -> None:
    """Of a call that later calls refer to, and that copies nothing. Never raises."""
    before, OWN.busy = OWN.busy, True
    try:
        copies_of(row, args, kwargs, result)
    finally:
        OWN.busy = before


def _around(row: NativeCopy, original: Any) -> Any:
    def native(*args: Any, **kwargs: Any) -> Any:
        if row.always:
            result = original(*args, **kwargs)
            _note(row, args, kwargs, result)
            return result
        if not watching():
            return original(*args, **kwargs)
        _here.inside = True
        try:
            result = original(*args, **kwargs)
        finally:
            _here.inside = False
        seen(row, args, kwargs, result)
        return result

    return native


def wrap(row: NativeCopy, module: ModuleType) -> bool:
    """Put the wrapper in place; False where the module has no such attribute, or can't be changed."""
    try:
        path, _, name = row.attr.rpartition(".")
        holder = attrgetter(path)(module) if path else module
        return wrap_once(holder, name, functools.partial(_around, row))
    except (AttributeError, TypeError):
        return False


def rows() -> tuple[NativeCopy, ...]:
    """All entry points with a row."""
    return (*OPERATIONS.values(), *_FUNCTIONS)


@functools.cache
def install() -> None:
    """Works once. Modules that are not imported yet are wrapped when they are."""
    for row in _FUNCTIONS:
        for module in (row.module, *row.also):
            when_imported(module, functools.partial(wrap, row))
