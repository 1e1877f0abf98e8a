"""What the record of each connector hook says: one function a hook, after the call.

Each returns ``(flags, layer id, slots, entries, extra)`` of the hook's record
(:class:`~kvtrace.trace.rows.HookCall`), and keeps the worker's and the scheduler's state up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvtrace.agent import metadata
from kvtrace.agent.code.traces import type_name
from kvtrace.agent.facts.connector_facts import own_hooks
from kvtrace.agent.metadata.recording import READER
from kvtrace.agent.prints.prints import PRINTS
from kvtrace.agent.state import AGENT, clock, get_ident
from kvtrace.agent.steps import handover
from kvtrace.agent.watch.policy import POLICY
from kvtrace.agent.watch.work import write_all
from kvtrace.agent.wrap.hooked import Hooked
from kvtrace.trace import hooks, rows
from kvtrace.trace.facts import CacheResetFact
from kvtrace.trace.format import NONE_ANSWER, UNKNOWN, Flag, Kind, Role, pack_head
from kvtrace.trace.hooks import Hook

DECLARED_ATTRIBUTE = "_kvtrace_declared"
"""Of a SchedulerOutput: what its metadata declares, as ``metadata.Totals`` in a plain tuple: it
travels to workers that may not have kvtrace."""
_UNREADABLE = int(Flag.UNREADABLE)


def raised(hooked: Hooked, layer: Any, t0: int, error: BaseException, called: Any = None) -> None:
    """Record a call that raised. ``called``: the connector's method, where it may not take the arguments."""
    hook, role, index = hooked.hook, hooked.role, hooked.index
    try:
        layer = None if layer is None else str(layer)
        step = AGENT.worker.step if role == Role.WORKER else AGENT.scheduler.step
        head = pack_head(Kind.HOOK, role, hook.code, index, Flag.RAISED, AGENT.thread())
        ident = AGENT.id(layer) if layer else 0
        name = AGENT.id(type_name(error))
        AGENT.add(rows.HookCall(head, t0, clock(), step, ident, UNKNOWN, UNKNOWN, extra=name))
        AGENT.exception(hook.name, layer, step, index, error, called)
        AGENT.flush()
    except Exception:
        AGENT.failed(hook.name)


# --- what each hook's record says ---------------------------------------------------------

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Words = tuple[int, int, int, int, int]
Times = tuple[int, int]
"""Begin and end of the call."""
Record = Callable[..., None]
"""Called with ``(t0, t1, connector, result, *arguments)``, the arguments those of ``hook.needs``."""


def has_detail(hook: Hook) -> bool:
    """Whether the hook's record says more than that it was called, and when."""
    return hook in _DETAILS


def argument(args: Args, kwargs: Kwargs, index: int, name: str) -> Any:
    return kwargs[name] if name in kwargs else args[index] if len(args) > index else None


def recorder(hooked: Hooked) -> Record:
    """The function that a hook's wrapper calls after the call."""
    hook, role = hooked.hook, hooked.role
    head = pack_head(Kind.HOOK, role, hook.code, hooked.index)
    side = AGENT.worker if role == Role.WORKER else AGENT.scheduler
    threads = AGENT.threads

    def plain(t0: int, t1: int, connector: Any, result: Any, *given: Any) -> None:
        try:
            AGENT.add((head | threads[get_ident()] << 48, t0, t1, side.step, 0, -1, -1, 0))
        except Exception:
            AGENT.failed(hook.name)

    detail = _DETAILS.get(hook)
    if detail is None:
        return plain
    worker = AGENT.worker
    misses_metadata = role == Role.WORKER and hook.reads_metadata
    unbound = head | int(Flag.NO_METADATA) << 32 if misses_metadata else head

    def detailed(t0: int, t1: int, connector: Any, result: Any, *given: Any) -> None:
        try:
            first = head if worker.bound else unbound
            flags, layer, slots, entries, extra = detail(hooked, (t0, t1), connector, result, *given)
            first |= flags << 32 | threads[get_ident()] << 48
            AGENT.add((first, t0, t1, side.step, layer, slots, entries, extra))
        except Exception:
            AGENT.failed(hook.name)

    return detailed


# Each is called as ``detail(hooked, times, connector, result, *arguments)`` and returns
# ``(flags, layer id, slots, entries, extra)``.


def _inside(hooked: Hooked) -> int:
    """The index of a connector inside another one, 0 of an outermost one: in the detail of its records about
    requests, which are an outermost connector's where it is 0."""
    return hooked.index if hooked.child else 0


def _bound(hooked: Hooked) -> Any:
    """What the metadata names that a connector works on: with ``store_slots``, ``load_slots``, ..."""
    worker = AGENT.worker
    return worker.of_children.get(hooked.index, worker) if hooked.child else worker


def _save_layer(hooked: Hooked, times: Times, connector: Any, result: Any, layer: Any) -> Words:
    bound = _bound(hooked)
    return 0, AGENT.id(str(layer)), bound.store_slots, bound.store_entries, 0


def _wait_layer(hooked: Hooked, times: Times, connector: Any, result: Any, layer: Any) -> Words:
    worker = AGENT.worker
    worker.hooked_layer = layer = str(layer)
    bound = _bound(hooked)
    return 0, AGENT.id(layer), bound.load_slots, bound.load_entries, 0


def _wait_for_save(hooked: Hooked, times: Times, connector: Any, result: Any) -> Words:
    bound = _bound(hooked)
    return 0, 0, bound.store_slots, bound.store_entries, 0


def _bind(hooked: Hooked, times: Times, connector: Any, result: Any, bound: Any) -> Words:
    worker = AGENT.worker
    # The scheduler knows the requests, and read the same metadata better than it can be read here.
    read = None if hooked.child else worker.declared
    declared = metadata.totals(bound) if read is None else metadata.Totals(*read)
    flags = 0 if declared.readable else _UNREADABLE
    if hooked.child:
        worker.of_children[hooked.index] = declared
        return flags, 0, declared.store_slots, declared.store_entries, 0
    worker.store_slots, worker.store_entries = declared.store_slots, declared.store_entries
    worker.load_slots, worker.load_entries = declared.load_slots, declared.load_entries
    has_metadata = getattr(connector, "has_connector_metadata", None)
    worker.bound = has_metadata is None or bool(has_metadata())
    POLICY.begin(hooked.index, declared)
    return flags, 0, declared.store_slots, declared.store_entries, 0


def _clear(hooked: Hooked, times: Times, connector: Any, result: Any) -> Words:
    if not hooked.child:
        POLICY.end()
        worker = AGENT.worker
        worker.store_slots = worker.store_entries = worker.load_slots = worker.load_entries = 0
        worker.of_children.clear()
        worker.bound = False
    return 0, 0, -1, -1, 0


def _start_load(hooked: Hooked, times: Times, connector: Any, result: Any) -> Words:
    bound = _bound(hooked)
    return 0, 0, bound.load_slots, bound.load_entries, 0


def _finished(hooked: Hooked, times: Times, connector: Any, result: Any) -> Words:
    sending, receiving, failed = _transfers(result)
    _done(Role.WORKER, _inside(hooked), times[1], sending, receiving, failed)
    return 0, 0, -1, -1, 0


def _transfers(answer: Any) -> tuple[Any, Any, Any]:
    """(sent, received, failed to be received): request ids, or None. Of a connector's answer, which may be
    a pair, or of vLLM's KVConnectorOutput."""
    if isinstance(answer, tuple):
        sending, receiving = (*answer, None, None)[:2]
        return sending, receiving, None
    return (
        getattr(answer, "finished_sending", None),
        getattr(answer, "finished_recving", None),
        getattr(answer, "failed_recving", None),
    )


def _done(role: Role, inside: int, t: int, sending: Any, receiving: Any, failed: Any) -> None:
    """DONE records: transfers that were reported finished, of the connector ``inside`` another one or (0) the
    outermost one.

    ``get_transfer_results`` asks ``get_finished`` in turn: one record for both.
    """
    if not (sending or receiving or failed):
        return
    if role == Role.WORKER:
        write_all()  # what threads did for these, before it is told that it is done
    step = AGENT.worker.step if role == Role.WORKER else AGENT.scheduler.step
    recorded = AGENT.worker.recorded_done
    if recorded[0] != (role, step):
        recorded = AGENT.worker.recorded_done = ((role, step), set())
    for direction, ids, bad in (
        (Flag.STORE, sending, 0),
        (Flag.LOAD, set(receiving or ()) - set(failed or ()), 0),
        (Flag.LOAD, failed, 1),
    ):
        head = pack_head(Kind.DONE, role, 0, inside, direction, AGENT.thread())
        for req_id in ids or ():
            if (direction, inside, req_id) not in recorded[1]:
                recorded[1].add((direction, inside, req_id))
                with AGENT.passing_request(req_id) as ident:
                    AGENT.add(rows.TransferDone(head, t, ident, step, failed=bad))


def _connector_output(hooked: Hooked, times: Times, connector: Any, result: Any, output: Any) -> Words:
    # Those inside it are told the same, whoever of them it was: what each sent, its worker says.
    if not hooked.child:
        _done(Role.SCHEDULER, 0, times[1], *_transfers(output))
    return 0, 0, -1, -1, 0


def _request_finished(hooked: Hooked, times: Times, connector: Any, result: Any, request: Any) -> Words:
    keeps = bool(result[0]) if isinstance(result, tuple) and result else bool(result)
    if not hooked.child and isinstance(result, tuple) and len(result) > 1:
        handover.record(request.request_id, result[1], returned=True)
    if keeps:
        inside = _inside(hooked)
        head = pack_head(Kind.OPEN, Role.SCHEDULER, 0, inside, Flag.STORE, AGENT.thread())
        ident = AGENT.request_id(request.request_id)
        AGENT.add(rows.TransferBegun(head, times[1], ident, AGENT.scheduler.step))
    return 0, 0, -1, -1, 0


def _load_errors(hooked: Hooked, times: Times, connector: Any, result: Any) -> Words:
    return 0, 0, -1, -1, len(result or ())


def _lookup(hooked: Hooked, times: Times, connector: Any, result: Any, request: Any, local: Any) -> Words:
    answer, asynchronous = result if isinstance(result, tuple) else (result, False)
    flags = int(Flag.ASYNC) if asynchronous else 0
    external = NONE_ANSWER if answer is None else int(answer)
    head = pack_head(Kind.LOOKUP, Role.SCHEDULER, 0, _inside(hooked), flags, AGENT.thread())
    step, ident = AGENT.scheduler.step, AGENT.request_id(request.request_id)
    AGENT.add(rows.Lookup(head, *times, step, ident, local=int(local or 0), external=external))
    if not hooked.child:
        READER.admissions.looked_up(request.request_id, int(local or 0))
    return flags, 0, external if answer is not None else -1, 1, 0


def _alloc(hooked: Hooked, times: Times, connector: Any, result: Any, request: Any, external: Any) -> Words:
    external = int(external or 0)
    head = pack_head(Kind.ALLOC, Role.SCHEDULER, 0, _inside(hooked), 0, AGENT.thread())
    ident = AGENT.request_id(request.request_id)
    step = AGENT.scheduler.step
    AGENT.add(rows.Allocation(head, *times, step, ident, external=external))
    if not hooked.child:
        AGENT.scheduler.allocated.append(request.request_id)
        if external:
            AGENT.scheduler.loading.add(request.request_id)
        READER.admissions.allocated(request.request_id, external, step)
    return 0, 0, external, 1, 0


def _build_meta(hooked: Hooked, times: Times, connector: Any, result: Any, output: Any) -> Words:
    declared = READER.built(hooked.index, connector, result, output, hooked.child, times[1])
    flags = 0 if declared.readable else _UNREADABLE
    if not hooked.child:
        setattr(output, DECLARED_ATTRIBUTE, declared.totals())
    return flags, 0, declared.store_slots, declared.store_entries, 0


def _shutdown(hooked: Hooked, times: Times, connector: Any, result: Any) -> Words:
    """Loaded blocks are looked at for the last time; the connector's threads are through with their work."""
    PRINTS.ends()
    AGENT.write_all()
    return 0, 0, UNKNOWN, UNKNOWN, 0


def _reset_cache(hooked: Hooked, times: Times, connector: Any, result: Any) -> Words:
    own = hooked.hook.name in own_hooks(type(connector))  # vLLM's base class does nothing
    if own and result is not False and not hooked.child:
        AGENT.fact(CacheResetFact(AGENT.scheduler.step), Role.SCHEDULER)
    return 0, 0, UNKNOWN, UNKNOWN, 0


_DETAILS: dict[Hook, Callable[..., Words]] = {
    hooks.RESET_CACHE: _reset_cache,
    hooks.SHUTDOWN: _shutdown,
    hooks.SAVE_LAYER: _save_layer,
    hooks.WAIT_LAYER: _wait_layer,
    hooks.WAIT_SAVE: _wait_for_save,
    hooks.BIND_METADATA: _bind,
    hooks.CLEAR_METADATA: _clear,
    hooks.START_LOAD: _start_load,
    hooks.GET_FINISHED: _finished,
    hooks.TRANSFER_RESULTS: _finished,
    hooks.LOAD_ERRORS: _load_errors,
    hooks.LOOKUP: _lookup,
    hooks.ALLOCATED: _alloc,
    hooks.BUILD_METADATA: _build_meta,
    hooks.CONNECTOR_OUTPUT: _connector_output,
    hooks.REQUEST_FINISHED: _request_finished,
    hooks.REQUEST_FINISHED_GROUPS: _request_finished,
}


class Quiet(NamedTuple):
    """When a record that may say more says that the hook was called, and no more: the recorder in C adds it.

    Attributes:
        when: an expression of the generated wrapper; one that fails is no yes. ``{first}``: the argument that
            the record needs.
        slots, entries: attributes of the worker's state that stand in the record; "" for -1.
    """

    when: str
    slots: str = ""
    entries: str = ""

    @property
    def outermost(self) -> bool:
        """Whether it is so of an outermost connector alone: what the state says is that one's."""
        return bool(self.slots)


_NOTHING_CAME = "not ({0}.finished_sending or {0}.finished_recving or getattr({0}, 'failed_recving', None))"
QUIET: dict[Hook, Quiet] = {
    hooks.WAIT_SAVE: Quiet("_kvt_side.bound", "store_slots", "store_entries"),
    hooks.START_LOAD: Quiet("_kvt_side.bound", "load_slots", "load_entries"),
    hooks.GET_FINISHED: Quiet("_kvt_result.__class__ is tuple and not any(_kvt_result)"),
    hooks.TRANSFER_RESULTS: Quiet(_NOTHING_CAME.format("_kvt_result")),
    hooks.LOAD_ERRORS: Quiet("not _kvt_result"),
    hooks.CONNECTOR_OUTPUT: Quiet(_NOTHING_CAME.format("{first}")),
}
