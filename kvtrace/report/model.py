"""The shape of ``report.json`` (``kvtrace.report/2``) for mypy.

The published truth is ``schema/kvtrace.report.2.json``, with a description and a unit for
every field; a test holds the two together. Builder and renderers are checked against these.
"""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from kvtrace.errors import KvtraceError

SCHEMA: Final = "kvtrace.report/2"

MAX_COVERAGE_ROWS = 4096
MAX_REQUEST_ROWS = 200
MAX_EVENTS = 3
MAX_CHUNKS_SHOWN = 16
MAX_PROCESSES = 4096
MAX_TARGETS = 4096
MAX_GRAPH_ROWS = 256


class ReportError(KvtraceError):
    """A path holds no report that can be read, or a trace makes none."""


Severity = Literal["fault", "limit", "note"]
Trust = Literal["measured", "declared", "mixed", "unknown", "none"]


class Process(TypedDict):
    pid: int
    name: str
    role: Literal["front", "scheduler", "worker", "other"]
    rank: int | None
    spool: str | None
    records: int
    end: str
    agent: bool


Connector = TypedDict("Connector", {"name": str, "class": str, "module": str, "file": str, "role": str})


class Engine(TypedDict):
    tag: int
    dp_rank: int
    platform: str
    model: str
    connector: Connector | None
    tp: int | None
    pp: int | None
    block_size: int | None
    prefix_caching: bool | None
    max_num_batched_tokens: int | None
    chunked_prefill: bool | None
    enforce_eager: bool | None
    cudagraph_mode: str
    kv_layers: int
    pairs: int
    ranks: list[int]
    steps: int
    real_steps: int
    requests: int


class RunFacts(TypedDict):
    name: str
    command: list[str]
    started: str | None
    seconds: float
    exit_code: int | None
    signal: str | None
    kvtrace: str
    vllm: str | None
    torch: str | None
    python: str | None
    host: str
    processes: list[Process]
    engines: list[Engine]


class Target(TypedDict):
    id: str
    module: str
    attr: str
    status: Literal["found", "missing", "failed", "pending"]
    processes: int
    detail: str


class Instrumentation(TypedDict):
    targets: list[Target]
    found: int
    missing: int
    failed: int


class HookRow(TypedDict):
    process: str
    rank: int | None
    layer: str | None
    hook: str
    eligible: int
    fired: int
    with_work: int
    raised: int


class OpRow(TypedDict):
    process: str
    rank: int | None
    layer: str | None
    op: str
    eligible: int
    fired: int
    direct: int


class SummaryRow(TypedDict):
    hook: str
    eligible: int
    fired: int
    with_work: int
    share: float | None


class Coverage(TypedDict):
    hooks: list[HookRow]
    ops: list[OpRow]
    summary: list[SummaryRow]


Stage = TypedDict("Stage", {"stage": int, "name": str, "in": int, "out": int, "note": str})


class Ledger(TypedDict):
    unit: Literal["token-layers"]
    total: int
    accounts: dict[str, int]
    pairs: int | None
    tokens: dict[str, float]
    total_tokens: float
    trust: Trust
    trust_note: str


class Ledgers(TypedDict):
    saves: Ledger
    loads: Ledger


class Event(TypedDict):
    request: str
    step: int
    rank: int | None
    layer: str | None
    text: str


class Finding(TypedDict):
    id: str
    severity: Severity
    stage: int | None
    tokens: float
    share: float
    requests: int
    title: str
    evidence: list[str]
    events: list[Event]
    remedy: list[str]
    versions: str
    docs: str


class RuledOut(TypedDict):
    id: str
    evidence: str


class NotObserved(TypedDict):
    id: str
    why: str


class RequestRow(TypedDict):
    id: str
    client: str | None
    engine: int
    prompt: int
    computed: int
    output: int
    local: int
    external: int
    chunks: int
    chunk_tokens: list[int]
    saved: float
    not_saved: float
    verdict: str
    status: str
    first_step: int
    last_step: int
    block: int


class Requests(TypedDict):
    total: int
    shown: int
    rows: list[RequestRow]


class TimingRow(TypedDict):
    hook: str
    clock: Literal["host", "device"]
    count: int
    p50_ns: int
    p99_ns: int
    total_ns: int
    share_of_steps: float | None


class Damaged(TypedDict):
    spool: str
    detail: str


class Tracer(TypedDict):
    spool_bytes: int
    records: int


class Limits(TypedDict):
    notes: list[str]
    lost_records: int
    damaged: list[Damaged]
    tracer: Tracer


class ModeRow(TypedDict):
    mode: str
    steps: int
    tokens: int
    padded: int
    layer_steps: int
    bodies: int
    saves: int


class GraphRow(TypedDict):
    process: str
    rank: int
    runner: str
    asked: str
    configured: str
    used: str
    why: list[str]
    breakable: bool | None
    captured: int | None
    capturing_steps: int
    modes: list[ModeRow]


class DeviceRow(TypedDict):
    name: str
    kind: Literal["hook", "op"]
    count: int
    host_p50_ns: int
    host_p99_ns: int
    host_total_ns: int
    device_p50_ns: int
    device_p99_ns: int
    device_total_ns: int
    other_stream: int
    behind: int
    waited: int


class DeviceTimes(TypedDict):
    steps: int
    calls: int
    untimed: int
    lost: int
    own_ns: int
    busy_ns: int
    rows: list[DeviceRow]


class _Later(TypedDict, total=False):
    """What came after the first reports of this schema: absent in those, and where there is no such thing."""

    graphs: list[GraphRow]
    device: DeviceTimes


class Report(_Later):
    schema: Literal["kvtrace.report/2"]
    run: RunFacts
    verdict: str
    instrumentation: Instrumentation
    coverage: Coverage
    stages: list[Stage]
    ledger: Ledgers
    findings: list[Finding]
    ruled_out: list[RuledOut]
    not_observed: list[NotObserved]
    requests: Requests
    timing: list[TimingRow]
    limits: Limits
