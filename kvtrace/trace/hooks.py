"""The connector's hooks: one table, a row each. Whatever differs from hook to hook stands here.

Standard library only: this module is imported inside vLLM's processes. The hooks are the methods of
``KVConnectorBase_V1`` (``vllm/distributed/kv_transfer/kv_connector/v1/base.py``) that
kvtrace records. To add one, add a row; a record that shall say more than "called, from when to when"
needs a function in ``kvtrace/agent/hooks/hook_records.py`` as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtrace.trace.format import Flag, Role
from kvtrace.versions import OLDEST, since


class Per(Enum):
    """How often vLLM calls a hook."""

    STEP = "step"
    """Once in each step of a connector's life."""
    LAYER = "layer"
    """Once for each KV layer in each step with a forward."""
    NEED = "need"
    """When there is a reason: a request, a preemption, the start or the end of the engine."""


class Watch(Enum):
    """How the calls of a hook are watched (``kvtrace/agent/watch/call.py``)."""

    NOT = "not"
    COPY = "copy"
    """The hook is for copying KV: in sampled steps it is watched for what it copies."""
    CAUGHT = "caught"
    """Its first calls are watched, for the exceptions that the connector handles itself; those of a
    worker also in steps whose saves are sampled."""


@dataclass(frozen=True)
class Hook:
    """One method of the connector.

    Attributes:
        code: its number in records. Part of the format: append, never renumber.
        role: the side of vLLM that calls it.
        per: how often it is due.
        direction: ``Flag.STORE`` or ``Flag.LOAD`` where it is for copying KV that way.
        watch: how its calls are watched.
        timed: whether it is timed on the device as well.
        in_step: whether it runs within ``execute_model``, so that its time is a share of the step's.
        reads_metadata: whether it works on the metadata that is bound.
        needs: (position, name) of the arguments that its record needs.
        versions: of vLLM whose base class has it.
    """

    name: str
    code: int
    role: Role
    per: Per = Per.NEED
    direction: Flag | None = None
    watch: Watch = Watch.NOT
    timed: bool = False
    in_step: bool = False
    reads_metadata: bool = False
    needs: tuple[tuple[int, str], ...] = ()
    versions: str = since(OLDEST)

    @property
    def layered(self) -> bool:
        return self.per is Per.LAYER

    @property
    def always_due(self) -> bool:
        """Whether every step calls it, so that a step without the call is a gap."""
        return self.per is not Per.NEED


_LAYER = ((0, "layer_name"),)
_REQUEST = ((0, "request"),)

# In the order of their codes, which is that in which vLLM 0.32.0 calls them, later ones appended.
REGISTER_KV_CACHES = Hook("register_kv_caches", 1, Role.WORKER, watch=Watch.CAUGHT, versions=since("0.9.2"))
BIND_METADATA = Hook(
    "bind_connector_metadata", 2, Role.WORKER, Per.STEP, watch=Watch.CAUGHT, in_step=True,
    needs=((0, "connector_metadata"),),
)  # fmt: skip
START_LOAD = Hook(
    "start_load_kv", 3, Role.WORKER, Per.STEP, Flag.LOAD, Watch.COPY,
    timed=True, in_step=True, reads_metadata=True,
)  # fmt: skip
WAIT_LAYER = Hook(
    "wait_for_layer_load", 4, Role.WORKER, Per.LAYER, Flag.LOAD, Watch.COPY,
    timed=True, in_step=True, reads_metadata=True, needs=_LAYER,
)  # fmt: skip
SAVE_LAYER = Hook(
    "save_kv_layer", 5, Role.WORKER, Per.LAYER, Flag.STORE, Watch.COPY,
    timed=True, in_step=True, reads_metadata=True, needs=_LAYER,
)  # fmt: skip
WAIT_SAVE = Hook(
    "wait_for_save", 6, Role.WORKER, Per.STEP, Flag.STORE, Watch.COPY,
    timed=True, in_step=True, reads_metadata=True,
)  # fmt: skip
GET_FINISHED = Hook(
    "get_finished", 7, Role.WORKER, Per.STEP, watch=Watch.CAUGHT, timed=True, in_step=True,
    versions=since("0.9.2"),
)  # fmt: skip
LOAD_ERRORS = Hook("get_block_ids_with_load_errors", 8, Role.WORKER, in_step=True, versions=since("0.11.1"))
CLEAR_METADATA = Hook("clear_connector_metadata", 9, Role.WORKER, Per.STEP, in_step=True)
PREEMPTIONS = Hook(
    "handle_preemptions", 10, Role.WORKER, watch=Watch.CAUGHT, in_step=True, versions=since("0.14.1")
)
LOOKUP = Hook(
    "get_num_new_matched_tokens", 11, Role.SCHEDULER, watch=Watch.CAUGHT,
    needs=(*_REQUEST, (1, "num_computed_tokens")),
)  # fmt: skip
ALLOCATED = Hook(
    "update_state_after_alloc", 12, Role.SCHEDULER, watch=Watch.CAUGHT,
    needs=(*_REQUEST, (2, "num_external_tokens")),
)  # fmt: skip
BUILD_METADATA = Hook(
    "build_connector_meta", 13, Role.SCHEDULER, Per.STEP, watch=Watch.CAUGHT,
    needs=((0, "scheduler_output"),),
)  # fmt: skip
CONNECTOR_OUTPUT = Hook(
    "update_connector_output", 14, Role.SCHEDULER, watch=Watch.CAUGHT, needs=((0, "connector_output"),),
    versions=since("0.10.2"),
)  # fmt: skip
REQUEST_FINISHED = Hook(
    "request_finished", 15, Role.SCHEDULER, watch=Watch.CAUGHT, needs=_REQUEST, versions=since("0.9.2")
)
REQUEST_FINISHED_GROUPS = Hook(
    "request_finished_all_groups", 16, Role.SCHEDULER, watch=Watch.CAUGHT, needs=_REQUEST,
    versions=since("0.11.1"),
)  # fmt: skip
TAKE_EVENTS = Hook("take_events", 17, Role.SCHEDULER, versions=since("0.10.2"))
SHUTDOWN = Hook("shutdown", 18, Role.WORKER, watch=Watch.CAUGHT, versions=since("0.10.2"))
TRANSFER_RESULTS = Hook("get_transfer_results", 19, Role.WORKER, versions=since("0.30.0"))
STATS = Hook("get_kv_connector_stats", 20, Role.WORKER, versions=since("0.11.0"))
BUILD_WORKER_METADATA = Hook("build_connector_worker_meta", 21, Role.WORKER, versions=since("0.18.1"))
REGISTER_CROSS_LAYERS = Hook(
    "register_cross_layers_kv_cache", 22, Role.WORKER, watch=Watch.CAUGHT, versions=since("0.12.0", "0.28.0")
)
RESET_CACHE = Hook("reset_cache", 23, Role.SCHEDULER, versions=since("0.13.0"))

TABLE: tuple[Hook, ...] = (
    REGISTER_KV_CACHES, BIND_METADATA, START_LOAD, WAIT_LAYER, SAVE_LAYER, WAIT_SAVE, GET_FINISHED,
    LOAD_ERRORS, CLEAR_METADATA, PREEMPTIONS, LOOKUP, ALLOCATED, BUILD_METADATA, CONNECTOR_OUTPUT,
    REQUEST_FINISHED, REQUEST_FINISHED_GROUPS, TAKE_EVENTS, SHUTDOWN, TRANSFER_RESULTS, STATS,
    BUILD_WORKER_METADATA, REGISTER_CROSS_LAYERS, RESET_CACHE,
)  # fmt: skip

BY_NAME: dict[str, Hook] = {hook.name: hook for hook in TABLE}
BY_CODE: dict[int, Hook] = {hook.code: hook for hook in TABLE}
NAMES: tuple[str, ...] = tuple(hook.name for hook in TABLE)
CODES = max(BY_CODE) + 1
"""One more than the greatest code: the size of a table by code."""

COPYING = tuple(hook for hook in TABLE if hook.watch is Watch.COPY)
SAVING = tuple(hook for hook in COPYING if hook.direction is Flag.STORE)
LOADING = tuple(hook for hook in COPYING if hook.direction is Flag.LOAD)
WORKER_DUE = tuple(hook for hook in TABLE if hook.role is Role.WORKER and hook.always_due)


def name_of(code: int) -> str:
    """The name of a code, "" where this version has none."""
    hook = BY_CODE.get(code)
    return hook.name if hook is not None else ""
