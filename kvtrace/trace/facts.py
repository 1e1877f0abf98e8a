"""The JSON documents of a spool, a dataclass each: what the agent writes and the analysis reads.

Standard library only: this module is imported inside vLLM's processes. Reading checks at the border:
a field that is missing or of another type has its default, which says "unknown"; keys that this version
does not know are left out. Nothing after it looks into a dictionary.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from kvtrace.trace import format as fmt

D = TypeVar("D", bound="Document")


@dataclass(frozen=True)
class Document:
    """A JSON object with known fields. ``NAMES``: fields whose key in the JSON is another word."""

    NAMES: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def from_json(cls: type[D], value: Mapping[str, Any]) -> D:
        """Never raises: what is no such field is left at its default."""
        given: dict[str, Any] = {}
        for name, key, reader in _fields(cls):
            if key in value and (read := reader(value[key])) is not _WRONG:
                given[name] = read
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        return {key: _plain(getattr(self, name)) for name, key, _ in _fields(type(self))}

    def updated(self: D, later: D) -> D:
        """A document can be sent again with more in it: what the later one knows wins."""
        unknown, known = vars(type(self)()), vars(self)
        news = {name: new for name, new in vars(later).items() if new is not None}
        return replace(self, **{k: new for k, new in news.items() if new != unknown[k] or known[k] is None})


@dataclass(frozen=True)
class Header(Document):
    """The spool's head: the process that writes it. Times: one pair of host clocks, ns. ``boot``: of two
    processes that have the same one, times are of one clock ("" not known)."""

    kvtrace: str = ""
    run: str = ""
    pid: int = -1
    ppid: int = -1
    role: str = "other"
    process: str = ""
    python: str = ""
    argv: tuple[str, ...] = ()
    host: str = ""
    wall_ns: int = 0
    perf_ns: int = 0
    vllm: str | None = None
    boot: str = ""


@dataclass(frozen=True)
class TargetFact(Document):
    """What became of one row of the target table in this process."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.TARGET

    id: str = ""
    module: str = ""
    attr: str = ""
    status: str = "pending"
    detail: str = ""


NOT_OF_TOKENS: Mapping[str, Literal["state", "encoder", "none"]] = {
    "MambaSpec": "state",
    "CircularBufferSpec": "state",
    "CrossAttentionSpec": "encoder",
    "EncoderOnlyAttentionSpec": "none",
}
"""Specs (classes of vLLM's ``v1/kv_cache_interface.py``) of layers that keep no KV of a request's tokens, and
what they keep instead: a state of fixed size a request (Mamba, linear attention, the ring of a compressor),
KV of the encoder's output (cross attention), nothing at all."""


_WHOLE = ("FullAttention", "MLAAttention", "SinkFullAttention", "HiddenStateCache", "RSWA")


@dataclass(frozen=True)
class KvGroup(Document):
    """One KV cache group: the kind of its spec, tokens in a block, names of its layers; ``window``: tokens
    that a new one attends to, None for all before it; ``dtype``: of its KV, as torch calls it."""

    kind: str = ""
    block_size: int | None = None
    layers: tuple[str, ...] = ()
    window: int | None = None
    dtype: str | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether a request keeps its blocks in it: a window gives back those that it has left, and the null
        block stands in their place. Also where the kind is not known."""
        return not self.kind or any(self.kind.startswith(word) for word in _WHOLE)


@dataclass(frozen=True)
class KvTransfer(Document):
    """vLLM's KVTransferConfig."""

    connector: str | None = None
    role: str | None = None
    module_path: str | None = None
    engine_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineFact(Document):
    """One Scheduler instance and the engine it schedules for; ``tag`` 0 where no scheduler announced it."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.ENGINE

    tag: int = 0
    vllm: str | None = None
    torch: str | None = None
    platform: str | None = None
    model: str = ""
    dp_rank: int = 0
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    enforce_eager: bool | None = None
    cudagraph_mode: str | None = None
    scheduler: str | None = None
    kv_transfer: KvTransfer | None = None
    connector_created: bool | None = None
    connector: int | None = None
    kv_groups: tuple[KvGroup, ...] = ()
    multimodal: bool | None = None
    hash_algo: str | None = None

    @property
    def known(self) -> bool:
        """Whether a scheduler announced this engine."""
        return self.tag != 0

    @property
    def ranks(self) -> int:
        """Workers of one replica: TP times PP."""
        return max(1, (self.tp or 1) * (self.pp or 1))


@dataclass(frozen=True)
class WorkerFact(Document):
    """One worker, once its KV cache exists. ``connector``: index of the connector in its process;
    ``kv_layers``: layers that keep KV of tokens; ``other_layers``: those in the KV cache that keep something
    else, with what (a value of NOT_OF_TOKENS); ``slot_bytes``: bytes of one token's slot in a layer, where
    that is known."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.WORKER

    ordinal: int = 0
    rank: int = 0
    tp_rank: int | None = None
    pp_rank: int | None = None
    dp_rank: int = 0
    worker_class: str | None = None
    kv_layers: tuple[str, ...] = ()
    direct_call: Mapping[str, bool] = field(default_factory=dict)
    backends: Mapping[str, str] = field(default_factory=dict)
    connector_live: bool | None = None
    connector: int | None = None
    other_layers: Mapping[str, str] = field(default_factory=dict)
    slot_bytes: Mapping[str, float] = field(default_factory=dict)


UNIT_NAME = re.compile(r"unit|chunk|grain|granul|segment|stripe", re.IGNORECASE)
"""Names that a connector gives to the unit it stores in."""


@dataclass(frozen=True)
class ConnectorFact(Document):
    """One connector object. ``ordinal``: its index in the process (None or 0: it could not be made);
    ``noop``: hooks whose body does nothing, and a lookup with one answer for all; ``overrides``: hooks that
    its class defines; ``ints``: integers that it holds, or its class or module as constants, and that may be
    a storage unit."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.CONNECTOR
    NAMES: ClassVar[Mapping[str, str]] = {"cls": "class"}

    ordinal: int | None = None
    role: str = ""
    parent: int | None = None
    configured: str | None = None
    cls: str = ""
    module: str = ""
    file: str = ""
    ok: bool | None = None
    error_type: str | None = None
    error: str | None = None
    where: str = ""
    proxy: str = ""
    noop: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    ints: Mapping[str, int] = field(default_factory=dict)
    resolves: bool | None = None
    requires_piecewise: bool | None = None


@dataclass(frozen=True)
class EngineArgsFact(Document):
    """Engine arguments that differ from their default, of those that an analysis asks for."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.ENGINE_ARGS

    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HookExceptionFact(Document):
    """An exception that left a hook, or ended a thread of the connector's (hook "thread"; ``step``: the one
    that the thread worked for, or the last one that had begun)."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.EXCEPTION

    hook: str = ""
    layer: str | None = None
    step: int = 0
    connector: int = 0
    type: str = ""
    message: str = ""
    where: str = ""
    count_so_far: int = 1


HOOKS = "hooks"
"""Of an :class:`AgentErrorFact`: hooks of a connector that are not seen, and why."""
HIDES_NO_COPY = frozenset({HOOKS, "config_keys", "device timing", "error", "fingerprints", "log"})
"""``where`` the agent may fail, and all calls and copies are recorded."""


@dataclass(frozen=True)
class AgentErrorFact(Document):
    """The agent itself failed, ``where``, or can't do its part there."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.AGENT_ERROR

    where: str = ""
    error: str = ""


@dataclass(frozen=True)
class ClientIdFact(Document):
    """The client's id of a request, and the one that the engine gave it."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.CLIENT_ID

    client: str = ""
    engine: str = ""


@dataclass(frozen=True)
class HandOverFact(Document):
    """The ids in a request's ``kv_transfer_params``: by them one engine finds what another one computed.

    Attributes:
        request: the engine's id.
        returned: the connector gave them when the request had finished; else they came with the request.
        ids: path of the key ("remote_prefiller.kv_request_id") -> id. Of requests, transfers and engines.
        asks: ``do_remote_prefill``, ``do_remote_decode``: those that are true.
        flags: other keys that are true or false: what a connector may be told of this request.
    """

    CODE: ClassVar[fmt.Fact] = fmt.Fact.HAND_OVER

    request: str = ""
    returned: bool = False
    ids: Mapping[str, str] = field(default_factory=dict)
    asks: tuple[str, ...] = ()
    flags: Mapping[str, bool] = field(default_factory=dict)


TOLD_EACH = 16
"""Exceptions of a kind that are told each; more of them at 32, 64, ..."""


@dataclass(frozen=True)
class SwallowedFact(Document):
    """An exception that the connector handled itself, in a watched call or in its work in the background.

    Attributes:
        hook: the hook's name; for work in the background "thread", "executor" or "asyncio".
        step: the step that the call or work was for, 0 not known. ``layer``: of the hook.
        where: innermost frame of the connector's that the exception passed.
        asked_by: of work in the background, the hook that handed it over; "" where it was none, or not known.
        ended: it ended the job or task: it stands in a future, and whether anybody asks that is not known.
        went_on: after the last one of its kind in this call, the same call still read or wrote KV slots, or
            sent bytes out: a lookup that missed, rather than work that was lost. None: can't be said.
        observed_calls: calls of this hook (pieces of such work) that were watched so far.
        count: such exceptions (hook, type, where) so far; facts come up to the 16th, then at powers of 2.
        logged: the connector logged it, or something else in the same call.
        broad: of a type that ordinary control flow raises, taken by a handler for any exception, in a call
            that read or wrote no KV slot after it.
        far: taken by a handler for any exception, in another function of the connector's than raised it: that
            one ended by it.
    """

    CODE: ClassVar[fmt.Fact] = fmt.Fact.SWALLOWED

    hook: str = ""
    layer: str | None = None
    step: int = 0
    connector: int = 0
    type: str = ""
    message: str = ""
    where: str = ""
    asked_by: str = ""
    ended: bool | None = None
    went_on: bool | None = None
    observed_calls: int = 0
    count: int = 1
    logged: bool | None = None
    broad: bool | None = None
    far: bool | None = None


@dataclass(frozen=True)
class LogFact(Document):
    """A record of WARNING or above that the connector logged. ``shown``: whether a handler shows it."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.LOG

    logger: str = ""
    level: str = ""
    message: str = ""
    hook: str = ""
    layer: str | None = None
    step: int = 0
    connector: int = 0
    shown: bool | None = None
    count: int = 1


@dataclass(frozen=True)
class ConfigKeysFact(Document):
    """Keys of kv_connector_extra_config: given, of these the ones that the connector's source asks for, and
    others that it asks for. ``hidden``: it may ask for any."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.CONFIG_KEYS

    connector: int = -1
    given: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    hidden: bool = False


@dataclass(frozen=True)
class DeviceTimingFact(Document):
    """Whether device times are taken in this process; ``why`` not."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.DEVICE

    on: bool | None = None
    why: str = ""


@dataclass(frozen=True)
class GraphsFact(Document):
    """What was decided about CUDA graphs when an engine's first step began."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.GRAPHS

    tag: int = 0
    mode: str | None = None
    captured: int | None = None
    breakable: bool | None = None
    v2: bool | None = None


STEP = "step"
"""Stage of an engine core that was up: it raised out of a step."""


@dataclass(frozen=True)
class StartFailedFact(Document):
    """An engine that never came up: the stage that raised (a method of the worker, or one of ``engine core``,
    ``configuration``, ``LLM``, ``command line``), and what; or one that ended later (:data:`STEP`).
    ``type``: "" where vLLM refused without an exception; ``where``: the connector's line, else the innermost
    one."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.START_FAILED

    stage: str = ""
    type: str = ""
    message: str = ""
    where: str = ""


NO_DIRECTION, NOBODYS = "neither store nor load", "numbers that no request of this step holds"
"""Shapes of what may name KV, and orders nothing: a table of all who run, a count of something."""


@dataclass(frozen=True)
class UnreadableMetadataFact(Document):
    """Something in a connector's metadata that may name KV and is not understood.

    ``connector``: its index; ``cls``: the metadata's class; ``field``: the path in it (``jobs[].spans``), ""
    for the whole; ``shape``: what stands there, in words; ``load``: it can only be a load; ``steps``: so
    far."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.UNREADABLE_METADATA
    NAMES: ClassVar[Mapping[str, str]] = {"cls": "class"}

    connector: int = 0
    cls: str = ""
    field: str = ""
    shape: str = ""
    load: bool = False
    steps: int = 1


class Limit(str, Enum):
    """Kinds of what a watch could not follow."""

    ADDRESS = "address"
    """The memory of a whole KV tensor was given out by address (``what``: by which method): whoever has it
    may read or write any slot, unseen."""
    OPERATION = "operation"
    """A custom operation (``what``) got a KV tensor: how much it read or wrote is not known."""
    NATIVE = "native"
    """Third-party native code (``what``) ran in a hook before anything of that call was seen."""
    PROCESS = "process"
    """Another process (``what``) was started for the connector: what it does is not seen."""
    THREAD = "thread"
    """A thread (``what``: where it was) is in the connector's code and is not followed."""
    EXCEPTIONS = "exceptions"
    """A debugger or a coverage tool (``what``) holds the trace function: handled exceptions are not seen."""
    STEPS = "steps"
    """From ``step`` on not every step with work is watched: ``what`` is ``full`` where the budget was used
    up, or what the user asked for (``sampled``, ``first``). Of the outermost connector."""


@dataclass(frozen=True)
class WatchLimitsFact(Document):
    """Something of a connector's work that the watch could not follow; at most 8 of a kind for a connector.

    Attributes:
        connector: its index.
        kind: one of :class:`Limit`.
        what: function, operation, program or place; see there.
        where: the connector's line, "" where none is known.
        hook: in which, or which handed the work over; "" for none.
        step: the first one, 0 in none.
    """

    CODE: ClassVar[fmt.Fact] = fmt.Fact.WATCH_LIMITS

    connector: int = 0
    kind: str = ""
    what: str = ""
    where: str = ""
    hook: str = ""
    step: int = 0


@dataclass(frozen=True)
class LoadErrorsFact(Document):
    """Blocks of a request's prompt against the first ones that were computed of the same tokens.

    Attributes:
        request: the engine's id.
        loaded: they were loaded; else computed once more, by the engine itself.
        places: in the request's block table.
        largest, mean: of each layer the difference of two numbers, as a share of what the numbers are: the
            largest of all blocks, and the mean (root of squares) of all.
        differing: blocks of which not all numbers are the same.
    """

    CODE: ClassVar[fmt.Fact] = fmt.Fact.LOAD_ERRORS

    request: str = ""
    loaded: bool = False
    places: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()
    largest: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    differing: int = 0


@dataclass(frozen=True)
class CacheResetFact(Document):
    """vLLM asked the outermost connector to forget what it stored (``reset_cache``), and it did not say that
    it could not. ``step``: the last one that was scheduled before."""

    CODE: ClassVar[fmt.Fact] = fmt.Fact.CACHE_RESET

    step: int = 0


AnyFact = (
    TargetFact | EngineFact | WorkerFact | ConnectorFact | EngineArgsFact | HookExceptionFact | AgentErrorFact
    | ClientIdFact | SwallowedFact | LogFact | ConfigKeysFact | DeviceTimingFact | GraphsFact
    | StartFailedFact | UnreadableMetadataFact | WatchLimitsFact | HandOverFact | LoadErrorsFact
    | CacheResetFact
)  # fmt: skip
FACTS: dict[fmt.Fact, type[AnyFact]] = {kind.CODE: kind for kind in get_args(AnyFact)}


# --- types at the border --------------------------------------------------------------------

_WRONG = object()
_Read = Callable[[Any], Any]
"""A value as a field's type has it, or _WRONG."""


_known_fields: dict[type[Document], tuple[tuple[str, str, _Read], ...]] = {}


def _fields(cls: type[Document]) -> tuple[tuple[str, str, _Read], ...]:
    """(field, key in the JSON, how it is read) of a document's class."""
    known = _known_fields.get(cls)
    if known is None:
        hints, names = get_type_hints(cls), [one.name for one in fields(cls)]
        known = tuple((name, cls.NAMES.get(name, name), _reader(hints[name])) for name in names)
        _known_fields[cls] = known
    return known


def _reader(hint: Any) -> _Read:
    if hint is Any:
        return lambda value: value
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _either([_reader(one) for one in of])
    if origin is tuple:
        return _items(_reader(of[0]))
    return _table(_reader(of[1])) if origin is not None else _scalar(hint)  # Mapping[str, X]


def _either(readers: list[_Read]) -> _Read:
    def either(value: Any) -> Any:
        return next((read for one in readers if (read := one(value)) is not _WRONG), _WRONG)

    return either


def _items(reader: _Read) -> _Read:
    def items(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return _WRONG
        return tuple(read for item in value if (read := reader(item)) is not _WRONG)

    return items


def _table(reader: _Read) -> _Read:
    def table(value: Any) -> Any:
        if not isinstance(value, dict):
            return _WRONG
        return {
            key: read
            for key, item in value.items()
            if isinstance(key, str) and (read := reader(item)) is not _WRONG
        }

    return table


def _scalar(hint: type[Any]) -> _Read:
    if issubclass(hint, Document):
        return lambda value: hint.from_json(value) if isinstance(value, dict) else _WRONG
    number = (int, float) if hint is float else hint

    def scalar(value: Any) -> Any:
        if not isinstance(value, number) or (value.__class__ is bool and hint is not bool):
            return _WRONG
        return float(value) if hint is float else value

    return scalar


def _plain(value: Any) -> Any:
    if isinstance(value, Document):
        return value.to_json()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
