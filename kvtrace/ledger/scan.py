"""First reading of the spools: facts, names, what the scheduler recorded, which steps ran.

Rows about requests are kept (they grow with the requests, not with the steps); steps and
executions become counts and one number a step; hook and op records are left to
:mod:`kvtrace.ledger.coverage`, which needs the results of this reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.device import DeviceTally
from kvtrace.ledger.side_by_side import Add, silent
from kvtrace.ledger.steps import Array, Executed, real_step, spent
from kvtrace.trace import facts, hooks, rows
from kvtrace.trace.format import STEP_SHIFT, Flag, Kind, pack_head
from kvtrace.trace.reader import Documents, Records, Spool, SpoolInfo, of_type

F = TypeVar("F", bound=facts.Document)

REQUEST_KINDS = frozenset(
    {
        Kind.CHUNK, Kind.REQUEST, Kind.LOOKUP, Kind.ALLOC, Kind.META, Kind.PREEMPT, Kind.FINISH, Kind.PREFIX,
        Kind.OPEN, Kind.DONE, Kind.GROWN,
    }
)  # fmt: skip
"""Records that speak of one request."""
_KEPT = {
    "effects": Kind.EFFECT,
    "blocks": Kind.BLOCKS,
    "slots": Kind.SLOTS,
    "outside": Kind.OUTSIDE,
    "prints": Kind.PRINTS,
    "reprints": Kind.REPRINTS,
    "sketches": Kind.SKETCHES,
    "layers": Kind.LAYERS,
    "states": Kind.STATES,
}
"""Field of SpoolScan -> the kind of records that it holds."""
_OF_A_CONNECTOR = (Kind.LOOKUP, Kind.ALLOC, Kind.META, Kind.OPEN, Kind.DONE)
"""... and, in their detail, of a connector inside another one: what that one said or was told."""
_IS_OF_REQUEST = np.isin(np.arange(256), list(REQUEST_KINDS))
_IS_KEPT = np.isin(np.arange(256), [*REQUEST_KINDS, *_KEPT.values()])
_IS_READ = _IS_KEPT | np.isin(np.arange(256), [Kind.STEP, Kind.EXEC, Kind.DEVICE, Kind.TIMED])
_NOT_READ_HEAD = pack_head(Kind.HOOK, code=hooks.BUILD_METADATA.code, flags=Flag.UNREADABLE)
_NOT_READ = pack_head(0xFF, code=0xFF, flags=Flag.UNREADABLE)
"""Of calls of hooks, which are most of a spool, those are read here whose metadata could not be."""
_RECORDS = 16384
"""Read at a time: a megabyte, which stays in the processor's cache."""
_FULL = 2  # graph mode


@dataclass(frozen=True)
class Scheduled:
    """schedule() calls of one engine tag."""

    steps: int = 0
    real: int = 0  # ... with tokens
    first_t: int = 0
    last_t: int = 0


@dataclass(frozen=True)
class SpoolScan:
    """One spool, read once."""

    path: Path
    names: Mapping[int, str]
    documents: Documents
    header: facts.Header
    info: SpoolInfo
    of_requests: Records  # (n, 8): the records of REQUEST_KINDS, in file order; of outermost connectors
    of_everyone: Records  # (n, 8): the same, with those of connectors inside others
    scheduled: Mapping[int, Scheduled]  # engine tag -> its schedule() calls
    executed: Mapping[int, Executed]  # engine tag -> what its worker executed
    unreadable: Mapping[int, Array]  # connector's index -> steps whose metadata could not be read
    effects: Records  # (n, 8): EFFECT, in file order
    blocks: Records  # (n, 8): BLOCKS, in file order
    slots: Records  # (n, 8): SLOTS, in file order
    outside: Records  # (n, 8): OUTSIDE, in file order
    prints: Records  # (n, 8): PRINTS, in file order
    reprints: Records  # (n, 8): REPRINTS, in file order
    sketches: Records  # (n, 8): SKETCHES, in file order
    layers: Records  # (n, 8): LAYERS, in file order
    states: Records  # (n, 8): STATES, in file order
    device: DeviceTally
    hooks_of: frozenset[int] | None = None
    """Indexes of the connectors whose hook calls count; None: all."""

    @property
    def pid(self) -> int:
        return self.header.pid

    @property
    def name(self) -> str:
        """The spool's file name: it tells processes apart, also after fork."""
        return self.path.name

    def facts_of(self, kind: type[F]) -> list[F]:
        """The facts of one type, in file order."""
        return [fact for _, fact in of_type(kind, self.documents)]

    def timed_facts(self, kind: type[F]) -> list[tuple[int, F]]:
        """... each with the time at which it was written."""
        return of_type(kind, self.documents)

    def calls(self) -> Iterator[tuple[Records, NDArray[np.uint8]]]:
        """The file once more, chunk by chunk: records of any kind, and their kinds; that of a hook call that
        does not count is 0.

        Raises:
            SpoolError: the spool vanished.
        """
        for chunk in Spool(self.path).again(self.info):
            kinds = chunk[:, 0].astype(np.uint8)  # the lowest byte
            if self.hooks_of is not None:
                own = np.isin(rows.detail(chunk[:, 0]), list(self.hooks_of))
                kinds[~own & (kinds == Kind.HOOK)] = Kind.END
            yield chunk, kinds


def of_a_connector(table: Records) -> NDArray[np.bool_]:
    """The records whose detail says of which connector they are."""
    result: NDArray[np.bool_] = np.isin(rows.kind(table[:, 0]), _OF_A_CONNECTOR)
    return result


def scan(path: Path, add: Add = silent) -> SpoolScan:
    """Read one spool once; `add` is called with the bytes that were read.

    Raises:
        SpoolError: its header cannot be read.
    """
    spool = Spool(path)
    kept: list[Records] = []
    schedules, executions, unreadable, device = _Schedules(), _Executions(), _Unreadable(), DeviceTally()
    readers: tuple[tuple[Kind, Callable[[Records], None]], ...] = (
        (Kind.STEP, schedules.add),
        (Kind.EXEC, executions.add),
        (Kind.HOOK, unreadable.add),
        (Kind.DEVICE, device.add_calls),
        (Kind.TIMED, device.add_steps),
    )
    for chunk in spool.chunks(_RECORDS, bare=False):
        add(chunk.nbytes)
        heads = chunk[:, 0]
        kinds = heads.astype(np.uint8)  # the lowest byte
        few = chunk[np.flatnonzero(_IS_READ[kinds] | (heads & _NOT_READ == _NOT_READ_HEAD))]
        kinds = few[:, 0].astype(np.uint8)
        for kind, read in readers:
            part = few[kinds == kind]
            if len(part):
                read(part)
        part = few[_IS_KEPT[kinds]]
        if len(part):
            kept.append(part)
    table = np.concatenate(kept) if kept else np.empty((0, 8), dtype=np.int64)
    kept.clear()
    kinds = table[:, 0].astype(np.uint8)
    everyone = table[_IS_OF_REQUEST[kinds]]
    tables: dict[str, Any] = {name: table[kinds == kind] for name, kind in _KEPT.items()}
    return SpoolScan(
        path=path,
        names=spool.names,
        documents=spool.documents(),
        header=facts.Header.from_json(spool.header),
        info=spool.info(),
        of_requests=everyone[(rows.detail(everyone[:, 0]) == 0) | ~of_a_connector(everyone)],
        of_everyone=everyone,
        scheduled=schedules.found,
        executed=executions.result(),
        unreadable=unreadable.result(),
        device=device,
        **tables,
    )


class _Unreadable:
    """Steps whose metadata the agent could not read, by the connector's index."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Array]] = {}

    def add(self, table: Records) -> None:
        head = table[:, 0]
        call = rows.columns(rows.HookCall, table[head & _NOT_READ == _NOT_READ_HEAD])
        index = rows.detail(call.head)
        for connector in np.unique(index).tolist():
            self._steps.setdefault(connector, []).append(call.step[index == connector])

    def result(self) -> dict[int, Array]:
        return {connector: np.concatenate(parts) for connector, parts in self._steps.items()}


class _Schedules:
    """schedule() calls, counted by engine tag."""

    def __init__(self) -> None:
        self.found: dict[int, Scheduled] = {}

    def add(self, table: Records) -> None:
        call = rows.columns(rows.Step, table)
        call = rows.columns(rows.Step, table[real_step(call.step)])
        tags = call.step >> STEP_SHIFT
        for tag in np.unique(tags).tolist():
            here = tags == tag
            before = self.found.get(tag, Scheduled(first_t=int(call.t0[here][0])))
            self.found[tag] = Scheduled(
                steps=before.steps + int(here.sum()),
                real=before.real + int((call.tokens[here] > 0).sum()),
                first_t=before.first_t,
                last_t=max(before.last_t, int(call.t1[here][-1])),
            )


class _Executions:
    """Executions of real steps."""

    def __init__(self) -> None:
        self._tables: list[Records] = []

    def add(self, table: Records) -> None:
        ran = rows.columns(rows.Execution, table)
        self._tables.append(table[real_step(ran.step) & ((rows.flags(ran.head) & Flag.DUMMY) == 0)])

    def result(self) -> dict[int, Executed]:
        table = np.concatenate([np.empty((0, 8), dtype=np.int64), *self._tables])
        tags = rows.columns(rows.Execution, table).step >> STEP_SHIFT
        _, first = np.unique(tags, return_index=True)
        return {tag: _executed(table[tags == tag]) for tag in tags[np.sort(first)].tolist()}


def _executed(table: Records) -> Executed:
    """What the worker of one engine executed."""
    ran = rows.columns(rows.Execution, table)
    marks = rows.flags(ran.head)
    idle = (ran.tokens == 0) | ((marks & Flag.NO_FORWARD) != 0)
    steps, first = np.unique(ran.step[~idle], return_index=True)
    mode = np.clip(ran.mode[~idle][first], -1, 2)
    kinds, counts = np.unique(mode, return_counts=True)
    captured = (marks[~idle][first] & Flag.CAPTURE) != 0
    began = np.argsort(ran.t0, kind="stable")
    return Executed(
        steps=steps,
        mode_of=mode.astype(np.int8),
        batches=_batches(mode, ran.tokens[~idle][first], ran.padded[~idle][first]),
        capturing=int(captured.sum()),
        modes=dict(zip(kinds.tolist(), counts.tolist(), strict=True)),
        full=steps[mode == _FULL],
        idle=np.setdiff1d(ran.step[idle], steps),
        failed=np.unique(ran.step[(marks & Flag.RAISED) != 0]),
        watched=np.unique(ran.step[(marks & Flag.STORE) != 0]),
        watched_loads=np.unique(ran.step[(marks & Flag.LOAD) != 0]),
        began_steps=ran.step[began],
        began_t=ran.t0[began],
        nanoseconds=int(spent(ran.t0, ran.t1).sum(dtype=float)),
        first_t=int(ran.t0[0]),
        last=int(ran.step.max()),
    )


def _batches(mode: Array, tokens: Array, padded: Array) -> dict[int, tuple[int, int]]:
    """Graph mode -> (tokens, padded tokens) over the steps that tell both."""
    known = (tokens > 0) & (padded >= tokens) & (padded < 1 << 40)
    return {
        kind: (int(tokens[known & (mode == kind)].sum()), int(padded[known & (mode == kind)].sum()))
        for kind in np.unique(mode[known]).tolist()
    }
