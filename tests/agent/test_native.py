"""Native entry points that copy KV by address: which slots a call touches, with the arguments as the real
callers pass them, against callables of the same signatures that copy for real; and that the wrapper is never
in the way."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from kvtrace.agent.kv import touch  # noqa: E402
from kvtrace.agent.kv.memory import MOST, NotKnown, Ranges, numbers  # noqa: E402
from kvtrace.agent.reads import READS  # noqa: E402
from kvtrace.agent.watch import native  # noqa: E402
from kvtrace.agent.watch.operations import READ, WRITTEN, CopyWatch  # noqa: E402

from .test_slots import Cache, parsed, watching  # noqa: E402

BLOCKS, SIZE = 8, 4


def cache(kind: str = "K and V first", layers: int = 2, together: bool = False) -> Cache:
    """Layers in a storage each, or all blocks of all layers in one."""
    order = [1, 5, 0, 2, 3, 4] if together else [5, 0, 1, 2, 3, 4]
    if kind == "K and V in the content":
        order = [4, 0, 1, 2, 3]
    return Cache(kind, BLOCKS, SIZE, 1, order, layers)


_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def copy(source: int, target: int, size: int) -> None:
    _memcpy(target, source, size)


def slots_of(*blocks: int) -> set[int]:
    return {block * SIZE + n for block in blocks for n in range(SIZE)}


def seen(watch: CopyWatch) -> dict[tuple[str, str], Any]:
    assert watch.settled()
    return {
        key: None if one is None else parsed(one.text) if one.partly else parsed(one.text)[0]
        for key, one in watch.touched().items()
    }


def copied(watch: CopyWatch, way: str) -> dict[str, int]:
    return {
        layer: -1 if one is None else one.copied
        for (layer, its), one in watch.touched().items()
        if its == way
    }


def row_of(attr: str, module: str = "") -> native.NativeCopy:
    (row,) = [one for one in native.rows() if one.attr == attr and module in one.module]
    return row


def installed(row: native.NativeCopy, function: Any) -> ModuleType:
    """A module that has the entry point where the row says, wrapped."""
    module = ModuleType(row.module)
    *path, name = row.attr.split(".")
    holder: Any = module
    for part in path:
        setattr(holder, part, type(part, (), {}))
        holder = getattr(holder, part)
    setattr(holder, name, function)
    assert native.wrap(row, module)
    return module


def page(tensor: Any) -> int:
    """Bytes of a block, where blocks are the outermost dimension."""
    return int(tensor.stride(0) * tensor.element_size())


def pieces(here: Cache, *blocks: int) -> tuple[list[int], list[int]]:
    """Addresses and sizes of these blocks, layer by layer."""
    layers = here.tensors.values()
    addresses = [one.data_ptr() + block * page(one) for one in layers for block in blocks]
    return addresses, [page(one) for one in layers for _ in blocks]


def of_each(here: Cache, way: str, *blocks: int) -> dict[tuple[str, str], Any]:
    """These blocks of each layer, and no other."""
    return {(name, way): slots_of(*blocks) for name in here.names}


@pytest.fixture(scope="module")
def cache_ops() -> Iterator[Any]:
    """vLLM's own operations with the schemas of its torch_bindings.cpp (0.32), on the CPU."""
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(
        "swap_blocks(Tensor src, Tensor! dst, int block_size_in_bytes, Tensor block_mapping) -> ()"
    )
    library.define(
        "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes,"
        " bool is_src_access_order_any=False) -> ()"
    )

    def swap(src: Any, dst: Any, size: int, mapping: Any) -> None:
        for one, other in mapping.tolist():
            copy(src.data_ptr() + one * size, dst.data_ptr() + other * size, size)

    def batch(src: Any, dst: Any, sizes: Any, any_order: bool = False) -> None:
        for one, other, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            copy(one, other, size)

    library.impl("swap_blocks", swap, "CPU")
    library.impl("swap_blocks_batch", batch, "CPU")
    yield torch.ops._C_cache_ops
    library._destroy()


# --- vLLM's own -----------------------------------------------------------------------------------------


def test_swap_blocks_as_the_old_offloading_worker_calls_it(cache_ops: Any) -> None:
    here = cache()
    for tensor in here.tensors.values():
        K, V = tensor[0], tensor[1]
        host = torch.zeros(2, BLOCKS, *K.shape[1:])
        size = page(K)
        pairs = torch.tensor([[2, 0], [5, 1]], dtype=torch.int64)
        with watching(here) as watch:
            cache_ops.swap_blocks(K, host[0], size, pairs)
        half = seen(watch)
        (name,) = {name for name, _ in half}
        assert half[name, READ] == (set(), slots_of(2, 5)), "K alone is a part of the slots"
        with watching(here) as watch:
            cache_ops.swap_blocks(K, host[0], size, pairs)
            cache_ops.swap_blocks(V, host[1], size, pairs)
        assert seen(watch) == {(name, READ): slots_of(2, 5)}
        assert copied(watch, READ) == {name: 2 * SIZE}
        assert torch.equal(host[0][0], K[2])
        assert not watch.unsure
        with watching(here) as watch:
            cache_ops.swap_blocks(host[0], K, size, pairs.flip(1))
            cache_ops.swap_blocks(host[1], V, size, pairs.flip(1))
        assert seen(watch) == {(name, WRITTEN): slots_of(2, 5)}


@pytest.mark.parametrize("kind", ["K and V in the content", "blocks first"])
def test_swap_blocks_batch_as_the_offloading_worker_calls_it(cache_ops: Any, kind: str) -> None:
    here = cache(kind)
    host = torch.zeros(2, BLOCKS, 4096, dtype=torch.int8)
    gpu, bytes_of_each = pieces(here, 6, 1, 2)
    cpu = [host[n, m].data_ptr() for n in range(2) for m in range(3)]
    source, target, sizes = torch.tensor(gpu), torch.tensor(cpu), torch.tensor(bytes_of_each)
    with watching(here) as watch:
        cache_ops.swap_blocks_batch(source, target, sizes, is_src_access_order_any=False)
    assert seen(watch) == of_each(here, READ, 6, 1, 2)
    assert copied(watch, READ) == dict.fromkeys(here.names, 3 * SIZE)
    source.zero_()  # the buffers of descriptors are used again
    with watching(here) as watch:
        cache_ops.swap_blocks_batch(target, torch.tensor(gpu), sizes, True)
    assert seen(watch) == of_each(here, WRITTEN, 6, 1, 2)


def test_a_block_of_all_layers_at_once(cache_ops: Any) -> None:
    """Cross-layer blocks: layers lie between each other, a page is a block of all of them."""
    here = cache(together=True)
    memory = here.memory
    page = memory.numel() * memory.element_size() // BLOCKS
    host = torch.zeros(page, dtype=torch.int8)
    sizes = torch.tensor([page])
    with watching(here) as watch:
        cache_ops.swap_blocks_batch(
            torch.tensor([memory.data_ptr() + 3 * page]), torch.tensor([host.data_ptr()]), sizes
        )
    assert seen(watch) == of_each(here, READ, 3)


def test_simple_cpu_offload() -> None:
    """build_params: base addresses and bytes of a block a layer, as arrays of uint64."""
    here = cache("K and V in the content")
    host = {name: torch.zeros(one.shape) for name, one in here.tensors.items()}

    def params(source: Any, target: Any) -> Any:
        def bases(tensors: Any) -> Any:
            return np.array([one.data_ptr() for one in tensors.values()], dtype=np.uint64)

        per_block = np.array([page(one) for one in source.values()], dtype=np.uint64)
        return SimpleNamespace(src_bases=bases(source), dst_bases=bases(target), bpb=per_block)

    def copy_blocks(src_block_ids: Any, dst_block_ids: Any, params: Any) -> None:
        for base, other, size in zip(params.src_bases, params.dst_bases, params.bpb, strict=True):
            for one, to in zip(src_block_ids, dst_block_ids, strict=True):
                copy(int(base) + one * int(size), int(other) + to * int(size), int(size))

    module = installed(row_of("copy_blocks"), copy_blocks)
    store, load = params(here.tensors, host), params(host, here.tensors)
    with watching(here) as watch:
        module.copy_blocks([4, 5], [0, 1], store)
    assert seen(watch) == of_each(here, READ, 4, 5)
    with watching(here) as watch:
        module.copy_blocks([0], [7], load)
    assert seen(watch) == of_each(here, WRITTEN, 7)


def test_the_triton_path_counts_once_with_what_it_calls(cache_ops: Any) -> None:
    here = cache("K and V in the content", layers=1)
    row = row_of("swap_blocks_batch", "triton")

    def swap_blocks_batch(
        src: Any, dst: Any, sizes: Any, order: bool = False, *, bytes_per_chunk: int
    ) -> None:
        cache_ops.swap_blocks_batch(src, dst, sizes, is_src_access_order_any=order)

    module = installed(row, swap_blocks_batch)
    (address,), (size,) = pieces(here, 2)
    host = torch.zeros(size, dtype=torch.int8)
    source, target = torch.tensor([host.data_ptr()]), torch.tensor([address])
    with watching(here) as watch:
        module.swap_blocks_batch(source, target, torch.tensor([size]), True, bytes_per_chunk=8)
    assert seen(watch) == {(here.names[0], WRITTEN): slots_of(2)}
    assert copied(watch, WRITTEN) == {here.names[0]: SIZE}


def test_hf3fs_gathers_and_scatters_slots() -> None:
    here = cache()
    pointers = torch.tensor([one.data_ptr() for one in here.tensors.values()])
    indices = list(range(8, 12))
    for attr, way in (("gather_kv_caches", READ), ("scatter_kv_caches", WRITTEN)):
        module = installed(row_of(attr), lambda *args: None)
        with watching(here) as watch:
            getattr(module, attr)(pointers, 32, torch.zeros(1), indices, SIZE, 3, 4, (1, 2))
        assert seen(watch) == of_each(here, way, 2)


# --- one piece at a time --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attr", "module", "result"),
    [
        ("cudaMemcpyAsync", "cuda.bindings", (0,)),
        ("memcpyAsync", "cupy", None),
    ],
)
def test_a_copy_of_one_piece_by_address(attr: str, module: str, result: Any) -> None:
    here = cache("K and V in the content", layers=1)
    (name,), ((address,), (size,)) = here.names, pieces(here, 3)
    copies = installed(row_of(attr, module), lambda *args: result)
    host = ctypes.create_string_buffer(size)
    for source, target, way in ((address, host, READ), (bytes(size), ctypes.c_void_p(address), WRITTEN)):
        with watching(here) as watch:
            assert getattr(copies, attr)(target, source, size) is result
        assert seen(watch) == {(name, way): slots_of(3)} and not watch.unsure


def test_a_copy_that_cuda_refused_is_none() -> None:
    here = cache("K and V in the content", layers=1)
    (address,), (size,) = pieces(here, 3)
    module = installed(row_of("cudaMemcpy", "cuda.bindings"), lambda *args: (enum.IntEnum("E", "bad").bad,))
    with watching(here) as watch:
        module.cudaMemcpy(1, address, size, 4)
    assert not seen(watch) and not watch.unsure


# --- LMCache --------------------------------------------------------------------------------------------


class Direction(enum.Enum):
    H2D = 0
    D2H = 1


@pytest.mark.parametrize(
    ("module", "directions"),
    [("lmcache.cuda_ops", (Direction.D2H, Direction.H2D)), ("lmcache.c_ops", (True, False))],
)
def test_lmcache(module: str, directions: tuple[Any, Any]) -> None:
    here = cache()
    tensors = list(here.tensors.values())
    pointers = torch.tensor([one.data_ptr() for one in tensors])
    mapping = torch.tensor([-1, -1, 9, 10, 11, 30])
    many = installed(row_of("multi_layer_kv_transfer", module), lambda *a, **k: None)
    one = installed(row_of("single_layer_kv_transfer", module), lambda *a, **k: None)
    for direction, way in zip(directions, (READ, WRITTEN), strict=True):
        with watching(here) as watch:
            many.multi_layer_kv_transfer(
                torch.zeros(1), pointers, mapping, torch.device("cpu"), 32, direction, "format"
            )
        assert seen(watch) == {(name, way): {9, 10, 11, 30} for name in here.names}
        assert copied(watch, way) == dict.fromkeys(here.names, 4)
        with watching(here) as watch:
            one.single_layer_kv_transfer(torch.zeros(1), tensors[1], mapping, direction, "format")
        assert seen(watch) == {(here.names[1], way): {9, 10, 11, 30}}
    with watching(here) as watch:
        many.multi_layer_kv_transfer(
            torch.zeros(1), pointers[:1], mapping, torch.device("cpu"), 32, directions[1], "format",
            block_size=SIZE, head_size=4, skip_prefix_n_tokens=4,
        )  # fmt: skip
    assert seen(watch) == {(here.names[0], WRITTEN): {11, 30}}


# --- Mooncake, FlexKV -----------------------------------------------------------------------------------


def test_mooncake_transfers() -> None:
    here = cache("K and V in the content")
    addresses, sizes = pieces(here, 2, 3)
    for attr, way in (("batch_transfer_sync_write", READ), ("batch_transfer_sync_read", WRITTEN)):
        module = installed(row_of(f"TransferEngine.{attr}"), lambda self, host, one, other, sizes, hint="": 0)
        engine = module.TransferEngine()
        with watching(here) as watch:
            assert getattr(engine, attr)("host:1", addresses, [1] * 4, sizes) == 0
        assert seen(watch) == of_each(here, way, 2, 3)
    module = installed(row_of("TransferEngine.transfer_sync"), lambda self, *args, **kwargs: 0)
    with watching(here) as watch:
        module.TransferEngine().transfer_sync(
            "host:1", buffer=addresses[0], peer_buffer_address=1, length=sizes[0],
            opcode=SimpleNamespace(name="Read"),
        )  # fmt: skip
    assert seen(watch) == {(here.names[0], WRITTEN): slots_of(2)}
    module = installed(row_of("TransferEngine.transfer_sync_write"), lambda self, *args: -1)
    with watching(here) as watch:
        module.TransferEngine().transfer_sync_write("host:1", addresses[0], 1, sizes[0])
    assert not seen(watch), "it failed"


def test_mooncake_store_keys_that_failed_do_not_count() -> None:
    here = cache("K and V in the content")
    ((a, b), (size, _)), ((c, d), _) = pieces(here, 1), pieces(here, 4)
    attr = "MooncakeDistributedStore.batch_put_from_multi_buffers"
    module = installed(row_of(attr), lambda self, keys, buffers, sizes, config=None: [0, -704])
    store = module.MooncakeDistributedStore()
    with watching(here) as watch:
        done = store.batch_put_from_multi_buffers(["k1", "k2"], [[a, b], [c, d]], [[size] * 2] * 2, object())
    assert done == [0, -704]
    assert seen(watch) == of_each(here, READ, 1)
    attr = "MooncakeDistributedStore.batch_get_into"
    module = installed(row_of(attr), lambda self, keys, buffers, sizes: [size, size])
    with watching(here) as watch:
        module.MooncakeDistributedStore().batch_get_into(["k1", "k2"], [a, d], [size, size])
    assert seen(watch) == {(here.names[0], WRITTEN): slots_of(1), (here.names[1], WRITTEN): slots_of(4)}


def test_flexkv() -> None:
    here = cache()
    module = installed(row_of("transfer_kv_blocks"), lambda *args, **kwargs: None)
    tensor = here.tensors[here.names[0]]
    kv, block = page(tensor), page(tensor[0])
    pointers = torch.tensor([one.data_ptr() for one in here.tensors.values()])
    for to_device, way in ((False, READ), (True, WRITTEN)):
        with watching(here) as watch:
            module.transfer_kv_blocks(
                torch.tensor([6, 7]), pointers, kv, block, 0, torch.tensor([0, 1]), torch.zeros(1),
                1, 1, 1, block, 0, 2, 4, to_device, False, 2, 3, 0, True,
            )  # fmt: skip
        assert seen(watch) == of_each(here, way, 6, 7)


# --- NIXL -----------------------------------------------------------------------------------------------


class Handle:
    __slots__ = ("_handle",)

    def __init__(self, number: int) -> None:
        self._handle = number


class DList:
    """As NIXL's own list: a count, and tuples by index."""

    def __init__(self, table: Any) -> None:
        self.table = [tuple(map(int, row)) for row in table]

    def descCount(self) -> int:
        return len(self.table)

    def __getitem__(self, at: int) -> tuple[int, ...]:
        return self.table[at]


class Agent:
    """The methods of nixl_agent that are wrapped, with its signatures; ``status`` is what is posted."""

    status = "PROC"
    handles = iter(range(1 << 40, 1 << 41))

    def __init__(self, name: str) -> None:
        self.name = name

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: Any = None, backends: Any = ()
    ) -> Handle:
        return Handle(next(self.handles))

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: Any, local_indices: Any, remote_xfer_side: Any,
        remote_indices: Any, notif_msg: bytes = b"", backends: Any = (), skip_desc_merge: bool = False,
    ) -> Handle:  # fmt: skip
        return Handle(next(self.handles))

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str, notif_msg: bytes = b""
    ) -> Handle:
        return Handle(next(self.handles))

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        return self.status


@pytest.fixture
def agent() -> Any:
    module = ModuleType("nixl._api")
    module.nixl_agent = type("nixl_agent", (Agent,), dict(vars(Agent)))  # type: ignore[attr-defined]
    for row in native.rows():
        if row.module == "nixl._api":
            assert native.wrap(row, module)
    return module.nixl_agent("mine")


def described(here: Cache) -> Any:
    """A descriptor for each block of each layer, layer by layer, as in vLLM: Nx3, uint64."""
    addresses, sizes = pieces(here, *range(BLOCKS))
    return np.array([[one, size, 0] for one, size in zip(addresses, sizes, strict=True)], dtype=np.uint64)


FORMS = {
    "an array": lambda table: table,
    "tuples": lambda table: [tuple(map(int, row)) for row in table],
    "its own list": DList,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("operation", "way"), [("READ", WRITTEN), ("WRITE", READ)])
def test_nixl_prepared_transfers_as_vllms_workers_make_them(
    agent: Any, form: str, operation: str, way: str
) -> None:
    here = cache("K and V in the content")
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", FORMS[form](described(here)), "VRAM")
    remote = agent.prep_xfer_dlist("theirs", [(1 << 30, 64, 0)] * 4, "VRAM")
    indices = np.array([1, 5, BLOCKS + 1, BLOCKS + 5], dtype=np.int32)
    with watching(here) as watch:
        handle = agent.make_prepped_xfer(operation, local, indices, remote, [0, 1, 2, 3], notif_msg=b"r1")
        indices[:] = 0
        assert not seen(watch), "made is not begun"
        assert agent.transfer(handle) == "PROC"
    assert seen(watch) == of_each(here, way, 1, 5)
    assert not watch.unsure


def test_nixl_transfers_of_whole_lists_and_of_tensors(agent: Any) -> None:
    here = cache("K and V in the content")
    tensor = here.tensors[here.names[1]]
    with watching(here) as watch:
        handle = agent.initialize_xfer("WRITE", DList(described(here)[2:4]), DList([]), "theirs")
        agent.transfer(handle)
    assert seen(watch) == {(here.names[0], READ): slots_of(2, 3)}
    local = agent.prep_xfer_dlist("", [tensor[6], tensor[0]])
    remote = agent.prep_xfer_dlist("theirs", DList([]))
    with watching(here) as watch:
        agent.transfer(agent.make_prepped_xfer("READ", local, [0], remote, [0]))
    assert seen(watch) == {(here.names[1], WRITTEN): slots_of(6)}


def test_nixl_within_one_agent_reads_one_side_writes_the_other(agent: Any) -> None:
    here = cache("K and V in the content", layers=1)
    both = agent.prep_xfer_dlist("mine", described(here))
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", described(here))
    with watching(here) as watch:
        agent.transfer(agent.make_prepped_xfer("READ", local, [2], both, [7]))
    assert seen(watch) == {(here.names[0], WRITTEN): slots_of(2), (here.names[0], READ): slots_of(7)}


def test_nixl_refused_did_not_begin_and_unknown_is_not_nothing(agent: Any) -> None:
    here = cache("K and V in the content", layers=1)
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", described(here))
    remote = agent.prep_xfer_dlist("theirs", DList([]))
    unwatched = agent.make_prepped_xfer("READ", local, [2], remote, [0])
    agent.prep_xfer_dlist("NIXL_INIT_AGENT", object())  # never raises
    with watching(here) as watch:
        agent.transfer(unwatched)
    assert watch.unsure and set(seen(watch).values()) == {None}
    with watching(here) as watch:
        beyond = agent.make_prepped_xfer("READ", local, [BLOCKS], remote, [0])
        agent.transfer(beyond)
    assert watch.unsure and set(seen(watch).values()) == {None}
    with watching(here) as watch:
        handle = agent.make_prepped_xfer("READ", local, [2], remote, [0])
        type(agent).status = "ERR"
        assert agent.transfer(handle) == "ERR"
    assert not seen(watch)


# --- what does not fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "addresses", [None, "text", [1.5], [object()], [0] * (MOST + 1), [[1, 2], [3]], {1: 2}, [2**70]]
)
def test_what_is_not_understood_is_not_known_and_never_nothing(addresses: Any) -> None:
    here = cache()
    module = installed(row_of("MooncakeDistributedStore.batch_put_from"), lambda self, *args: [0])
    with watching(here) as watch:
        assert module.MooncakeDistributedStore().batch_put_from(["k"], addresses, [8]) == [0]
    assert watch.unsure
    assert all(one is None for one in seen(watch).values())
    assert {name for name, _ in seen(watch)} == set(here.names)
    assert copied(watch, READ) == dict.fromkeys(here.names, -1)


def test_memory_of_nobody_leaves_it_open_what_was_copied() -> None:
    here = cache()
    other = torch.zeros(64)
    module = installed(row_of("MooncakeDistributedStore.put_from"), lambda self, *args: 0)
    with watching(here) as watch:
        module.MooncakeDistributedStore().put_from("k", other.data_ptr(), 64)
    assert watch.unsure, "a buffer between, filled by who knows whom"
    assert not seen(watch)


def test_pieces_that_reach_over_the_end_count_up_to_it() -> None:
    here = cache("K and V in the content", layers=1)
    (address,), (size,) = pieces(here, 7)
    module = installed(row_of("MooncakeDistributedStore.put_from"), lambda self, *args: 0)
    with watching(here) as watch:
        module.MooncakeDistributedStore().put_from("k", address, 3 * size)
    assert seen(watch) == {(here.names[0], READ): slots_of(7)}


def test_pieces_of_many_lengths_are_added_up() -> None:
    here = cache("K and V in the content", layers=1)
    layer = here.caches.layers[here.names[0]]
    layout = here.caches.layout(layer)
    firsts = numbers([layer.start] * 100)
    memory = Ranges(firsts, numbers(list(range(4, 404, 4))))
    assert layout is not None
    spans = memory.spans(layout, layer)
    assert spans is not None
    slots = touch.slots_of(layout, [spans])
    assert slots is not None
    assert (slots.full.tolist(), slots.partly.tolist()) == ([*range(2 * SIZE)], [2 * SIZE])
    assert slots.copied == sum(range(4, 404, 4)) / layout.slot_bytes
    with pytest.raises(NotKnown):
        Ranges(firsts, numbers([1, 2]))


def test_too_many_pieces_are_not_known() -> None:
    here = cache("heads before slots", layers=1)
    layout = here.caches.layout(here.caches.layers[here.names[0]])
    assert layout is not None
    assert touch.spans_of(touch.Pattern(numbers([0]), ((1 << 22, 8),), 4)) is None
    every = layout.dims[0].size * layout.dims[0].stride
    many = touch.Spans(numbers([0] * (1 << 17)), numbers([every] * (1 << 17)))
    assert touch.slots_of(layout, [many]) is None


# --- never in the way -----------------------------------------------------------------------------------


def test_the_wrapper_hands_all_through() -> None:
    error = RuntimeError("refused")

    def put_from(self: Any, key: str, buffer_ptr: int, size: int, config: Any = None) -> Any:
        """As the real one."""
        if key == "bad":
            raise error
        return key, buffer_ptr, size, config

    module = installed(row_of("MooncakeDistributedStore.put_from"), put_from)
    store = module.MooncakeDistributedStore()
    assert store.put_from.__doc__ == "As the real one."
    assert store.put_from("k", 1, size=2, config=3) == ("k", 1, 2, 3)
    here = cache()
    with watching(here) as watch:
        assert store.put_from("k", 1, size=2, config=3) == ("k", 1, 2, 3)
        with pytest.raises(RuntimeError) as caught:
            store.put_from("bad", here.memory.data_ptr(), 64)
        assert caught.value is error
        assert store.put_from("k", 1, 2) == ("k", 1, 2, None), "watched on after an error"
    assert not seen(watch), "a call that raised copied nothing"


def test_a_module_without_the_name_is_left_as_it_is() -> None:
    row = row_of("MooncakeDistributedStore.put_from")
    assert not native.wrap(row, ModuleType("mooncake.store"))
    module = installed(row, lambda self: None)
    before = module.MooncakeDistributedStore.put_from
    assert native.wrap(row, module)
    assert module.MooncakeDistributedStore.put_from is before, "wrapped once"


def test_every_row_says_where_it_was_read() -> None:
    names = [row.where for row in native.rows()]
    assert len(names) == len(set(names))
    for row in native.rows():
        assert row.read_in and row.names and row.parameters


def test_vllms_entry_points_stand_in_the_checked_table() -> None:
    known = {(row.module, name) for row in READS if not row.holder for name in row.names}
    for row in native.rows():
        if row.module.startswith("vllm."):
            assert (row.module, f"{row.attr}({', '.join(row.parameters)})") in known
        elif row.module.startswith("torch.ops."):
            assert ("vllm._custom_ops", f"{row.attr}({', '.join(row.parameters)})") in known
