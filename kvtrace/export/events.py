"""The records of a spool as rows of the tables ``events`` and ``steps``, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvtrace.export.frame import cells, frame, same, shown
from kvtrace.export.run import SpoolProcess
from kvtrace.export.tables import BOOL, EVENTS, INT, STEPS, TEXT, ColumnSpec
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.format import (
    DETAIL_IS_OP,
    MODES,
    NONE_ANSWER,
    STEP_MASK,
    STEP_SHIFT,
    Dispatch,
    Flag,
    Kind,
    Role,
    Skip,
    Way,
)
from kvtrace.trace.reader import Records, layers_in

Ints = NDArray[np.int64]
Names = Mapping[int, str]

EXPORTED = (
    Kind.HOOK, Kind.OP, Kind.STEP, Kind.CHUNK, Kind.REQUEST, Kind.LOOKUP, Kind.ALLOC, Kind.META, Kind.PREEMPT,
    Kind.FINISH, Kind.EXEC, Kind.QUIET, Kind.EFFECT, Kind.OPEN, Kind.DONE, Kind.DEVICE, Kind.OUTSIDE,
    Kind.GROWN,
)  # fmt: skip
"""Kinds that are events. Others hold digests, slots, block ids and texts."""
_SIDES = {int(role): role.name.lower() for role in Role}
SKIPS = {int(skip): skip.name for skip in Skip}
WAYS = {int(way): way.name.lower().replace("_", " ") for way in Way}
_KIND_NAMES = {int(kind): kind.name.lower() for kind in EXPORTED}
_OF_CONNECTORS = (
    Kind.HOOK, Kind.QUIET, Kind.EFFECT, Kind.DEVICE, Kind.OUTSIDE, Kind.META, Kind.LOOKUP, Kind.ALLOC,
    Kind.OPEN, Kind.DONE,
)  # fmt: skip
_NUMBERS: dict[Kind, tuple[str, ...]] = {
    Kind.HOOK: ("slots", "entries"),
    Kind.STEP: ("tokens", "requests", "new_requests"),
    Kind.CHUNK: ("start", "tokens", "prompt"),
    Kind.REQUEST: ("prompt", "max_tokens"),
    Kind.LOOKUP: ("local", "external"),
    Kind.ALLOC: ("external",),
    Kind.META: ("slots", "tokens", "start"),
    Kind.PREEMPT: ("computed",),
    Kind.FINISH: ("computed", "output", "preemptions"),
    Kind.EXEC: ("tokens", "requests", "padded"),
    Kind.QUIET: ("count", "least_ns", "most_ns"),
    Kind.EFFECT: ("slots", "bytes", "files"),
    Kind.DONE: ("failed",),
    Kind.DEVICE: ("device_ns", "before_ns"),
    Kind.OUTSIDE: ("bytes", "errors"),
    Kind.GROWN: ("start", "prompt"),
}
"""Columns that are fields of the record under the same name; a negative one is not known."""
_NOT_KNOWN = {"external": NONE_ANSWER, "padded": 0}
"""Of these fields, a further value that says nothing."""
_NAMES: dict[Kind, Callable[[int], str | None]] = {
    Kind.HOOK: hooks.name_of, Kind.EFFECT: hooks.name_of, Kind.OP: ops.name_of, Kind.OUTSIDE: WAYS.get,
}  # fmt: skip
"""Kinds whose code stands for a name."""


def event_rows(table: Records, names: Names, process: SpoolProcess) -> pd.DataFrame:
    """The rows of ``events`` for a table of records, in its order, the partitions' columns first."""
    kinds = rows.kind(table[:, 0])
    table = table[np.isin(kinds, EXPORTED)]
    columns = _Columns(len(table))
    kinds = rows.kind(table[:, 0])
    head = table[:, 0]
    everywhere = np.arange(len(table))
    columns.words("kind", everywhere, kinds, _KIND_NAMES.get)
    columns.words("side", everywhere, rows.role(head), _SIDES.get)
    columns.numbers("thread", everywhere, rows.thread(head))
    columns.words("flags", everywhere, rows.flags(head), flag_words)
    _of_connectors(columns, kinds, head)
    for kind in np.unique(kinds).tolist():
        at = np.flatnonzero(kinds == kind)
        _of_kind(columns, Kind(kind), at, table[at], names)
    return columns.frame(process, rows.role(head))


def _of_connectors(columns: _Columns, kinds: Ints, head: Ints) -> None:
    at = np.flatnonzero(np.isin(kinds, _OF_CONNECTORS))
    detail = rows.detail(head[at])
    is_op = np.isin(kinds[at], (Kind.QUIET, Kind.DEVICE)) & (detail >= DETAIL_IS_OP)
    columns.numbers("connector", at[~is_op], detail[~is_op])


def _of_kind(columns: _Columns, kind: Kind, at: Ints, table: Records, names: Names) -> None:
    row: Any = rows.columns(rows.ROWS[kind], table)
    begin = row.t0 if "t0" in row._fields else row.t
    columns.numbers("t_ns", at, begin)
    if "t1" in row._fields:
        columns.numbers("dur_ns", at, np.maximum(row.t1 - begin, 0))
    if "step" in row._fields:
        columns.steps(at, row.step)
    if "layer" in row._fields:
        columns.words("layer", at, row.layer, names.get)
    if "request" in row._fields and "requests" not in row._fields:
        columns.words("request", at, row.request, names.get)
    if "mode" in row._fields:
        columns.words("mode", at, row.mode, MODES.get)
    if kind in _NAMES:
        columns.words("name", at, rows.code(row.head), _NAMES[kind])
    if "status_name" in row._fields:
        columns.words("status", at, row.status_name, names.get)
    for name in _NUMBERS.get(kind, ()):
        values = getattr(row, name)
        if name in _NOT_KNOWN:
            values = np.where(values == _NOT_KNOWN[name], -1, values)
        columns.numbers(name, at, values)
    if kind in _SPECIAL:
        _SPECIAL[kind](columns, at, row, names)


# ------------------------------------------------------------------ what differs from kind to kind


def _hook(columns: _Columns, at: Ints, row: rows.HookCall, names: Names) -> None:
    raised = np.flatnonzero(rows.flags(row.head) & Flag.RAISED)
    columns.words("error", at[raised], row.extra[raised], names.get)


def _op(columns: _Columns, at: Ints, row: rows.OpCall, names: Names) -> None:
    columns.words("skip", at, row.skip, SKIPS.get)
    direct = at[np.flatnonzero(rows.detail(row.head) == Dispatch.DIRECT)]
    columns.add_flag(direct, "direct")


def _step(columns: _Columns, at: Ints, row: rows.Step, names: Names) -> None:
    columns.numbers("preempted", at, row.gone >> 32)
    columns.numbers("finished", at, row.gone & 0xFFFFFFFF)


def _quiet(columns: _Columns, at: Ints, row: rows.QuietCalls, names: Names) -> None:
    _hook_or_op(columns, at, row.head)
    columns.numbers("dur_ns", at, row.total_ns)
    columns.words("layer", at, row.layer_set, lambda one: " ".join(layers_in(names, one)))


def _device(columns: _Columns, at: Ints, row: rows.DeviceCall, names: Names) -> None:
    _hook_or_op(columns, at, row.head)
    columns.numbers("dur_ns", at, row.host_ns)


_SPECIAL: dict[Kind, Callable[[Any, Ints, Any, Names], None]] = {
    Kind.HOOK: _hook, Kind.OP: _op, Kind.STEP: _step, Kind.QUIET: _quiet, Kind.DEVICE: _device,
}  # fmt: skip


def _hook_or_op(columns: _Columns, at: Ints, head: Ints) -> None:
    is_op = rows.detail(head) >= DETAIL_IS_OP
    columns.words("name", at[~is_op], rows.code(head[~is_op]), hooks.name_of)
    columns.words("name", at[is_op], rows.code(head[is_op]), ops.name_of)


def flag_words(flags: int) -> str:
    """Flags of a record -> ``store async``."""
    return " ".join(flag.name.lower() for flag in Flag if flags & flag)


class _Columns:
    """The columns of ``events``, filled piece by piece; what nobody fills is missing."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers = {
            one.name: (np.zeros(count, dtype=np.int64), np.ones(count, dtype=bool))
            for one in EVENTS.columns
            if one.type != TEXT
        }
        self._words = {
            one.name: np.full(count, None, dtype=object) for one in EVENTS.columns if one.type == TEXT
        }
        self._tags = np.zeros(count, dtype=np.int64)

    def numbers(self, name: str, at: Ints, values: Ints) -> None:
        """Puts numbers into rows `at`; negative ones are not known."""
        held, missing = self._numbers[name]
        held[at], missing[at] = values, values < 0

    def words(self, name: str, at: Ints, ids: Ints, word: Callable[[int], str | None]) -> None:
        """Puts the texts that `ids` stand for into rows `at`; an empty one is missing."""
        unique, inverse = np.unique(ids, return_inverse=True)
        texts = np.array([shown(word(one) or "") for one in unique.tolist()], dtype=object)
        if len(texts):
            self._words[name][at] = texts[inverse]

    def add_flag(self, at: Ints, word: str) -> None:
        flags = self._words["flags"]
        for row in at.tolist():
            flags[row] = f"{flags[row]} {word}" if flags[row] else word

    def steps(self, at: Ints, steps: Ints) -> None:
        known = (steps & STEP_MASK) > 0
        self._tags[at] = steps >> STEP_SHIFT
        self.numbers("step", at, np.where(known, steps & STEP_MASK, -1))
        self.numbers("engine", at, np.where(known, steps >> STEP_SHIFT, -1))

    def frame(self, process: SpoolProcess, sides: Ints) -> pd.DataFrame:
        """All columns, those of the partitions (without the run's) first. Times become wall times."""
        values: dict[str, Any] = {"rank": _ranks(process, sides, self._tags)}
        for column in EVENTS.columns:
            values[column.name] = self._values(column, process)
        return frame(values)

    def _values(self, column: ColumnSpec, process: SpoolProcess) -> Any:
        if column.name == "process":
            return same(process.stem, self._count, TEXT)
        if column.name == "pid":
            return same(process.pid, self._count, INT)
        if column.type == TEXT:
            return cells(self._words[column.name], TEXT)
        held, missing = self._numbers[column.name]
        if column.type == BOOL:
            return pd.arrays.BooleanArray(held > 0, missing)
        if column.name == "t_ns":
            held, missing = held + process.shift_ns, np.zeros(self._count, dtype=bool)
        return pd.arrays.IntegerArray(held, missing)


def _ranks(process: SpoolProcess, sides: Ints, tags: Ints) -> Any:
    pairs = {
        (side, tag): process.rank_of(side, tag)
        for side in np.unique(sides).tolist()
        for tag in np.unique(tags).tolist()
    }
    ranks = [pairs[pair] for pair in zip(sides.tolist(), tags.tolist(), strict=True)]
    return cells(np.array(ranks, dtype=np.int64), INT)


def step_rows(table: Records, names: Names, process: SpoolProcess) -> pd.DataFrame:
    """The rows of ``steps`` for a table of records: real steps, dummy runs left out."""
    kinds = rows.kind(table[:, 0])
    head = table[:, 0]
    step = table[:, rows.Step._fields.index("step")]  # the same word in both kinds
    real = ((step & STEP_MASK) > 0) & ((rows.flags(head) & Flag.DUMMY) == 0)
    table = table[np.isin(kinds, (Kind.STEP, Kind.EXEC)) & real]
    events = event_rows(table, names, process)
    flags, worker = rows.flags(table[:, 0]), rows.kind(table[:, 0]) == Kind.EXEC
    ran = (flags & Flag.NO_FORWARD) == 0
    for name, value in (
        ("forward", ran & (events["tokens"].fillna(0).to_numpy(dtype=np.int64) > 0)),
        ("saves_watched", (flags & Flag.STORE) != 0),
        ("loads_watched", (flags & Flag.LOAD) != 0),
    ):
        events[name] = pd.arrays.BooleanArray(value, ~worker)
    return frame({name: events[name].array for name in ("rank", *STEPS.names)})
