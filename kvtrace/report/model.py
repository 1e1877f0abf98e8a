"""The shape of ``report.json`` (``kvtrace.report/2``), written once.

Types, bounds, caps and descriptions stand here. mypy holds the builder and the readers to the types, a report
is checked against the JSON Schema that :mod:`kvtrace.report.shape` makes of them, and the published file
``schema/kvtrace.report.2.json`` is that schema (``python scripts/schemas.py`` writes it).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, TypedDict

from kvtrace.report.shape import Bounds, Digits, Most, json_schema
from kvtrace.terms import Stage as StageName

MAX_COVERAGE_ROWS = 4096
MAX_REQUEST_ROWS = 200
MAX_EVENTS = 3
MAX_CHUNKS_SHOWN = 16
MAX_PROCESSES = 4096
MAX_TARGETS = 4096
MAX_GRAPH_ROWS = 256
MAX_CONNECTORS = 64
MAX_KV_GROUPS = 64
MAX_PEERS = 64
MAX_PLACES = 16
MAX_LOGGED = 16
MAX_LAYER_ROWS = 256
STAGE_NAMES = tuple(stage.label for stage in StageName)

_MOST = 2**63 - 1
Count = Annotated[int, Bounds(0, _MOST)]
Rank = Annotated[int, Bounds(-1, _MOST)]
Integer = Annotated[int, Bounds(-_MOST, _MOST)]
StageNumber = Annotated[int, Bounds(0, len(STAGE_NAMES) - 1)]
Number = Annotated[float, Bounds(0, 1e18)]
Share = Annotated[float, Bounds(0, 1), Digits(6)]
Ratio = Annotated[float, Bounds(0, 1e18), Digits(6)]
Severity = Literal["fault", "limit", "note"]
Role = Literal["front", "scheduler", "worker", "other"]
Trust = Literal["measured", "declared", "mixed", "unknown", "none"]
Kept = Literal["tokens", "state", "encoder", "none"]


class ProcessRow(TypedDict):
    """One process of the run"""

    pid: Annotated[Count, "process id on the run's host"]
    name: Annotated[str, "'engine core', 'worker 0', 'API server', ..."]
    role: Annotated[Role, "the part of vLLM that runs in it"]
    rank: Annotated[Rank | None, "rank of the worker, null where it is none"]
    spool: Annotated[str | None, "its spool file, relative to the run directory"]
    records: Annotated[Count, "records read from its spool"]
    end: Annotated[str, "how its spool ends: trailer, open (killed), cut, damaged; empty without a spool"]
    agent: Annotated[bool, "true where the agent was loaded (a spool exists)"]


Connector = TypedDict(
    "Connector",
    {
        "name": Annotated[str, "name in the configuration"],
        "class": Annotated[str, "class that is live"],
        "module": Annotated[str, "its module"],
        "file": Annotated[str, "the file that the class came from"],
        "role": Annotated[str, "kv_role: kv_producer, kv_consumer, kv_both"],
    },
)


class KvGroups(TypedDict):
    """KV cache groups of one kind and block size"""

    kind: Annotated[str, "class of their spec in vLLM"]
    keeps: Annotated[
        Kept,
        "what its layers keep: KV of tokens, a state a request, KV of the encoder's output, nothing",
    ]
    block_size: Annotated[Count | None, "tokens per block"]
    groups: Annotated[Count, "how many groups"]
    layers: Annotated[Count, "layers in all of them"]


class EngineRow(TypedDict):
    """One engine (one scheduler instance)"""

    tag: Annotated[Count, "number of the scheduler instance in this run"]
    dp_rank: Annotated[Count, "data-parallel rank"]
    platform: Annotated[str, "cpu, cuda, ..."]
    model: Annotated[str, "model name or path"]
    connector: Annotated[
        Connector | None, "what is configured, and what is live; null without a KV connector"
    ]
    tp: Annotated[Count | None, "tensor-parallel size"]
    pp: Annotated[Count | None, "pipeline-parallel size"]
    block_size: Annotated[Count | None, "tokens per KV block"]
    prefix_caching: Annotated[bool | None, "GPU prefix cache switched on"]
    max_num_batched_tokens: Annotated[Count | None, "tokens per step at most"]
    chunked_prefill: Annotated[bool | None, "prompts may be computed in several steps"]
    enforce_eager: Annotated[bool | None, "CUDA graphs and compilation switched off"]
    cudagraph_mode: Annotated[str, "NONE, PIECEWISE, FULL, ...; empty where unknown"]
    kv_layers: Annotated[Count, "layers that own KV"]
    pairs: Annotated[Count, "(layer, rank) pairs: KV-owning layers on all ranks"]
    ranks: Annotated[list[Rank], "ranks that were seen"]
    steps: Annotated[Count, "scheduler steps"]
    real_steps: Annotated[Count, "steps with at least one token"]
    requests: Annotated[Count, "requests seen by this scheduler"]
    dp: Annotated[Count | None, "data-parallel size"]
    attention: Annotated[list[str], "attention backends of its KV layers"]
    runner: Annotated[str, "model runner: V1, V2; empty where unknown, or where its workers differ"]
    graphs_asked: Annotated[
        str,
        "cudagraph_mode of the command: NONE with --enforce-eager, default without one, empty unknown",
    ]
    graphs_used: Annotated[str, "cudagraph_mode of its workers when their first step began; empty unknown"]
    direct_calls: Annotated[
        Count | None,
        "(layer, rank) pairs whose attention is called directly (use_direct_call), past the dispatcher; null "
        "where unknown",
    ]
    kv_groups: Annotated[list[KvGroups], Most(MAX_KV_GROUPS), "its KV cache groups; empty where unknown"]


class _OptionalRun(TypedDict, total=False):
    running: Annotated[bool, "a process of the run was still recording when the report was made"]
    profiles: Annotated[
        list[str], Most(MAX_PROCESSES), "py-spy's profiles (speedscope), as paths in the run directory"
    ]


class RunFacts(_OptionalRun):
    """What ran"""

    name: Annotated[str, "name of the run"]
    command: Annotated[list[str], "the traced command, secrets masked"]
    started: Annotated[str | None, "ISO 8601"]
    seconds: Annotated[Number, "duration, seconds"]
    exit_code: Annotated[Integer | None, "exit code of the command"]
    signal: Annotated[str | None, "signal that ended it"]
    kvtrace: Annotated[str, "version"]
    vllm: Annotated[str | None, "version"]
    torch: Annotated[str | None, "version"]
    python: Annotated[str | None, "version"]
    host: Annotated[str, "host name"]
    processes: Annotated[
        list[ProcessRow], Most(MAX_PROCESSES), "those with a spool, and those of vLLM without one"
    ]
    engines: Annotated[list[EngineRow], Most(MAX_PROCESSES), "by tag"]


class TargetRow(TypedDict):
    """One place in vLLM that the agent hooks"""

    id: Annotated[str, "stable id of the hooked place"]
    module: Annotated[str, "Python module"]
    attr: Annotated[str, "attribute in the module"]
    status: Annotated[
        Literal["found", "late", "missing", "failed", "pending"],
        "late: vLLM's attention was imported before the agent came, so it stays unhooked; pending: its "
        "module was never imported, so it was not needed",
    ]
    processes: Annotated[Count, "processes that report this status"]
    detail: Annotated[str, "why, where it is not found"]


class Instrumentation(TypedDict):
    """What the agent hooked"""

    targets: Annotated[list[TargetRow], Most(MAX_TARGETS), "by id"]
    found: Annotated[Count, "targets hooked"]
    missing: Annotated[Count, "targets that this vLLM does not have"]
    failed: Annotated[Count, "targets that could not be hooked"]


class HookRow(TypedDict):
    """Coverage of one connector hook in one process and layer"""

    process: Annotated[str, "process name"]
    rank: Annotated[Rank | None, "rank"]
    layer: Annotated[str | None, "layer name, null for a hook of the whole step"]
    hook: Annotated[str, "connector method"]
    eligible: Annotated[Count, "real steps (and layers) in which vLLM should have called it"]
    fired: Annotated[Count, "calls in those steps"]
    with_work: Annotated[
        Count,
        "calls with something to store or load: the bound metadata names it, or the call was seen to do it",
    ]
    raised: Annotated[Count, "calls that raised"]


class OpRow(TypedDict):
    """Coverage of one attention op in one process and layer"""

    process: Annotated[str, "process name"]
    rank: Annotated[Rank | None, "rank"]
    layer: Annotated[str | None, "layer name, null for a hook of the whole step"]
    op: Annotated[str, "attention or KV-cache-update op"]
    eligible: Annotated[Count, "real steps in which the body should have run"]
    fired: Annotated[Count, "runs of its Python body"]
    direct: Annotated[Count, "of these, runs that were called past the dispatcher"]


class SummaryRow(TypedDict):
    """Coverage of one hook over all ranks and layers"""

    hook: Annotated[str, "connector method"]
    eligible: Annotated[Count, "over all ranks and layers"]
    fired: Annotated[Count, "calls"]
    with_work: Annotated[Count, "calls with something to store or load"]
    share: Annotated[Ratio | None, "fired / eligible"]
    idle: Annotated[bool, "its body does nothing, in every worker's connector"]


class Coverage(TypedDict):
    """Which hooks fired"""

    hooks: Annotated[list[HookRow], Most(MAX_COVERAGE_ROWS), "connector hooks"]
    ops: Annotated[list[OpRow], Most(MAX_COVERAGE_ROWS), "attention and KV-cache-update ops"]
    summary: Annotated[list[SummaryRow], "a row per hook"]


Stage = TypedDict(
    "Stage",
    {
        "stage": Annotated[StageNumber, "stage number"],
        "name": Annotated[str, ", ".join(STAGE_NAMES)],
        "in": Annotated[Count, "prompt tokens that reached the stage"],
        "out": Annotated[Count, "prompt tokens that passed it"],
        "note": Annotated[str, "what was seen there; may be empty"],
    },
)


class Sent(TypedDict):
    """Saved tokens of which it was only seen that they left for a peer"""

    to: Annotated[str, "the peer, as the process named it: tcp host:port, unix path; others: all that follow"]
    amount: Annotated[Count, "token-layers"]


class LedgerRow(TypedDict):
    """A ledger: each token-layer has exactly one outcome"""

    unit: Annotated[Literal["token-layers"], "one token in one KV-owning layer on one rank"]
    total: Annotated[Count, "token-layers; equal to the sum of the outcomes"]
    accounts: Annotated[
        dict[str, Count],
        "token-layers per outcome: saved, loaded, local-hit, pending, not-observed, not-saved:<cause>, "
        "not-loaded:<cause>, clamped:<cause>, missed:<cause>",
    ]
    pairs: Annotated[Count | None, "(layer, rank) pairs of the engine; null where the engines differ"]
    tokens: Annotated[
        dict[str, Number],
        "tokens per outcome: a token is saved where it is saved in every pair, and has "
        "the outcome of the pairs that lost it else",
    ]
    total_tokens: Annotated[Number, "tokens in all"]
    trust: Annotated[Trust, "in one word: measured (all grade read or better), mixed, declared; see grades"]
    trust_note: Annotated[str, "what the grades mean that this ledger has"]
    sent: Annotated[
        list[Sent],
        Most(MAX_PEERS),
        "of what is saved with grade written: what was seen leaving through a socket, no more, and for "
        "which peer; what a peer keeps was not seen. All else of that grade was seen at rest. Empty of loads",
    ]
    grades: Annotated[
        dict[str, dict[str, Count]],
        "token-layers per outcome by how well that is seen: proved, written, read, declared, not observed",
    ]
    prompts: Annotated[
        dict[str, dict[str, Count]],
        "of saves, the prompt tokens that were computed here (neither loaded nor reused), per outcome by how "
        "well that is seen: what the verdict counts. Empty of loads",
    ]


class StateBook(TypedDict):
    """States by what became of them: each has exactly one outcome"""

    total: Annotated[Count, "states; equal to the sum of the outcomes"]
    accounts: Annotated[
        dict[str, Count],
        "states per outcome. Saves: taken (all of it was read at the end of the prompt), taken-elsewhere "
        "(one of the request at another position, or at one that is not known), partly-taken, not-taken, "
        "not-observed. Loads: given (written before the forward that goes on from it), partly-given, "
        "not-given, not-observed",
    ]


class StateBooks(TypedDict):
    """States of Mamba and linear attention: one a request, layer and rank, that at the end of its prompt"""

    unit: Annotated[Literal["states"], "the state of one request in one layer on one rank"]
    layers: Annotated[Count, "layers that keep a state"]
    pairs: Annotated[Count, "(layer, rank) pairs of them"]
    requests: Annotated[Count, "requests whose prompt was computed to its end"]
    grade: Annotated[
        Literal["read"], "how well it is seen: what was read was not followed to where it is stored"
    ]
    saves: Annotated[StateBook, "the state at the end of each prompt"]
    loads: Annotated[StateBook, "that of each request for which tokens of the connector's were taken"]


class WithStates(TypedDict, total=False):
    states: Annotated[
        StateBooks, "states, which are no KV of tokens; only of models that have layers with a state"
    ]


class Ledgers(WithStates):
    """Where every token went"""

    saves: Annotated[LedgerRow, "every token computed or reused"]
    loads: Annotated[LedgerRow, "every prompt token"]


class EventRow(TypedDict):
    """One concrete event"""

    request: Annotated[str, "engine's request id"]
    step: Annotated[Count, "step number in its engine"]
    rank: Annotated[Rank | None, "rank"]
    layer: Annotated[str | None, "layer"]
    text: Annotated[str, "what happened"]


class FindingRow(TypedDict):
    """A cause, with its evidence and remedy"""

    id: Annotated[str, "stable cause id (kvtrace docs ID)"]
    severity: Annotated[Severity, "fault: needs a fix; limit: works as built; note: information"]
    stage: Annotated[StageNumber | None, "stage at which the tokens were lost; null where none applies"]
    tokens: Annotated[Number, "tokens that it explains, in one layer on one rank at least"]
    share: Annotated[Share, "of the ledger's total tokens, 0..1"]
    requests: Annotated[Count, "requests concerned"]
    title: Annotated[str, "one line, with the numbers"]
    evidence: Annotated[list[str], "sentences with the numbers"]
    events: Annotated[list[EventRow], Most(MAX_EVENTS), "examples"]
    remedy: Annotated[list[str], "what to do, the connector's own fix first"]
    versions: Annotated[str, "vLLM versions for which the rule holds"]
    docs: Annotated[str, "page of the cause"]
    headline: Annotated[str, "the reason in a clause, as the verdict says it; empty where it is none"]
    pattern: Annotated[
        str, "what all these requests have in common, and none of those that fared well; empty where unknown"
    ]
    connector: Annotated[
        str,
        "of several connectors inside one, the name of the one (as in connectors) whose finding it is and in "
        "whose ledger its tokens are counted; empty where it is no single one's",
    ]
    grade: Annotated[
        str | None,
        "how well it is seen what became of these tokens, as in the ledgers' grades: the least of them; null "
        "where it concerns none",
    ]


class RuledOutRow(TypedDict):
    """A cause that was checked and is not it"""

    id: Annotated[str, "cause id"]
    evidence: Annotated[str, "why it is not the cause"]


class NotObservedRow(TypedDict):
    """What cannot be said of this run"""

    id: Annotated[str, "cause id or topic"]
    why: Annotated[str, "why nothing can be said"]


class ConnectorBooks(TypedDict):
    """One connector inside another one (MultiConnector): what it did by itself"""

    name: Annotated[str, "its class, with a number where several are alike, and the way to it"]
    engines: Annotated[list[Count], "tags of the engines that have it"]
    verdict: Annotated[str, "what became of the prompt tokens with it alone, in one sentence"]
    ledger: Annotated[Ledgers, "where every token went with it alone"]
    coverage: Annotated[list[SummaryRow], "its hooks, a row each"]
    findings: Annotated[list[str], "ids of its findings; they stand, with its name, in the report's findings"]
    ruled_out: Annotated[list[RuledOutRow], "checked, and not the cause with it"]
    not_observed: Annotated[list[NotObservedRow], "what cannot be said of it"]


class RequestRow(TypedDict):
    """One request"""

    id: Annotated[str, "engine's request id"]
    client: Annotated[str | None, "client's request id"]
    engine: Annotated[Count, "engine tag"]
    prompt: Annotated[Count, "prompt tokens"]
    computed: Annotated[Count, "tokens computed or reused"]
    output: Annotated[Count, "tokens generated"]
    local: Annotated[Count, "prompt tokens reused from the GPU prefix cache"]
    external: Annotated[Count, "prompt tokens accepted from the connector"]
    chunks: Annotated[Count, "prefill chunks"]
    chunk_tokens: Annotated[list[Count], Most(MAX_CHUNKS_SHOWN), "tokens of the first chunks"]
    saved: Annotated[Number, "tokens whose KV was saved"]
    not_saved: Annotated[Number, "tokens that were lost on the way"]
    verdict: Annotated[
        str,
        "the id of a fault that its tokens met; or what became of most of them: saved, loaded, local-hit, "
        "pending, not-observed, or the id of a cause; partly-saved where prompt tokens are not kept, "
        "prompt-saved where only later tokens are not (so with loaded and local-hit)",
    ]
    status: Annotated[str, "how it ended in vLLM; empty where it did not"]
    first_step: Annotated[Count, "first step"]
    last_step: Annotated[Count, "last step"]
    block: Annotated[Count, "tokens per KV block"]
    sent: Annotated[Number, "tokens, of those saved, of which it was only seen that they left for a peer"]
    grade: Annotated[str | None, "how well it is seen that its tokens were saved; null where none were"]
    not_observed: Annotated[Number, "tokens of which it is not observed what became of them"]


class _OptionalRequests(TypedDict, total=False):
    unended: Annotated[Count, "requests that had not ended when the recording did; absent where all had"]


class RequestRows(_OptionalRequests):
    """Verdict per request"""

    total: Annotated[Count, "requests of the run"]
    shown: Annotated[Count, "rows listed here"]
    rows: Annotated[list[RequestRow], Most(MAX_REQUEST_ROWS), "worst first"]


class TimingRow(TypedDict):
    """Duration of one hook"""

    hook: Annotated[str, "connector method"]
    clock: Annotated[Literal["host", "device"], "host: perf_counter_ns of the process"]
    count: Annotated[Count, "calls"]
    p50_ns: Annotated[Count, "median, nanoseconds"]
    p99_ns: Annotated[Count, "99th percentile, nanoseconds"]
    total_ns: Annotated[Count, "sum, nanoseconds"]
    share_of_steps: Annotated[Ratio | None, "total / duration of the real steps on the same clock"]


class Damaged(TypedDict):
    """A spool that is cut or damaged"""

    spool: Annotated[str, "file"]
    detail: Annotated[str, "what is wrong with it"]


class Tracer(TypedDict):
    """What tracing itself cost"""

    spool_bytes: Annotated[Count, "bytes of all spools"]
    records: Annotated[Count, "records in all spools"]
    in_c: Annotated[Count, "spools that the recorder in C wrote; the one in Python wrote the others"]


class PromptStepsRow(TypedDict):
    """Steps with prompt tokens, of workers in which not all of them were watched"""

    watched: Annotated[Count, "in which what the connector reads and writes was watched"]
    steps: Annotated[Count, "all of them"]


class _OptionalLimits(TypedDict, total=False):
    partly_watched: Annotated[PromptStepsRow, "summed over workers; absent where all steps were watched"]


class Limits(_OptionalLimits):
    """What this report cannot say"""

    notes: Annotated[list[str], "one sentence each"]
    lost_records: Annotated[Count, "records that were not written, or that are damaged"]
    damaged: Annotated[list[Damaged], "read up to the damage"]
    tracer: Annotated[Tracer, "what was written"]


class ModeRow(TypedDict):
    """The steps of one worker in one CUDA-graph mode"""

    mode: Annotated[str, "mode that the steps really used: NONE, PIECEWISE, FULL or unknown"]
    steps: Annotated[Count, "real forward steps"]
    tokens: Annotated[Count, "tokens scheduled, in the steps whose padded size is known"]
    padded: Annotated[Count, "tokens that the model ran in these steps, padding included"]
    layer_steps: Annotated[Count, "KV layers times steps"]
    bodies: Annotated[Count, "of these, with an attention body that ran in Python"]
    saves: Annotated[Count, "of these, with a call of save_kv_layer"]


class GraphRow(TypedDict):
    """CUDA graphs of one worker"""

    process: Annotated[str, "name of the process"]
    rank: Annotated[Count, "rank"]
    runner: Annotated[str, "model runner: V1, V2, or empty where unknown"]
    asked: Annotated[str, "cudagraph_mode of the command; default where it names none"]
    configured: Annotated[str, "cudagraph_mode of the engine's configuration"]
    used: Annotated[str, "cudagraph_mode of the worker when its first step began"]
    why: Annotated[list[str], "what led from one to the other"]
    breakable: Annotated[bool | None, "whether breakable graphs are on"]
    captured: Annotated[Count | None, "graphs captured before the first step"]
    capturing_steps: Annotated[Count, "real steps in which a graph was captured"]
    modes: Annotated[list[ModeRow], "the steps by mode"]


class DeviceRow(TypedDict):
    """Calls of one hook or op that were timed on both clocks"""

    name: Annotated[str, "connector method or op"]
    kind: Annotated[Literal["hook", "op"], "what it is"]
    count: Annotated[Count, "calls with both times"]
    host_p50_ns: Annotated[Count, "host time, median, nanoseconds"]
    host_p99_ns: Annotated[Count, "host time, 99th percentile"]
    host_total_ns: Annotated[Count, "host time, sum"]
    device_p50_ns: Annotated[Count, "device time between the events, median"]
    device_p99_ns: Annotated[Count, "device time, 99th percentile"]
    device_total_ns: Annotated[Count, "device time, sum"]
    other_stream: Annotated[
        Count, "more calls, that ended on another stream than they began: without a device time"
    ]
    behind: Annotated[Count, "calls of a hook that began while the device had work left (0.1 ms or more)"]
    waited: Annotated[Count, "of these, returned when it was done and took little more time than that"]


class DeviceTimes(TypedDict):
    """Device times"""

    steps: Annotated[Count, "steps that were timed"]
    calls: Annotated[Count, "calls that were timed"]
    untimed: Annotated[Count, "calls of these steps that were not"]
    lost: Annotated[Count, "calls whose times could not be read"]
    own_ns: Annotated[Count, "host time that the timing itself took"]
    busy_ns: Annotated[Count, "host time of the steps up to the last timed one"]
    rows: Annotated[list[DeviceRow], "a row per hook and op"]


class PlaceRow(TypedDict):
    """A place to which the connector's workers wrote"""

    kind: Annotated[
        Literal["directory", "database", "shared memory", "peer", "configured"],
        "configured: the connector's configuration names it, and nothing was written to any place",
    ]
    name: Annotated[str, "path, or the peer's host and port"]
    files: Annotated[Count, "of a directory: files that the run wrote and that lay there when it was over"]
    size: Annotated[Count, "their bytes; of a peer, bytes sent; of others, bytes written"]
    older: Annotated[Count, "files in it, or below it, from before the run"]


class LoggedRow(TypedDict):
    """A warning or an error that a connector logged"""

    where: Annotated[str, "the hook in which it was logged, or other work of the connector's"]
    level: Annotated[str, "WARNING or above"]
    logger: Annotated[str, "name of the logger"]
    message: Annotated[str, "its text; numbers and ids may stand as …"]
    count: Annotated[Count, "how often"]


class LayerKept(TypedDict):
    """Prompt tokens that were saved in one layer on one rank"""

    engine: Annotated[Count, "number of the scheduler instance"]
    rank: Annotated[Rank, "rank of the worker"]
    layer: Annotated[str, "layer name"]
    tokens: Annotated[Count, "prompt tokens whose KV was saved there"]
    most: Annotated[Count, "the most that was saved in any layer on any rank of this engine"]


class _Optional(TypedDict, total=False):
    """Fields that are absent where there is no such thing."""

    logged: Annotated[
        list[LoggedRow], Most(MAX_LOGGED), "what connectors logged: errors first, then the most frequent"
    ]
    layers: Annotated[
        list[LayerKept],
        Most(MAX_LAYER_ROWS),
        "layers and ranks in which fewer prompt tokens were saved than in others; absent where all are alike",
    ]
    connectors: Annotated[
        list[ConnectorBooks],
        Most(MAX_CONNECTORS),
        "absent where no connector has several inside it; the report's ledgers hold what any of them saved",
    ]
    graphs: Annotated[list[GraphRow], Most(MAX_GRAPH_ROWS), "absent without CUDA graphs"]
    digest: Annotated[
        str,
        "sha256: and the digest of this document without this field, as JSON of sorted keys, no spaces, "
        "in ASCII; a report that does not fit it is refused",
    ]
    device: Annotated[DeviceTimes, "absent where no device time was taken"]


class Report(_Optional):
    """kvtrace report"""

    schema: Annotated[Literal["kvtrace.report/2"], "what this document is"]
    run: Annotated[RunFacts, "what ran"]
    verdict: Annotated[str, "the answer in one sentence"]
    instrumentation: Annotated[Instrumentation, "what the agent hooked"]
    coverage: Annotated[Coverage, "how often hooks and ops were called"]
    stages: Annotated[list[Stage], Most(len(STAGE_NAMES)), "prompt tokens at each stage, in order"]
    ledger: Annotated[Ledgers, "what became of every token"]
    findings: Annotated[list[FindingRow], "most important first"]
    ruled_out: Annotated[list[RuledOutRow], "checked, and not the cause"]
    not_observed: Annotated[list[NotObservedRow], "what cannot be said, and why"]
    requests: Annotated[RequestRows, "the requests"]
    timing: Annotated[list[TimingRow], "durations of hooks"]
    limits: Annotated[Limits, "what this report cannot say"]
    places: Annotated[
        list[PlaceRow], Most(MAX_PLACES), "where the connector stored, those with most files first"
    ]


@cache
def report_schema() -> dict[str, Any]:
    """The JSON Schema of reports."""
    return json_schema(
        Report,
        "urn:kvtrace:report:2",
        "kvtrace report",
        "Why KV blocks were or were not saved and loaded in one traced vLLM run. Counts are integers; "
        "durations in nanoseconds unless named otherwise; shares are 0..1.",
    )
