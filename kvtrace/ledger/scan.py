"""First reading of the spools: facts, names, what the scheduler said, which steps ran.

Rows about requests are kept (they grow with the requests, not with the steps); steps and
executions become counts and one number a step; hook and op records are left to
:mod:`kvtrace.ledger.coverage`, which needs the results of this reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.device import DeviceTimes
from kvtrace.trace import facts
from kvtrace.trace.format import HOOK_CODE, STEP_MASK, STEP_SHIFT, Flag, Kind
from kvtrace.trace.reader import Documents, Records, Spool, SpoolInfo, code, detail, flags, kind, of_type

Array = NDArray[np.int64]
F = TypeVar("F", bound=facts.Document)

_REQUEST_KINDS = np.array(
    [Kind.CHUNK, Kind.REQUEST, Kind.LOOKUP, Kind.ALLOC, Kind.META, Kind.PREEMPT, Kind.FINISH, Kind.PREFIX,
     Kind.OPEN, Kind.DONE],
    dtype=np.int64,
)  # fmt: skip
_KIND_IS_REQUEST = np.zeros(256, dtype=bool)
_KIND_IS_REQUEST[_REQUEST_KINDS] = True
_EMPTY: Array = np.empty(0, dtype=np.int64)


def real_step(step: Array) -> NDArray[np.bool_]:
    """Steps that are steps: 0 and what has no number within its engine are not."""
    result: NDArray[np.bool_] = (step > 0) & ((step & STEP_MASK) > 0)
    return result


class Steps:
    """A set of steps, eight bytes each."""

    def __init__(self, steps: Array) -> None:
        self.sorted: Array = np.unique(steps)

    def __contains__(self, step: int) -> bool:
        return self.any_within(step, step)

    def __len__(self) -> int:
        return len(self.sorted)

    def any_within(self, low: int, high: int) -> bool:
        """Whether a step of the set lies in [low, high]."""
        at = int(np.searchsorted(self.sorted, low))
        return at < len(self.sorted) and int(self.sorted[at]) <= high


@dataclass
class Executed:
    """What the workers of one spool executed, for one engine tag."""

    steps: Array  # sorted, distinct: real forward steps
    mode_of: NDArray[np.int8]  # graph mode of each of these steps
    modes: dict[int, int]  # graph mode -> real steps
    batches: dict[int, tuple[int, int]]  # graph mode -> (tokens, padded tokens), where both are known
    capturing: int  # steps in which a graph was captured
    full: Array  # of these, with mode FULL
    idle: Array  # sorted, distinct: executed without a token
    nanoseconds: int
    first_t: int
    last: int  # greatest step executed


@dataclass
class Scheduled:
    """schedule() calls of one engine tag."""

    steps: int = 0
    real: int = 0
    tokens: int = 0
    first_t: int = 0
    last_t: int = 0


@dataclass
class SpoolScan:
    path: Path
    pid: int
    names: dict[int, str]
    documents: Documents
    header: facts.Header
    info: SpoolInfo
    rows: Records  # (n, 8): the request kinds, in file order
    scheduled: dict[int, Scheduled] = field(default_factory=dict)
    executed: dict[int, Executed] = field(default_factory=dict)
    unreadable: dict[int, Array] = field(default_factory=dict)  # connector ordinal -> steps
    effects: Records = field(default_factory=lambda: np.empty((0, 8), dtype=np.int64))  # EFFECT, in order
    device: DeviceTimes = field(default_factory=DeviceTimes)

    def facts(self, kind: type[F]) -> list[F]:
        """The facts of one type, in file order."""
        return [fact for _, fact in of_type(kind, self.documents)]

    def timed_facts(self, kind: type[F]) -> list[tuple[int, F]]:
        """... each with the time at which it was written."""
        return of_type(kind, self.documents)


@dataclass
class _Executions:
    step: list[Array] = field(default_factory=list)
    mode: list[Array] = field(default_factory=list)
    batch: list[Array] = field(default_factory=list)  # (n, 3): tokens, padded, captured
    idle: list[Array] = field(default_factory=list)
    spent: dict[int, list[int]] = field(default_factory=dict)  # tag -> [ns, first t, last step]

    def add(self, rows: Records) -> None:
        step, marks = rows[:, 3], flags(rows[:, 0])
        dummy = (marks & int(Flag.DUMMY)) != 0
        rows, step, marks = (part[real_step(step) & ~dummy] for part in (rows, step, marks))
        if not len(rows):
            return
        idle = (rows[:, 4] == 0) | ((marks & int(Flag.NO_FORWARD)) != 0)
        self.step.append(step[~idle].copy())
        self.mode.append(np.clip(rows[~idle, 6], -1, 2))
        captured = (marks & int(Flag.CAPTURE)) != 0
        self.batch.append(np.stack([rows[:, 4], rows[:, 7], captured.astype(np.int64)], axis=1)[~idle])
        self.idle.append(step[idle].copy())
        for tag in np.unique(step >> STEP_SHIFT).tolist():
            mine = (step >> STEP_SHIFT) == tag
            spans = np.clip(rows[mine, 2].astype(float) - rows[mine, 1].astype(float), 0, None)
            spent = self.spent.setdefault(tag, [0, int(rows[mine, 1][0]), 0])
            spent[0] += int(spans.sum())
            spent[2] = max(spent[2], int(step[mine].max()))

    def result(self) -> dict[int, Executed]:
        step = np.concatenate([_EMPTY, *self.step])
        mode = np.concatenate([_EMPTY, *self.mode])
        idle = np.unique(np.concatenate([_EMPTY, *self.idle]))
        batch = np.concatenate([np.empty((0, 3), dtype=np.int64), *self.batch])
        step, first = np.unique(step, return_index=True)
        mode, batch = mode[first], batch[first]
        done = {}
        for tag, (spent, first_t, last) in self.spent.items():
            mine = (step >> STEP_SHIFT) == tag
            kinds, counts = np.unique(mode[mine], return_counts=True)
            own_idle = idle[(idle >> STEP_SHIFT) == tag]
            done[tag] = Executed(
                steps=step[mine],
                mode_of=mode[mine].astype(np.int8),
                batches=_batches(mode[mine], batch[mine]),
                capturing=int(batch[mine, 2].sum()),
                modes=dict(zip(kinds.tolist(), counts.tolist(), strict=True)),
                full=step[mine & (mode == 2)],
                idle=own_idle[~np.isin(own_idle, step[mine])],
                nanoseconds=spent,
                first_t=first_t,
                last=last,
            )
        return done


def _batches(mode: Array, batch: Records) -> dict[int, tuple[int, int]]:
    told = (batch[:, 0] > 0) & (batch[:, 1] >= batch[:, 0]) & (batch[:, 1] < 1 << 40)
    return {
        kind: (int(batch[told & (mode == kind), 0].sum()), int(batch[told & (mode == kind), 1].sum()))
        for kind in np.unique(mode[told]).tolist()
    }


def _add_schedules(scheduled: dict[int, Scheduled], rows: Records) -> None:
    rows = rows[real_step(rows[:, 3])]
    tags = rows[:, 3] >> STEP_SHIFT
    for tag in np.unique(tags).tolist():
        mine = rows[tags == tag]
        tally = scheduled.setdefault(tag, Scheduled(first_t=int(mine[0, 1])))
        tally.steps += len(mine)
        tally.real += int(np.count_nonzero(mine[:, 4] > 0))
        tally.tokens += int(np.clip(mine[:, 4], 0, None).sum())
        tally.last_t = max(tally.last_t, int(mine[-1, 2]))


def scan(path: Path) -> SpoolScan:
    """Read one spool once.

    Raises:
        SpoolError: its header cannot be read.
    """
    spool = Spool(path)
    kept: list[Records] = []
    scheduled: dict[int, Scheduled] = {}
    executions = _Executions()
    unreadable: dict[int, list[Array]] = {}
    effects: list[Records] = []
    device = DeviceTimes()
    for chunk in spool.chunks():
        kinds = kind(chunk[:, 0])
        head = chunk[:, 0]
        dark = (kinds == Kind.HOOK) & (code(head) == HOOK_CODE["build_connector_meta"])
        dark &= (flags(head) & int(Flag.UNREADABLE)) != 0
        if dark.any():
            for ordinal in np.unique(detail(head[dark])).tolist():
                unreadable.setdefault(ordinal, []).append(chunk[dark & (detail(head) == ordinal), 3])
        mine = _KIND_IS_REQUEST[kinds]
        if mine.any():
            kept.append(chunk[mine])
        measured = kinds == Kind.EFFECT
        if measured.any():
            effects.append(chunk[measured])
        steps = kinds == Kind.STEP
        if steps.any():
            _add_schedules(scheduled, chunk[steps])
        timed = kinds == Kind.DEVICE
        if timed.any():
            device.add_calls(chunk[timed])
        timed = kinds == Kind.TIMED
        if timed.any():
            device.add_steps(chunk[timed])
        ran = kinds == Kind.EXEC
        if ran.any():
            executions.add(chunk[ran])
    rows: Records = np.concatenate(kept) if kept else np.empty((0, 8), dtype=np.int64)
    header = facts.Header.from_json(spool.header)
    return SpoolScan(
        path=path,
        pid=header.pid,
        names=spool.names,
        documents=spool.documents(),
        header=header,
        info=spool.info(),
        rows=rows,
        scheduled=scheduled,
        executed=executions.result(),
        unreadable={ordinal: np.concatenate(parts) for ordinal, parts in unreadable.items()},
        effects=np.concatenate(effects) if effects else np.empty((0, 8), dtype=np.int64),
        device=device,
    )
