"""The tables of an export: names, types, units and meanings of their columns.

One row here is a column in Parquet, in CSV and in ``kvtrace.load``'s frames, and a line in tables.md
(``python scripts/pages.py`` writes it).
"""

from __future__ import annotations

from dataclasses import dataclass

TEXT, INT, FLOAT, BOOL = "text", "int64", "float64", "bool"
DTYPES = {TEXT: "string", INT: "Int64", FLOAT: "Float64", BOOL: "boolean"}
"""pandas' types with a place for "not known" (missing, never -1 and never an empty text)."""


@dataclass(frozen=True)
class Column:
    """One column. ``unit`` is "" where a value has none."""

    name: str
    type: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table; ``row`` says what a row of it is."""

    name: str
    row: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


RANK = "rank"
PARTITIONS = (
    Column("run", TEXT, "", "name of the run, and a number that tells runs of one name apart"),
    Column("host", TEXT, "", "host on which it was recorded"),
    Column(RANK, INT, "", "rank of the worker; -1 for the scheduler's side and for the run as a whole"),
)
"""They stand before each table's own columns. In Parquet they are the folders' names."""

_PROCESS = Column("process", TEXT, "", "name of its spool, without the suffix: one a process")
_ENGINE = Column("engine", INT, "", "number of the scheduler instance (as in report.json)")
_TIME = Column("t_ns", INT, "ns", "begin, since 1970-01-01 UTC; exact between rows of one host")
_DURATION = Column("dur_ns", INT, "ns", "host time that it took; missing for what has no duration")
_MODE = Column("mode", TEXT, "", "CUDA-graph mode: NONE, PIECEWISE or FULL")
_PADDED = Column("padded", INT, "tokens", "that the model ran, padding included")

EVENTS = Table(
    "events",
    "one record of a spool (kvtrace/trace/records.md), without texts, digests, slots and block ids",
    (
        _PROCESS,
        Column("pid", INT, "", "process id on its host"),
        Column("thread", INT, "", "index of the thread in its process"),
        Column("side", TEXT, "", "front, scheduler or worker: the side of vLLM that called"),
        Column("kind", TEXT, "", "kind of the record, in small letters: hook, op, step, exec, chunk, ..."),
        Column("name", TEXT, "", "the hook's or op's name; outside: file, socket, sqlite, ..."),
        _TIME,
        _DURATION,
        _ENGINE,
        Column("step", INT, "", "number of the schedule() call in its engine, from 1; missing for no step"),
        Column("layer", TEXT, "", "name of the layer"),
        Column("request", TEXT, "", "the engine's id of the request"),
        Column("connector", INT, "", "index of the connector in its process"),
        Column("flags", TEXT, "", "of the record, in small letters, with a blank between them"),
        Column("slots", INT, "slots", "hook, meta: that the metadata names; effect: that were copied"),
        Column("entries", INT, "", "hook: metadata entries of its direction that were bound"),
        Column("tokens", INT, "tokens", "computed or spoken of: op, step, chunk, meta, exec"),
        Column("requests", INT, "", "step, exec: requests in it"),
        Column("new_requests", INT, "", "step: of these, new ones"),
        Column("preempted", INT, "", "step: requests whose blocks were taken back"),
        Column("finished", INT, "", "step: finished requests of which the workers were told"),
        Column("start", INT, "tokens", "chunk, meta: first position in the request"),
        Column("prompt", INT, "tokens", "chunk, request: length of the prompt"),
        Column("max_tokens", INT, "tokens", "request: that it may generate"),
        Column("local", INT, "tokens", "lookup: that the GPU's prefix cache holds"),
        Column("external", INT, "tokens", "lookup: that the connector has; alloc: that were accepted"),
        Column("computed", INT, "tokens", "preempt: lost by it; finish: with KV"),
        Column("output", INT, "tokens", "finish: generated"),
        Column("preemptions", INT, "", "finish: of the request"),
        Column("status", TEXT, "", "finish: vLLM's word for how it ended"),
        _PADDED,
        _MODE,
        Column("skip", TEXT, "", "op: why the connector's hooks did not run around it; HOOKED: they did"),
        Column("error", TEXT, "", "hook: type of the exception that it raised"),
        Column("failed", BOOL, "", "done: the connector said so"),
        Column("count", INT, "calls", "quiet: calls that are one record"),
        Column("least_ns", INT, "ns", "quiet: the shortest of them"),
        Column("most_ns", INT, "ns", "quiet: the longest of them"),
        Column("bytes", INT, "bytes", "effect: in files that the call wrote; outside: grown, or sent"),
        Column("files", INT, "", "effect: files that the call opened for writing"),
        Column("errors", INT, "", "outside: connections refused, files that are gone"),
        Column("device_ns", INT, "ns", "device: time between the events on the device"),
        Column("before_ns", INT, "ns", "device: what its stream still had to run when it began, at least"),
    ),
)

STEPS = Table(
    "steps",
    "one step on one side: a schedule() call (rank -1), or an execute_model of a worker",
    (
        _PROCESS,
        _ENGINE,
        Column("step", INT, "", "number of the schedule() call in its engine, from 1"),
        Column("side", TEXT, "", "scheduler or worker"),
        _TIME,
        _DURATION,
        Column("tokens", INT, "tokens", "scheduled"),
        Column("requests", INT, "", "in it"),
        Column("new_requests", INT, "", "of these, new ones; the scheduler's rows only"),
        Column("preempted", INT, "", "requests whose blocks were taken back; the scheduler's rows only"),
        Column("finished", INT, "", "requests of which the workers were told; the scheduler's rows only"),
        _MODE,
        _PADDED,
        Column("forward", BOOL, "", "the model ran; the workers' rows only"),
        Column("saves_watched", BOOL, "", "watched for what is read from the KV cache; workers only"),
        Column("loads_watched", BOOL, "", "watched for what is written there; workers only"),
    ),
)

REQUESTS = Table(
    "requests",
    "one request",
    (
        Column("id", TEXT, "", "the engine's id"),
        Column("client", TEXT, "", "the client's id"),
        _ENGINE,
        Column("prompt", INT, "tokens", "length of the prompt"),
        Column("computed", INT, "tokens", "computed or reused"),
        Column("output", INT, "tokens", "generated"),
        Column("local", INT, "tokens", "of the prompt, reused from the GPU's prefix cache"),
        Column("external", INT, "tokens", "of the prompt, accepted from the connector"),
        Column("chunks", INT, "", "prefill chunks"),
        Column("saved", FLOAT, "tokens", "whose KV was saved"),
        Column("sent", FLOAT, "tokens", "of those saved, only seen leaving for a peer"),
        Column("not_saved", FLOAT, "tokens", "that were lost on the way"),
        Column("not_observed", FLOAT, "tokens", "of which it is not observed what became of them"),
        Column("verdict", TEXT, "", "saved, loaded, or the cause that explains most"),
        Column("grade", TEXT, "", "how well it is seen that its tokens were saved"),
        Column("status", TEXT, "", "vLLM's word for how it ended; missing where it did not"),
        Column("first_step", INT, "", "first step"),
        Column("last_step", INT, "", "last step"),
        Column("block", INT, "tokens", "in a KV block"),
    ),
)

LEDGER = Table(
    "ledger",
    "token-layers of one ledger with one outcome and one grade; they sum to the ledger's total",
    (
        Column("ledger", TEXT, "", "saves (every token) or loads (every prompt token)"),
        Column("connector", TEXT, "", "one connector inside another one; missing for the run's own ledger"),
        Column("outcome", TEXT, "", "saved, loaded, local-hit, pending, not-observed, not-saved, ..."),
        Column("cause", TEXT, "", "why it was lost: a cause's id"),
        Column("grade", TEXT, "", "how well that is seen"),
        Column("token_layers", INT, "token-layers", "one is one token in one KV layer on one rank"),
        Column("tokens", FLOAT, "tokens", "the same, divided by the layers and ranks"),
    ),
)

FINDINGS = Table(
    "findings",
    "one cause: found, ruled out, or not observed",
    (
        Column("status", TEXT, "", "found, ruled out or not observed"),
        Column("id", TEXT, "", "the cause's id (kvtrace docs ID)"),
        Column("severity", TEXT, "", "fault, limit or note; found ones only"),
        Column("stage", TEXT, "", "at which the tokens were lost"),
        Column("connector", TEXT, "", "one connector inside another one, whose finding it is"),
        Column("tokens", FLOAT, "tokens", "that it explains"),
        Column("share", FLOAT, "", "of its ledger's tokens, 0 to 1"),
        Column("requests", INT, "", "concerned"),
        Column("grade", TEXT, "", "how well it is seen what became of the tokens"),
        Column("title", TEXT, "", "one line, with the numbers"),
        Column("evidence", TEXT, "", "sentences with the numbers, joined by '; '"),
        Column("remedy", TEXT, "", "what to do, joined by '; '"),
    ),
)

TABLES = (EVENTS, STEPS, REQUESTS, LEDGER, FINDINGS)
BY_NAME = {table.name: table for table in TABLES}
