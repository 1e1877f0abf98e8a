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
class ColumnSpec:
    """One column. ``unit`` is "" where a value has none."""

    name: str
    type: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class TableSpec:
    """One table; ``row`` says what a row of it is."""

    name: str
    row: str
    columns: tuple[ColumnSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


RANK = "rank"
PARTITIONS = (
    ColumnSpec("run", TEXT, "", "name of the run, and a number that tells runs of one name apart"),
    ColumnSpec("host", TEXT, "", "host on which it was recorded"),
    ColumnSpec(RANK, INT, "", "rank of the worker; -1 for the scheduler's side and for the run as a whole"),
)
"""They stand before each table's own columns. In Parquet they are the folders' names."""

_PROCESS = ColumnSpec("process", TEXT, "", "name of its spool, without the suffix: one a process")
_ENGINE = ColumnSpec("engine", INT, "", "number of the scheduler instance (as in report.json)")
_TIME = ColumnSpec("t_ns", INT, "ns", "begin, since 1970-01-01 UTC; exact between rows of one host")
_DURATION = ColumnSpec("dur_ns", INT, "ns", "host time that it took; missing for what has no duration")
_MODE = ColumnSpec("mode", TEXT, "", "CUDA-graph mode: NONE, PIECEWISE or FULL")
_PADDED = ColumnSpec("padded", INT, "tokens", "that the model ran, padding included")

EVENTS = TableSpec(
    "events",
    "one record of a spool (kvtrace/trace/records.md), without texts, digests, slots and block ids",
    (
        _PROCESS,
        ColumnSpec("pid", INT, "", "process id on its host"),
        ColumnSpec("thread", INT, "", "index of the thread in its process"),
        ColumnSpec("side", TEXT, "", "front, scheduler or worker: the side of vLLM that called"),
        ColumnSpec(
            "kind", TEXT, "", "kind of the record, in small letters: hook, op, step, exec, chunk, ..."
        ),
        ColumnSpec("name", TEXT, "", "the hook's or op's name; outside: file, socket, sqlite, ..."),
        _TIME,
        _DURATION,
        _ENGINE,
        ColumnSpec(
            "step", INT, "", "number of the schedule() call in its engine, from 1; missing for no step"
        ),
        ColumnSpec("layer", TEXT, "", "name of the layer"),
        ColumnSpec("request", TEXT, "", "the engine's id of the request"),
        ColumnSpec("connector", INT, "", "index of the connector in its process"),
        ColumnSpec("flags", TEXT, "", "of the record, in small letters, with a blank between them"),
        ColumnSpec("slots", INT, "slots", "hook, meta: that the metadata names; effect: that were copied"),
        ColumnSpec("entries", INT, "", "hook: metadata entries of its direction that were bound"),
        ColumnSpec("tokens", INT, "tokens", "computed or spoken of: step, chunk, meta, exec"),
        ColumnSpec("requests", INT, "", "step, exec: requests in it"),
        ColumnSpec("new_requests", INT, "", "step: of these, new ones"),
        ColumnSpec("preempted", INT, "", "step: requests whose blocks were taken back"),
        ColumnSpec("finished", INT, "", "step: finished requests of which the workers were told"),
        ColumnSpec("start", INT, "tokens", "chunk, meta: first position in the request"),
        ColumnSpec("prompt", INT, "tokens", "chunk, request: length of the prompt"),
        ColumnSpec("max_tokens", INT, "tokens", "request: that it may generate"),
        ColumnSpec("local", INT, "tokens", "lookup: that the GPU's prefix cache holds"),
        ColumnSpec("external", INT, "tokens", "lookup: that the connector has; alloc: that were accepted"),
        ColumnSpec("computed", INT, "tokens", "preempt: lost by it; finish: with KV"),
        ColumnSpec("output", INT, "tokens", "finish: generated"),
        ColumnSpec("preemptions", INT, "", "finish: of the request"),
        ColumnSpec("status", TEXT, "", "finish: vLLM's word for how it ended"),
        _PADDED,
        _MODE,
        ColumnSpec("skip", TEXT, "", "op: why the connector's hooks did not run around it; HOOKED: they did"),
        ColumnSpec("error", TEXT, "", "hook: type of the exception that it raised"),
        ColumnSpec("failed", BOOL, "", "done: the connector said so"),
        ColumnSpec("count", INT, "calls", "quiet: calls that are one record"),
        ColumnSpec("least_ns", INT, "ns", "quiet: the shortest of them"),
        ColumnSpec("most_ns", INT, "ns", "quiet: the longest of them"),
        ColumnSpec("bytes", INT, "bytes", "effect: in files that the call wrote; outside: grown, or sent"),
        ColumnSpec("files", INT, "", "effect: files that the call opened for writing"),
        ColumnSpec("errors", INT, "", "outside: connections refused, files that are gone"),
        ColumnSpec("device_ns", INT, "ns", "device: time between the events on the device"),
        ColumnSpec(
            "before_ns", INT, "ns", "device: what its stream still had to run when it began, at least"
        ),
    ),
)

STEPS = TableSpec(
    "steps",
    "one step on one side: a schedule() call (rank -1), or an execute_model of a worker",
    (
        _PROCESS,
        _ENGINE,
        ColumnSpec("step", INT, "", "number of the schedule() call in its engine, from 1"),
        ColumnSpec("side", TEXT, "", "scheduler or worker"),
        _TIME,
        _DURATION,
        ColumnSpec("tokens", INT, "tokens", "scheduled"),
        ColumnSpec("requests", INT, "", "in it"),
        ColumnSpec("new_requests", INT, "", "of these, new ones; the scheduler's rows only"),
        ColumnSpec("preempted", INT, "", "requests whose blocks were taken back; the scheduler's rows only"),
        ColumnSpec("finished", INT, "", "requests of which the workers were told; the scheduler's rows only"),
        _MODE,
        _PADDED,
        ColumnSpec("forward", BOOL, "", "the model ran; the workers' rows only"),
        ColumnSpec("saves_watched", BOOL, "", "watched for what is read from the KV cache; workers only"),
        ColumnSpec("loads_watched", BOOL, "", "watched for what is written there; workers only"),
    ),
)

REQUESTS = TableSpec(
    "requests",
    "one request",
    (
        ColumnSpec("id", TEXT, "", "the engine's id"),
        ColumnSpec("client", TEXT, "", "the client's id"),
        _ENGINE,
        ColumnSpec("prompt", INT, "tokens", "length of the prompt"),
        ColumnSpec("computed", INT, "tokens", "computed or reused"),
        ColumnSpec("output", INT, "tokens", "generated"),
        ColumnSpec("local", INT, "tokens", "of the prompt, reused from the GPU's prefix cache"),
        ColumnSpec("external", INT, "tokens", "of the prompt, accepted from the connector"),
        ColumnSpec("chunks", INT, "", "prefill chunks"),
        ColumnSpec("saved", FLOAT, "tokens", "whose KV was saved"),
        ColumnSpec("sent", FLOAT, "tokens", "of those saved, only seen leaving for a peer"),
        ColumnSpec("not_saved", FLOAT, "tokens", "that were lost on the way"),
        ColumnSpec("not_observed", FLOAT, "tokens", "of which it is not observed what became of them"),
        ColumnSpec("verdict", TEXT, "", "saved, loaded, or the cause that explains most"),
        ColumnSpec("grade", TEXT, "", "how well it is seen that its tokens were saved"),
        ColumnSpec("status", TEXT, "", "vLLM's word for how it ended; missing where it did not"),
        ColumnSpec("first_step", INT, "", "first step"),
        ColumnSpec("last_step", INT, "", "last step"),
        ColumnSpec("block", INT, "tokens", "in a KV block"),
    ),
)

LEDGER = TableSpec(
    "ledger",
    "token-layers of one ledger with one outcome and one grade; they sum to the ledger's total",
    (
        ColumnSpec("ledger", TEXT, "", "saves (every token) or loads (every prompt token)"),
        ColumnSpec(
            "connector", TEXT, "", "one connector inside another one; missing for the run's own ledger"
        ),
        ColumnSpec("outcome", TEXT, "", "saved, loaded, local-hit, pending, not-observed, not-saved, ..."),
        ColumnSpec("cause", TEXT, "", "why it was lost: a cause's id"),
        ColumnSpec("grade", TEXT, "", "how well that is seen"),
        ColumnSpec("token_layers", INT, "token-layers", "one is one token in one KV layer on one rank"),
        ColumnSpec("tokens", FLOAT, "tokens", "the same, divided by the layers and ranks"),
    ),
)

FINDINGS = TableSpec(
    "findings",
    "one cause: found, ruled out, or not observed",
    (
        ColumnSpec("status", TEXT, "", "found, ruled out or not observed"),
        ColumnSpec("id", TEXT, "", "the cause's id (kvtrace docs ID)"),
        ColumnSpec("severity", TEXT, "", "fault, limit or note; found ones only"),
        ColumnSpec("stage", TEXT, "", "at which the tokens were lost"),
        ColumnSpec("connector", TEXT, "", "one connector inside another one, whose finding it is"),
        ColumnSpec("tokens", FLOAT, "tokens", "that it explains"),
        ColumnSpec("share", FLOAT, "", "of its ledger's tokens, 0 to 1"),
        ColumnSpec("requests", INT, "", "concerned"),
        ColumnSpec("grade", TEXT, "", "how well it is seen what became of the tokens"),
        ColumnSpec("title", TEXT, "", "one line, with the numbers"),
        ColumnSpec("evidence", TEXT, "", "sentences with the numbers, joined by '; '"),
        ColumnSpec("remedy", TEXT, "", "what to do, joined by '; '"),
    ),
)

TABLES = (EVENTS, STEPS, REQUESTS, LEDGER, FINDINGS)
BY_NAME = {table.name: table for table in TABLES}
