"""Metadata of connectors that many use, in the words that the reader knows.

A view says the same as the metadata: under ``stores`` and ``loads`` a record for each request, with its
blocks or slots and where in the request they begin and end. Whose they are is still told by the blocks.

Sources: vLLM 0.32.0, ``distributed/kv_transfer/kv_connector/v1/``: ``example_connector.py``
(``SharedStorage`` before 0.13), ``decode_bench_connector.py``, ``lmcache_integration/``, ``mooncake/store/``,
``offloading/`` (and 0.20.2); LMCache's adapters of 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

View = dict[str, Any]


def view(meta: Any) -> Any:
    """The view of a metadata object, or the object itself where there is none.

    Raises:
        AttributeError: another class of that name, or another version of it.
    """
    known = _VIEWS.get(type(meta).__name__)
    return meta if known is None else known(meta)


def _example(meta: Any) -> View:
    """A record that is no store is a load."""
    return _both(
        (bool(one.is_store), {"slot_mapping": one.slot_mapping, "token_ids": one.token_ids})
        for one in meta.requests
    )


def _lmcache(meta: Any) -> View:
    found = []
    for one in meta.requests:
        base = {"req_id": one.req_id, "slot_mapping": one.slot_mapping}
        save, load = one.save_spec, one.load_spec
        if save is not None and save.can_save:
            found.append((True, {**base, "start_tokens": save.skip_leading_tokens}))
        if load is not None and load.can_load:
            places = {"start_tokens": load.vllm_cached_tokens, "end_tokens": load.lmcache_cached_tokens}
            found.append((False, {**base, **places}))
    return _both(found)


def _lmcache_mp(meta: Any) -> View:
    """Several processes: operations with the blocks of their tokens."""
    return _both(
        (
            one.direction == "STORE",
            {
                "req_id": one.request_id,
                "block_ids": one.op.block_ids,
                "start_tokens": one.op.start + one.op.skip_first_n_tokens,
                "end_tokens": one.op.end,
            },
        )
        for one in meta.requests
    )


def _mooncake_store(meta: Any) -> View:
    found = []
    for one in meta.requests:
        base = {"req_id": one.req_id, "block_ids": one.block_ids}
        if one.can_save:
            places = {"start_tokens": one.token_ids_start, "end_tokens": one.token_len_chunk}
            found.append((True, {**base, **places}))
        load = one.load_spec
        if load is not None and load.can_load:
            places = {"start_tokens": load.vllm_cached_tokens, "end_tokens": load.kvpool_cached_tokens}
            found.append((False, {**base, **places}))
    return _both(found)


def _decode_bench(meta: Any) -> View:
    """Requests whose KV is filled with numbers, as if it had been loaded."""
    return _both(
        (False, {"req_id": req_id, "block_ids": block_ids, "num_tokens": tokens})
        for req_id, (block_ids, tokens) in meta.reqs_to_fill.items()
    )


def _offloading(meta: Any) -> View:
    """Each transfer's side on the GPU: the other counts blocks of its own. (0.20.2: a pair, by request.)"""
    found = []
    for is_store, jobs, pairs in (
        (True, "store_jobs", "reqs_to_store"),
        (False, "load_jobs", "reqs_to_load"),
    ):
        if hasattr(meta, jobs):
            moves = [(one.req_id, (one.src_spec, one.dst_spec)) for one in getattr(meta, jobs).values()]
        else:
            moves = list(getattr(meta, pairs).items())
        for req_id, sides in moves:
            (here,) = (side for side in sides if type(side).__name__ == "GPULoadStoreSpec")
            found.append((is_store, {"req_id": req_id, "block_ids": here.block_ids}))
    return _both(found)


def _multi(meta: Any) -> Any:
    """A connector of connectors: one for each, and counts of saves that concern the scheduler alone."""
    return tuple(meta.metadata)


def _both(records: Iterable[tuple[bool, View]]) -> View:
    found: View = {"stores": [], "loads": []}
    for is_store, record in records:
        found["stores" if is_store else "loads"].append(record)
    return found


_VIEWS: dict[str, Callable[[Any], View]] = {
    "ExampleConnectorMetadata": _example,
    "SharedStorageConnectorMetadata": _example,
    "LMCacheConnectorMetadata": _lmcache,
    "LMCacheMPConnectorMetadata": _lmcache_mp,
    "MooncakeStoreConnectorMetadata": _mooncake_store,
    "DecodeBenchConnectorMetadata": _decode_bench,
    "OffloadingConnectorMetadata": _offloading,
    "MultiKVConnectorMetadata": _multi,
}
