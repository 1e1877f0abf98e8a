"""What the analysis knows about a run: plain dataclasses, and tables as sequences of rows.

Units: *tokens* are positions of a request; a *pair* is one KV-owning
layer on one rank; *token-layers*, in which the ledgers count, are positions times pairs. Times are
nanoseconds of the writing host's monotonic clock unless a name says ``wall``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from kvtrace.errors import KvtraceError
from kvtrace.ledger.contents.distance import Distance
from kvtrace.ledger.device import DeviceTotals
from kvtrace.ledger.ends import LoadEnd, Outcome, SaveEnd
from kvtrace.ledger.loads.outcome import LoadOf, LostResumed
from kvtrace.ledger.states.outcome import States
from kvtrace.terms import SAVED, Grade
from kvtrace.trace import facts as documents
from kvtrace.trace import hooks
from kvtrace.trace.reader import SpoolInfo
from kvtrace.trace.run_file import RunFile
from kvtrace.trace.stuck_file import StuckFile

# ----------------------------------------------------------------------------- tables


class HookSteps(NamedTuple):
    """A row of Run.hooks: one engine tag x process x layer x hook, in distinct real forward steps."""

    engine: int
    pid: int
    process: str
    rank: int  # -1: the scheduler's (build_connector_meta), in schedule() calls
    layer: str  # "" for hooks that run once a step
    hook: str
    eligible: int  # in which it could have fired
    fired: int  # of these, at most all
    with_work: int  # ... with a store or load entry of more than 0 slots, or seen to read or write some
    raised: int


class OpSteps(NamedTuple):
    """A row of Run.ops: the same for attention and KV-cache update bodies."""

    engine: int
    pid: int
    process: str
    rank: int
    layer: str
    op: str
    eligible: int
    fired: int
    direct: int  # in which the body was reached through Dispatch.DIRECT


class SkippedSteps(NamedTuple):
    """A row of Run.skips: attention bodies in real steps, by why the connector's hooks did not run."""

    engine: int
    skip: str  # name of a kvtrace.trace.format.Skip
    layer_steps: int


class CallTimes(NamedTuple):
    """A row of Run.timing: a hook's calls in host time."""

    hook: str
    calls: int
    p50_ns: float
    p99_ns: float
    total_ns: int
    share_of_steps: float | None  # of the workers' execute_model time; None for hooks of the scheduler


class RunRequest(NamedTuple):
    """A row of Run.requests, in order of arrival. A step is 0 where there is none; digests, of what arrived,
    are 0 where unknown."""

    id: str  # the engine's
    client: str  # the client's, "" unknown
    engine: int
    prompt: int
    computed: int  # positions with KV
    output: int
    local: int  # positions reused from the GPU's prefix cache
    external: int  # ... taken from the connector
    offered: int  # what the connector answered; -1: never asked
    chunks: int
    chunk_tokens: tuple[int, ...]  # of the first 16
    first_step: int
    last_step: int
    block: int
    status: str
    t_end: int  # when it was over; 0: that was not seen
    digest: int
    prefix: int
    preemptions: int
    t_first: int
    chunk_step: int  # of the first chunk
    saved: int  # token-layers
    unsaved: int  # token-layers
    diverged: bool  # pairs saved different amounts
    preempt_step: int  # of the last one
    arrived: int  # the prompt as it arrived, of a streaming session its first part
    grown_step: int  # ... the step of the next part


class OutcomeAmount(NamedTuple):
    """A row of Run.base: an outcome of a request's tokens, of any but NOT_SAVED."""

    request: int  # row in Run.requests
    engine: int
    outcome: str
    ended: int  # Outcome.code: of NOT_LOADED a LoadEnd
    amount: int  # token-layers; in Run.whole tokens
    prompt: int  # of these, in positions of the prompt
    grade: Grade
    sent_to: str  # the peer, where nothing but its leaving for one was seen


class LostSpan(NamedTuple):
    """A row of Run.lost: positions [start, end) that were not saved, in pairs with the same outcome."""

    request: int  # row in Run.requests
    engine: int  # its tag
    start: int
    end: int
    pairs: int  # how many
    phase: str  # prefill | decode
    step: int  # in which a prefill chunk computed it, 0 for decode
    ended: SaveEnd
    live: bool  # whether the worker had a connector
    grade: Grade
    part: int = -1  # of several connectors the number (in Run.parts) of the one that came furthest with it


class OfferedEntry(NamedTuple):
    """A row of Run.entries: a store entry of the connector's metadata, in order."""

    request: int  # row in Run.requests
    engine: int
    step: int
    slots: int
    tokens: int
    start: int  # resolved to a position where possible
    available: int  # positions of the request with KV at the end of that step
    asynchronous: bool
    implied: bool  # no metadata says how much: measured on the workers


class RunError(KvtraceError):
    """A run directory that cannot be analysed: one line, what, where, what to do."""


@dataclass(frozen=True)
class Process:
    """One process of vLLM, or with a spool. ``name`` is for people: "engine core", "worker 0", ..."""

    pid: int
    name: str
    role: str  # front | scheduler | worker | other
    rank: int | None
    spool: str | None  # file name, None where the agent never wrote
    records: int
    end: str  # how the spool ends: trailer | open | cut | damaged | ""
    header: documents.Header = field(default_factory=documents.Header)

    @property
    def agent(self) -> bool:
        return self.spool is not None


_TELLING = frozenset(
    hook.name for hook in (hooks.GET_FINISHED, hooks.TRANSFER_RESULTS, hooks.CONNECTOR_OUTPUT)
)


@dataclass(frozen=True)
class Connector(documents.ConnectorFact):
    """One connector object, in the process ``pid``; ``ordinal`` -1: it could not be made."""

    ordinal: int = -1
    ok: bool = True
    pid: int = -1
    spool: str = ""

    def does(self, hook: hooks.Hook) -> bool:
        """Whether this connector does something in a hook."""
        return hook.name not in self.noop

    @property
    def mute(self) -> bool:
        """Whether vLLM can hear from it of no transfer's end: it defines none of the hooks that tell of one
        (``v1/base.py``, 0.32.0: ``get_finished`` answers (None, None))."""
        return bool(self.overrides) and not _TELLING.intersection(self.overrides)

    @property
    def without_kv(self) -> bool:
        """Whether it never gets hold of the KV caches: it is not given them at the start, and does nothing in
        the hooks that are given a layer's, or run while a forward has them."""
        given = {hook.name for hook in (hooks.REGISTER_KV_CACHES, hooks.REGISTER_CROSS_LAYERS)}
        known = bool(self.overrides) and not given.intersection(self.overrides)
        return known and not any(self.does(hook) for hook in hooks.COPYING)

    @property
    def saves_nowhere(self) -> bool:
        """Whether it has no hook on a worker that could save, as far as its code says."""
        empty = {"save_kv_layer", "wait_for_save"} <= set(self.noop) and "get_finished" not in self.overrides
        return empty or self.without_kv

    @property
    def saves_per_layer(self) -> bool:
        """False where ``save_kv_layer`` does nothing: saves are judged at ``wait_for_save``."""
        return self.does(hooks.SAVE_LAYER)


@dataclass(frozen=True)
class Worker:
    """One worker of one engine."""

    engine: int  # tag
    pid: int
    spool: str  # file name
    process: str
    connector: Connector | None
    facts: documents.WorkerFact
    graphs: documents.GraphsFact = field(default_factory=documents.GraphsFact)
    steps: int = 0  # distinct real forward steps executed
    no_forward_steps: int = 0
    modes: Mapping[int, int] = field(default_factory=dict)  # graph mode -> real steps
    batches: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """graph mode -> tokens scheduled and tokens run (padding included), of steps that tell both"""
    capturing_steps: int = 0  # real steps in which a graph was captured
    device_off: str = ""  # why device times were not taken, "" where they were or nobody asked
    exec_ns: int = 0
    last_step: int = 0
    stop_reason: int | None = None  # format.Stop of its spool where its recording is not whole
    hooks_seen: bool = False
    ops_late: bool = False  # vLLM's attention was imported before the agent came: no op body of it is seen
    python: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """graph mode -> layer-steps with an attention body, and with a save hook, run in Python (KV layers)"""
    hook_ns: Mapping[str, int] = field(default_factory=dict)  # host time in each connector hook

    @property
    def rank(self) -> int:
        return self.facts.rank

    @property
    def kv_layers(self) -> tuple[str, ...]:
        return self.facts.kv_layers

    @property
    def state_layers(self) -> tuple[str, ...]:
        """Layers that keep a state a request."""
        return tuple(layer for layer, kept in self.facts.other_layers.items() if kept == "state")

    @property
    def connector_live(self) -> bool | None:
        return self.facts.connector_live

    @property
    def saves_per_layer(self) -> bool:
        """False where its connector saves in ``wait_for_save`` alone."""
        return self.connector is None or self.connector.saves_per_layer

    @property
    def key(self) -> tuple[int, str]:
        """One spool holds at most one worker of an engine."""
        return self.engine, self.spool


NO_KV = "no layer of this model keeps KV of tokens: there are no tokens to count"


@dataclass(frozen=True)
class Engine:
    """One scheduler instance and its workers. ``facts.known``: whether a scheduler announced it."""

    tag: int
    pid: int
    process: str
    facts: documents.EngineFact
    connector: Connector | None  # the scheduler's
    workers: tuple[Worker, ...] = ()  # by rank
    steps: int = 0  # schedule() calls
    real_steps: int = 0  # ... with tokens
    requests: int = 0
    pairs: int = 0  # sum over workers of KV-owning layers
    pairs_known: bool = True  # False: no worker fact, pairs are assumed
    store_entries: int = 0
    unreadable_steps: int = 0
    no_order: bool = False  # some of what its metadata names is none: it names KV of nobody, or no direction
    unknown_steps: int = 0  # ... of these, steps with prompt tokens of which nothing was measured either
    watched_steps: frozenset[int] = frozenset()  # ... and those of which everything was
    decode_entries: int = 0  # store entries that reach past the prompt
    implied_entries: int = 0  # store entries that no metadata named: measured on the workers
    decode_measured: bool | None = None  # implied entries: whether stores of decode tokens were seen
    t_first: int = 0
    t_last: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)  # EngineArgs.given of its process or its front

    @property
    def names_no_store(self) -> bool:
        """Whether something was stored, and no metadata named any of it: the workers know what."""
        return 0 < self.implied_entries == self.store_entries

    @property
    def configured(self) -> documents.KvTransfer | None:
        """The kv_transfer part of the configuration, None without one."""
        return self.facts.kv_transfer

    @property
    def role(self) -> str | None:
        """kv_role, None where none is configured; of a connector of connectors that of all its parts, where
        they have the same (vLLM ``v1/multi_connector.py``: ``connectors`` in its extra configuration)."""
        parts = self.extra.get("connectors")
        roles = {part.get("kv_role") for part in parts or () if isinstance(part, Mapping)}
        if len(roles) == 1 and isinstance(role := next(iter(roles)), str):
            return role
        return self.facts.kv_transfer.role if self.facts.kv_transfer else None

    @property
    def connector_name(self) -> str:
        """The class of its connector, as a sentence begins with it."""
        return self.connector.cls if self.connector else "The connector"

    @property
    def mute(self) -> bool:
        """Whether vLLM can hear of no end of its connector's transfers."""
        return self.connector is not None and self.connector.mute

    @property
    def only_loads(self) -> bool:
        """Whether by its role, or by its code, nobody can expect its connector to save."""
        makers = [worker.connector for worker in self.workers]
        nowhere = bool(makers) and all(one is not None and one.saves_nowhere for one in makers)
        return self.role == "kv_consumer" or nowhere

    @property
    def answers_back(self) -> bool:
        """Whether its workers may tell the scheduler's side what they did not do of what metadata named."""
        hook = hooks.BUILD_WORKER_METADATA
        return any(one.connector is not None and hook.name in one.connector.overrides for one in self.workers)

    @property
    def looks_up(self) -> bool:
        """Whether its connector may find anything: not by its role, and its lookup is no constant answer."""
        return self.role != "kv_producer" and (self.connector is None or self.connector.does(hooks.LOOKUP))

    @property
    def extra(self) -> Mapping[str, Any]:
        """kv_connector_extra_config."""
        return self.facts.kv_transfer.extra if self.facts.kv_transfer else {}

    @property
    def block_size(self) -> int:
        """Tokens in a block of layers that keep KV of tokens; the least where groups differ. A scheduler of
        several groups plans with a size that all of theirs divide; a state's block has none in tokens."""
        known = [group.block_size for group in self.token_groups if group.block_size]
        several = len(self.facts.kv_groups) > 1
        return min(known) if several and known else self.facts.block_size or 0

    @property
    def token_groups(self) -> tuple[documents.KvGroup, ...]:
        """KV cache groups whose layers keep KV of tokens."""
        groups = self.facts.kv_groups
        return tuple(group for group in groups if group.kind not in documents.NOT_OF_TOKENS)

    @property
    def keeps_no_kv(self) -> bool:
        """Whether no layer of its workers keeps KV of tokens: of encoders, and of models of states alone."""
        told = self.facts.known and bool(self.workers) and not self.token_groups
        return told and all(worker.facts.worker_class and not worker.kv_layers for worker in self.workers)

    @property
    def other_layers(self) -> dict[str, str]:
        """Layers in the KV cache, over all ranks, that keep no KV of tokens, and what they keep."""
        return {layer: kept for worker in self.workers for layer, kept in worker.facts.other_layers.items()}

    @property
    def layers(self) -> int:
        """Distinct KV-owning layers over all ranks."""
        return len({layer for worker in self.workers for layer in worker.kv_layers})


@dataclass(frozen=True)
class TargetStatus(documents.TargetFact):
    """One instrumentation target over all processes: ``status`` is the worst of failed > missing > found >
    pending, ``processes`` how many report it."""

    processes: int = 0


@dataclass(frozen=True)
class HookException(documents.HookExceptionFact):
    """``step``, ``layer``: of the first one."""

    layer: str = ""
    pid: int = -1


@dataclass(frozen=True)
class Swallowed(documents.SwallowedFact):
    """``step``, ``layer``, ``asked_by``: of the first one. ``logged``: whether the connector also logged a
    warning in such a call; ``ended``: whether one of them ended a job; ``went_on``: False where one of their
    calls did no more; ``in_vain``: where a file was not there, and as many were opened to write that were not
    there afterwards, and none that was: the first of these."""

    layer: str = ""
    pid: int = -1
    spool: str = ""
    places: tuple[tuple[int, str], ...] = ()  # (step, layer) of the first ones
    in_vain: str = ""

    @property
    def harmless(self) -> bool:
        """Code finds out by it: caught, it proves nothing."""
        return self.type in _HARMLESS and not self.far


_HARMLESS = frozenset(
    {"FileExistsError", "FileNotFoundError", "TimeoutError", "BlockingIOError", "InterruptedError"}
)


@dataclass(frozen=True)
class WatchLimits(documents.WatchLimitsFact):
    """In which process: ``connector`` is the index there."""

    pid: int = -1
    spool: str = ""


class PromptSteps(NamedTuple):
    """Of the workers' ``steps`` with prompt tokens ``watched`` were watched, the others not."""

    watched: int
    steps: int


@dataclass(frozen=True)
class StartFailure(documents.StartFailedFact):
    """In which process."""

    pid: int = -1

    @property
    def line(self) -> str:
        outer = {"command line": "vLLM refused the command line", "LLM": "LLM() raised"}
        where = outer.get(self.stage) or (
            f"the {self.stage} raised" if " " in self.stage or self.stage == "configuration"
            else f"{self.stage} of a worker raised"
        )  # fmt: skip
        return " ".join(filter(None, (where, f"{self.type}: {self.message}".strip(": "))))


@dataclass(frozen=True)
class LogLine(documents.LogFact):
    """``step``, ``layer``: of the first one."""

    layer: str = ""
    pid: int = -1
    spool: str = ""


@dataclass(frozen=True)
class ConfigKeys(documents.ConfigKeysFact):
    """Keys of kv_connector_extra_config, in one process."""

    pid: int = -1
    spool: str = ""


_MOST_EXAMPLES = 16


@dataclass(frozen=True)
class Trust:
    """What the ledger of saves rests on: store calls (one per step, layer and rank with slots to store
    and a hook that ran). Trusts of parts add up."""

    calls: int = 0
    measured: int = 0  # ... of which the slots that were really read are known
    agreed: int = 0  # ... and are what the metadata declared
    blind: int = 0  # watched, and nothing was seen of a connector of which nothing was ever seen
    nothing: int = 0  # ... measured, and 0 slots were read
    empty: int = 0  # of these, with files that hold nothing
    short: int = 0  # ... measured, and fewer slots were read than declared
    short_read: int = 0  # slots read in the short calls
    short_declared: int = 0  # slots that they should have read
    parts: int = 0  # of the short calls, those that read a part of each slot
    shared: tuple[tuple[int, str, tuple[int, ...]], ...] = ()
    """Step, layer and ranks that wrote one file; the first few."""
    shared_files: int = 0
    files_apart: int = 0
    """Times that a file of one layer was written, by one rank alone."""

    def __add__(self, other: Trust) -> Trust:
        values = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Trust(**{**values, "shared": values["shared"][:_MOST_EXAMPLES]})

    def __mul__(self, times: int) -> Trust:
        """So many that are alike, and give no example."""
        return Trust(**{name: value * times for name, value in vars(self).items()})


@dataclass(frozen=True)
class AsyncSave:
    """A request whose blocks were kept for an asynchronous save (TransferBegun with a store)."""

    request: int  # row in Run.requests
    end: SaveEnd  # SAVED, PENDING, FAILED or NOT_FINISHED
    reported: tuple[int, ...]  # ranks of the workers that said it is finished
    missing: tuple[int, ...]
    unfinished: Mapping[str, SaveEnd]  # worker's spool ("" all) -> its end, where it did not end well
    early: bool = False  # a worker told its end, and read it after that alone
    idle: bool = False  # pending for long, and nothing was seen to be read of it
    told: int = 0  # when its end was, 0 never


K = TypeVar("K")


@dataclass(frozen=True)
class Ledger(Generic[K]):
    """A ledger: ``sum(accounts.values()) == total`` to the unit, no negative account."""

    total: int
    accounts: Mapping[K, int]  # token-layers
    pairs: int | None
    tokens: Mapping[K, float]
    total_tokens: float
    trust: str = "declared"
    trust_note: str = ""
    grades: Mapping[K, Mapping[Grade, int]] = field(default_factory=dict)
    """Of each account, its token-layers by how well that is seen; they sum to the account."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Peer -> token-layers, of those that are saved with grade READ, as many bytes of which were sent to it:
    what it keeps was not seen."""
    prompts: Mapping[K, Mapping[Grade, int]] = field(default_factory=dict)
    """Of saves: the prompt tokens that were computed here, by outcome and how well that is seen."""

    def check(self) -> None:
        """Raises AssertionError where the accounts do not sum to the total."""
        short = self.total - sum(self.accounts.values())
        assert short == 0, f"ledger off by {short} token-layers of {self.total}"
        negative = {name: n for name, n in self.accounts.items() if n < 0}
        assert not negative, f"negative accounts: {negative}"
        for name, grades in self.grades.items():
            seen = sum(grades.values())
            assert seen == self.accounts.get(name, 0), (
                f"grades of {name}: {seen} of {self.accounts.get(name)}"
            )
        read = next((of.get(Grade.READ, 0) for name, of in self.grades.items() if name == SAVED), 0)
        sent = sum(self.sent.values())
        assert sent <= read, f"{sent} token-layers were sent, of {read} read"


class OutsideBytes(NamedTuple):
    """Bytes of one connector object in one process. ``connector``: its index there; ``read``: of KV, from the
    KV cache; ``came``: into files, None where that can't be told (written in place, by address, through
    sockets); ``at_end``: of these, there at the end; ``accounted``: bytes read for which as many came;
    ``token``: bytes of one token in all layers; ``went``: into files and to peers;
    ``files``: that it wrote; ``removed``: of these, by itself; ``put`` and ``taken_away``: bytes in them, as
    far as they are known; ``empty``: that it opened several files, none ever held a byte, and none went to
    a peer."""

    connector: int
    read: int
    came: int | None
    at_end: int | None
    accounted: int
    token: int
    went: int = 0
    files: int = 0
    removed: int = 0
    put: int = 0
    taken_away: int = 0
    empty: bool = False


@dataclass(frozen=True)
class Span:
    """What became of positions [start, end) of a watched request, in the pairs that fared alike."""

    request: int  # row in Run.requests
    start: int
    end: int
    outcome: Outcome
    step: int  # in which a prefill chunk computed them, 0 for none
    live: bool  # whether the worker had a connector
    pairs: tuple[int, ...]
    """Pairs of the engine: its workers in order, each with its KV layers in order."""
    part: int = -1  # of several connectors the number (in Run.parts) of the one whose outcome it is


@dataclass(frozen=True)
class Run:
    """Everything the rules and the report read."""

    directory: Path
    run: RunFile
    processes: Sequence[Process]
    engines: Sequence[Engine]
    connectors: Sequence[Connector]
    spools: Sequence[SpoolInfo]
    targets: Sequence[TargetStatus]
    exceptions: Sequence[HookException]
    agent_errors: Sequence[tuple[int, str, str]]  # pid, where, error
    hooks: Sequence[HookSteps]
    ops: Sequence[OpSteps]
    skips: Sequence[SkippedSteps]
    timing: Sequence[CallTimes]
    requests: Sequence[RunRequest]
    entries: Sequence[OfferedEntry]
    lost: Sequence[LostSpan]
    base: Sequence[OutcomeAmount]
    loads: Ledger[LoadEnd]
    total: int  # token-layers of the saves ledger
    whole: Sequence[OutcomeAmount] = ()
    """As ``base``, in tokens: each that no pair lost, with the least outcome of its pairs."""
    kept: Sequence[PairKept] = ()
    places: Sequence[Place] = ()
    notes: Sequence[str] = ()
    """Facts about the reading itself, for the report's limits."""
    incomplete: Sequence[str] = ()
    """A line for each process whose recording is not whole."""
    spans: Sequence[Span] = ()
    """Only of the requests that ``read_run`` was asked to watch."""
    swallowed: Sequence[Swallowed] = ()
    logs: Sequence[LogLine] = ()
    config_keys: Sequence[ConfigKeys] = ()
    unreadable_metadata: Sequence[documents.UnreadableMetadataFact] = ()
    watch_limits: Sequence[WatchLimits] = ()
    trust: Trust = Trust()
    async_saves: Sequence[AsyncSave] = ()
    device: DeviceTotals = field(default_factory=DeviceTotals)
    start_failures: Sequence[StartFailure] = ()
    """Why an engine never came up, the innermost processes only."""
    ended_in_steps: Sequence[StartFailure] = ()
    """What raised out of a step of an engine core, and ended it."""
    partly_watched: PromptSteps | None = None
    """Of the workers in which not all steps were watched."""
    load_rows: Sequence[LoadOf] = ()
    """The ledger of loads, request by request; ``loads`` is its sum."""
    lost_resumed: Sequence[LostResumed] = ()
    """Beside it: what requests that were let in anew after a preemption were to load, and did not."""
    read_in_part: int = 0
    """How often a layer's slots were read in a step, of each a part alone (some heads, K or V alone); 0 where
    any slot of the run was read whole."""
    in_common: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Row of a request -> (digest, tokens) of the beginnings that another prompt of the run has too."""
    stuck: StuckFile = field(default_factory=StuckFile)
    parts: Sequence[Part] = ()
    """Of engines with several connectors inside one: the run as each of these saw it."""
    compared: Mapping[str, int] = field(default_factory=dict)
    """Loaded blocks of KV by what their fingerprints say (:mod:`kvtrace.ledger.contents.compare`)."""
    across_salts: Mapping[int, int] = field(default_factory=dict)
    """Row of a request -> tokens of its load that only requests under another cache salt had computed."""
    apart: int = 0
    """Blocks that two engines computed, no layer of any to the same: neither proves a load of the other."""
    from_apart: Mapping[int, int] = field(default_factory=dict)
    """Row of a request -> tokens of its load that only such another engine had computed to this."""
    altered_by: Distance | None = None
    """How far altered blocks are from what their tokens computed to, all together, where known."""
    states: States | None = None
    """The book of layers that keep a state a request; None where there is none."""
    outside: Sequence[OutsideBytes] = ()
    """What connectors that read KV did outside their processes."""
    asking: frozenset[str] = frozenset()
    """Ids of the requests that ask for a transfer between a prefill and a decode engine."""
    flags: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Id of a request -> what else its ``kv_transfer_params`` tell the connector."""

    def workers(self) -> list[Worker]:
        return [worker for engine in self.engines for worker in engine.workers]


@dataclass(frozen=True)
class Place:
    """A place to which the workers' connectors wrote, or that their configuration names ("configured").

    ``files``, ``size``: what lay there when the run was over, in bytes; of a peer, what was sent.
    ``engines``: the tags of those whose workers wrote there. ``older``: files there from before the run.
    """

    kind: str
    name: str
    files: int = 0
    size: int = 0
    engines: frozenset[int] = frozenset()
    older: int = 0


@dataclass(frozen=True)
class PairKept:
    """Prompt tokens that were saved in one layer on one rank. ``unseen``: that may have been."""

    engine: int
    rank: int
    layer: str
    tokens: int
    unseen: int = 0


@dataclass(frozen=True)
class Part:
    """One connector inside another one. ``run``: with those engines alone that have it, and with it as their
    connector; requests as in the whole run."""

    name: str
    run: Run
