"""What the record of each connector hook says: one function a hook, after the call.

Each returns ``(flags, layer id, slots, entries, extra)`` of the HOOK record (see
``trace/format.py``), and keeps the worker's and the scheduler's state up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtrace.agent import effect, graphs, metadata
from kvtrace.agent.state import AGENT, clock
from kvtrace.trace.format import HOOK_CODE, NONE_ANSWER, Flag, Kind, Role, pack_head

LANE_ATTRIBUTE = "_kvtrace_lane"
PARENT_ATTRIBUTE = "_kvtrace_parent"
DECLARED_ATTRIBUTE = "_kvtrace_declared"
"""Of a SchedulerOutput: what its metadata declares, as ``metadata.Totals`` in a plain tuple: it
travels to workers that may not have kvtrace."""


def _is_child(connector: Any) -> bool:
    """A connector inside another one (MultiConnector's): its calls are recorded, but the
    step's books are kept by the outermost one alone."""
    return getattr(connector, PARENT_ATTRIBUTE, None) is not None


def raised(name: str, role: Role, lane: int, t0: int, layer: str | None, error: BaseException) -> None:
    try:
        step = AGENT.worker.step if role == Role.WORKER else AGENT.scheduler.step
        head = pack_head(Kind.HOOK, role, HOOK_CODE[name], lane, Flag.RAISED, AGENT.thread())
        ident = AGENT.id(layer) if layer else 0
        AGENT.add((head, t0, clock(), step, ident, -1, -1, AGENT.id(type(error).__name__)))
        AGENT.exception(name, layer, step, lane, error)
        AGENT.flush()
    except Exception:
        AGENT.failed(name)


# --- what each hook's record says ---------------------------------------------------------

# Worker hooks that read the bound metadata.
_NEEDS_METADATA = {"start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"}

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Record = Callable[[int, int, Any, Args, Kwargs, Any], None]


def recorder(name: str, role: Role, lane: int) -> Record:
    detail: Callable[..., tuple[int, int, int, int, int]] = _DETAILS.get(name, _plain)
    head = pack_head(Kind.HOOK, role, HOOK_CODE[name], lane)
    worker_side = role == Role.WORKER
    needs_metadata = worker_side and name in _NEEDS_METADATA

    def record(t0: int, t1: int, connector: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
        try:
            bound = AGENT.worker.bound
            flags, layer, slots, entries, extra = detail(t0, t1, connector, args, kwargs, result)
            step = AGENT.worker.step if worker_side else AGENT.scheduler.step
            if needs_metadata and not bound:
                flags |= Flag.NO_METADATA
            AGENT.add((head | flags << 32 | AGENT.thread() << 48, t0, t1, step, layer, slots, entries, extra))
        except Exception:
            AGENT.failed(name)

    return record


def argument(args: Args, kwargs: Kwargs, index: int, name: str) -> Any:
    return kwargs[name] if name in kwargs else args[index] if len(args) > index else None


def _plain(*_: Any) -> tuple[int, int, int, int, int]:
    return 0, 0, -1, -1, 0


def _layer_detail(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    layer = str(argument(args, kwargs, 0, "layer_name"))
    return 0, AGENT.id(layer), AGENT.worker.store_slots, AGENT.worker.store_entries, 0


def _wait_layer(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    layer = str(argument(args, kwargs, 0, "layer_name"))
    AGENT.worker.hooked_layer = layer
    return 0, AGENT.id(layer), AGENT.worker.load_slots, AGENT.worker.load_entries, 0


def _wait_for_save(*_: Any) -> tuple[int, ...]:
    return 0, 0, AGENT.worker.store_slots, AGENT.worker.store_entries, 0


def _bind(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    worker = AGENT.worker
    # The scheduler knows the requests, and read the same metadata better than it can be read here.
    read = None if _is_child(connector) else worker.declared
    bound = argument(args, kwargs, 0, "connector_metadata")
    declared = metadata.totals(bound) if read is None else metadata.Totals(*read)
    flags = 0 if declared.readable else Flag.UNREADABLE
    if _is_child(connector):
        return flags, 0, declared.store_slots, declared.store_entries, declared.load_slots
    worker.store_slots, worker.store_entries = declared.store_slots, declared.store_entries
    worker.load_slots, worker.load_entries = declared.load_slots, declared.load_entries
    has_metadata = getattr(connector, "has_connector_metadata", None)
    worker.bound = has_metadata is None or bool(has_metadata())
    effect.begin(getattr(connector, LANE_ATTRIBUTE, 0), declared)
    return flags, 0, declared.store_slots, declared.store_entries, declared.load_slots


def _clear(t0: int, t1: int, connector: Any, *_: Any) -> tuple[int, ...]:
    if _is_child(connector):
        return 0, 0, -1, -1, 0
    effect.end()
    worker = AGENT.worker
    worker.store_slots = worker.store_entries = worker.load_slots = worker.load_entries = 0
    worker.bound = False
    return 0, 0, -1, -1, 0


def _start_load(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    context = argument(args, kwargs, 0, "forward_context")
    worker = AGENT.worker
    return 0, 0, worker.load_slots, worker.load_entries, graphs.mode_of(context)


def _finished(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    sending, receiving = (
        (*result, None, None)[:2]
        if isinstance(result, tuple)
        else (getattr(result, "finished_sending", None), getattr(result, "finished_recving", None))
    )
    if not _is_child(connector):
        failed = getattr(result, "failed_recving", None) or ()
        _done(Role.WORKER, AGENT.worker.step, t1, sending, receiving, failed)
    return 0, 0, -1, -1, len(sending or ()) << 32 | len(receiving or ())


def _done(role: Role, step: int, t: int, sending: Any, receiving: Any, failed: Any) -> None:
    """DONE records: transfers that were reported finished.

    ``get_transfer_results`` asks ``get_finished`` in turn: one record for both.
    """
    told = AGENT.worker.told_done
    if told[0] != (role, step):
        told = AGENT.worker.told_done = ((role, step), set())
    for direction, ids, bad in (
        (Flag.STORE, sending, 0),
        (Flag.LOAD, set(receiving or ()) - set(failed), 0),
        (Flag.LOAD, failed, 1),
    ):
        head = pack_head(Kind.DONE, role, 0, 0, direction, AGENT.thread())
        for req_id in ids or ():
            if (direction, req_id) not in told[1]:
                told[1].add((direction, req_id))
                with AGENT.passing_request(req_id) as ident:
                    AGENT.add((head, t, ident, step, bad, 0, 0, 0))


def _connector_output(
    t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any
) -> tuple[int, ...]:
    output = argument(args, kwargs, 0, "connector_output")
    if not _is_child(connector):
        sending, receiving = (
            getattr(output, "finished_sending", None),
            getattr(output, "finished_recving", None),
        )
        failed = getattr(output, "failed_recving", None) or ()
        _done(Role.SCHEDULER, AGENT.scheduler.step, t1, sending, receiving, failed)
    return 0, 0, -1, -1, 0


def _request_finished(
    t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any
) -> tuple[int, ...]:
    keeps = bool(result[0]) if isinstance(result, tuple) and result else bool(result)
    if keeps and not _is_child(connector):
        request = argument(args, kwargs, 0, "request")
        head = pack_head(Kind.OPEN, Role.SCHEDULER, 0, 0, Flag.STORE, AGENT.thread())
        ident = AGENT.request_id(request.request_id)
        AGENT.add((head, t1, ident, AGENT.scheduler.step, 0, 0, 0, 0))
    return 0, 0, -1, -1, 0


def _load_errors(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    return 0, 0, -1, -1, len(result or ())


def _lookup(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    request, local = argument(args, kwargs, 0, "request"), argument(args, kwargs, 1, "num_computed_tokens")
    answer, asynchronous = result if isinstance(result, tuple) else (result, False)
    flags = Flag.ASYNC if asynchronous else 0
    external = NONE_ANSWER if answer is None else int(answer)
    if not _is_child(connector):
        head = pack_head(Kind.LOOKUP, Role.SCHEDULER, 0, 0, flags, AGENT.thread())
        step, ident = AGENT.scheduler.step, AGENT.request_id(request.request_id)
        AGENT.add((head, t0, t1, step, ident, int(local or 0), external, 0))
    return flags, 0, external if answer is not None else -1, 1, 0


def _alloc(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    request = argument(args, kwargs, 0, "request")
    external = int(argument(args, kwargs, 2, "num_external_tokens") or 0)
    if not _is_child(connector):
        head = pack_head(Kind.ALLOC, Role.SCHEDULER, 0, 0, 0, AGENT.thread())
        ident = AGENT.request_id(request.request_id)
        AGENT.add((head, t0, t1, AGENT.scheduler.step, ident, external, -1, 0))
    return 0, 0, external, 1, 0


def _build_meta(t0: int, t1: int, connector: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    output = argument(args, kwargs, 0, "scheduler_output")
    declared = metadata.read(result, metadata.Blocks(AGENT.scheduler.current, output))
    step = AGENT.scheduler.step
    for entry in () if _is_child(connector) else declared.entries:
        head = pack_head(Kind.META, Role.SCHEDULER, 0, 0, entry.direction, AGENT.thread())
        ident = AGENT.request_id(entry.req_id) if entry.req_id else 0
        AGENT.add((head, t1, ident, step, entry.slots, entry.tokens, entry.start, 0))
    if not _is_child(connector):
        setattr(output, DECLARED_ATTRIBUTE, declared.totals())
    flags = 0 if declared.readable else Flag.UNREADABLE
    return flags, 0, declared.store_slots, declared.store_entries, declared.load_slots


_DETAILS: dict[str, Callable[..., Any]] = {
    "save_kv_layer": _layer_detail,
    "wait_for_layer_load": _wait_layer,
    "wait_for_save": _wait_for_save,
    "bind_connector_metadata": _bind,
    "clear_connector_metadata": _clear,
    "start_load_kv": _start_load,
    "get_finished": _finished,
    "get_transfer_results": _finished,
    "get_block_ids_with_load_errors": _load_errors,
    "get_num_new_matched_tokens": _lookup,
    "update_state_after_alloc": _alloc,
    "build_connector_meta": _build_meta,
    "update_connector_output": _connector_output,
    "request_finished": _request_finished,
    "request_finished_all_groups": _request_finished,
}
