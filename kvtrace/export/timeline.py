"""A run as a timeline for Perfetto: tracks of processes, threads, hooks and requests, and flows from the
scheduler's metadata to the workers' saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvtrace.export.events import SKIPS, WAYS, flag_words
from kvtrace.export.frame import shown
from kvtrace.export.lives import Life, NumberedEntry, lives
from kvtrace.export.run import Opened, SpoolProcess
from kvtrace.export.trace_file import Sequence as Events
from kvtrace.export.trace_file import TraceFile, Value, Values, WrittenTimeline
from kvtrace.ledger import Progress, unwatched
from kvtrace.ledger.run import Worker
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.format import DETAIL_IS_OP, MODES, STEP_MASK, STEP_SHIFT, Dispatch, Flag, Kind, Role
from kvtrace.trace.reader import Records

Names = Mapping[int, str]
_FIRST_SEQUENCE = 2
_HOOKS, _REQUESTS, _OUTSIDE, _TOKENS = "connector hooks", "requests", "files and peers", "tokens per step"


class Slice(NamedTuple):
    """A slice to be written, with times of its process; ``ending``: flows that end in it."""

    t0: int
    t1: int
    track: tuple[Any, ...]
    name: str
    values: Values
    ending: tuple[int, ...] = ()


def write_perfetto(run: Opened, path: Path, progress: Progress = unwatched) -> WrittenTimeline:
    """Writes the timeline of a run to a new file.

    Raises:
        SpoolError: a spool vanished.
        OSError: the disk is full, ...
    """
    found = lives(run)
    flows = _Flows(run, found)
    with open(path, "wb") as file:
        out = TraceFile(file)
        clock = min((one.shift_ns for one in run.processes), default=0)
        began = min((life.began for life in found), default=0)
        out.clocks(max(began - clock, 0), max(began, clock))
        tracks = [
            _Tracks(out, process, pid)
            for process, pid in zip(run.processes, _pids(run.processes), strict=True)
        ]
        for number, process in enumerate(run.processes):
            events = Events(out, _FIRST_SEQUENCE + number)
            writer = _Writer(process, process.shift_ns - clock, tracks[number], events, flows)
            for chunk, names in run.chunks(process, progress):
                writer.add(chunk, names)
            for life in found:
                if life.process is process:
                    _write_life(life, writer, flows)
        return out.written


def _pids(processes: Sequence[SpoolProcess]) -> list[int]:
    """The processes' ids; where one is there twice (several hosts, used again) it is made another."""
    found: list[int] = []
    for process in processes:
        pid = process.pid
        while pid in found:
            pid += 1 << 22  # above every real one
        found.append(pid)
    return found


class _Tracks:
    """The tracks of one process, made as they are needed."""

    def __init__(self, out: TraceFile, process: SpoolProcess, pid: int) -> None:
        self._out, self._pid = out, pid
        self._process = out.process(pid, shown(process.name) or "process")
        self._known: dict[tuple[Any, ...], int] = {}

    def get(self, key: tuple[Any, ...]) -> int:
        if key not in self._known:
            self._known[key] = self._made(key)
        return self._known[key]

    def _made(self, key: tuple[Any, ...]) -> int:
        match key:
            case ("thread", int(index), int(lane)) if lane == 0:
                return self._out.thread(self._pid, self._pid + index, f"thread {index}")
            case ("thread", int(index), int(lane)):
                return self._out.track(f"thread {index}, overlapping", self._process)
            case ("hook", str(name), int(index), int(_)):
                title = name if index == 0 else f"{name} (thread {index})"
                return self._out.track(title, self.get(("group", _HOOKS)))
            case ("request", str(name), int(_), int(_)):
                return self._out.track(name, self.get(("group", _REQUESTS)))
            case ("group", str(name)):
                return self._out.track(name, self._process, in_order=name == _REQUESTS)
            case ("counter", str(name)):
                return self._out.counter(name, "tokens", self._process)
        return self._out.track(str(key[0]), self._process)


@dataclass
class _Writer:
    """Writes the records of one process. ``shift``: what makes the timeline's time of its clock."""

    process: SpoolProcess
    shift: int
    tracks: _Tracks
    events: Events
    flows: _Flows

    def add(self, chunk: Records, names: Names) -> None:
        kinds = rows.kind(chunk[:, 0])
        calls: list[Slice] = []
        for kind in _CALLS:
            calls += [_call(kind, row, names, self) for row in _decoded(kind, chunk[kinds == kind])]
        self.slices(calls)
        for kind, moment in _MOMENTS.items():
            for row in _decoded(kind, chunk[kinds == kind]):
                moment(row, names, self)

    def slices(self, calls: Iterable[Slice]) -> None:
        """Writes slices so that on each track they are nested; what is not goes to another lane."""
        open_: dict[tuple[Any, ...], list[Slice]] = {}
        for call in sorted(calls, key=lambda one: (one.t0, -one.t1)):
            lane = 0
            while True:
                stack = open_.setdefault((*call.track, lane), [])
                self._end(stack, (*call.track, lane), call.t0)
                if not stack or call.t1 <= stack[-1].t1:
                    break
                lane += 1
            stack.append(call)
            track = self.tracks.get((*call.track, lane))
            self.events.begin(track, self.at(call.t0), call.name, call.values, call.ending)
        for key, stack in open_.items():
            self._end(stack, key, None)

    def _end(self, stack: list[Slice], key: tuple[Any, ...], t: int | None) -> None:
        while stack and (t is None or stack[-1].t1 <= t):
            self.events.end(self.tracks.get(key), self.at(stack.pop().t1))

    def instant(self, track: tuple[Any, ...], t: int, name: str, values: Values) -> None:
        self.events.instant(self.tracks.get(track), self.at(t), name, values)

    def at(self, t: int) -> int:
        return max(t + self.shift, 0)


def _decoded(kind: Kind, table: Records) -> Iterable[Any]:
    return map(rows.ROWS[kind]._make, table.tolist())


def _values(**given: Value | None) -> dict[str, Value]:
    """What is known of these: no None, no empty text, no number below 0."""
    return {
        key: value
        for key, value in given.items()
        if value is not None and value != "" and not (isinstance(value, int) and value < 0)
    }


def _name(names: Names, ident: int) -> str:
    return shown(names.get(ident, "")) or ""


def _thread(head: int) -> tuple[Any, ...]:
    return "thread", rows.thread(head)


# ---------------------------------------------------------------------------------- slices


_READ: Mapping[str, Callable[[Any, Names], Value | None]] = {
    "connector": lambda row, names: rows.detail(row.head),
    "direct": lambda row, names: True if rows.detail(row.head) == Dispatch.DIRECT else None,
    "error": lambda row, names: _name(names, row.extra) if rows.flags(row.head) & Flag.RAISED else None,
    "flags": lambda row, names: flag_words(rows.flags(row.head)),
    "layer": lambda row, names: _name(names, row.layer),
    "mode": lambda row, names: MODES.get(row.mode),
    "padded": lambda row, names: row.padded or None,
    "preempted": lambda row, names: row.gone >> 32 or None,
    "skip": lambda row, names: SKIPS.get(row.skip),
    "step": lambda row, names: row.step & STEP_MASK or None,
}
"""Values that are not the record's field of that name as it stands."""


def _told(row: Any, names: Names, keys: Iterable[str]) -> dict[str, Value]:
    return _values(**{key: _READ[key](row, names) if key in _READ else getattr(row, key) for key in keys})


_CALLS: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    Kind.HOOK: ("hook", ("layer", "step", "slots", "entries", "connector", "flags", "error")),
    Kind.OP: ("op", ("layer", "step", "mode", "skip", "direct", "flags")),
    Kind.STEP: ("schedule", ("step", "tokens", "requests", "new_requests", "preempted")),
    Kind.EXEC: ("execute_model", ("step", "tokens", "requests", "mode", "padded", "flags")),
}
"""What a slice is called where its code has no name, and what it tells."""
_OF_CODE = {Kind.HOOK: hooks.name_of, Kind.OP: ops.name_of}


def _callee(kind: Kind, head: int) -> str:
    code = rows.code(head)
    return _OF_CODE[kind](code) or f"{_CALLS[kind][0]} {code}"


def _call(kind: Kind, row: Any, names: Names, writer: _Writer) -> Slice:
    name, keys = _CALLS[kind]
    name = _callee(kind, row.head) if kind in _OF_CODE else name
    track, ending = _thread(row.head), tuple[int, ...]()
    if kind == Kind.HOOK:
        track, ending = ("hook", name, rows.thread(row.head)), writer.flows.ending(row, writer.process)
    elif kind == Kind.STEP:
        writer.events.count(writer.tracks.get(("counter", _TOKENS)), writer.at(row.t0), max(row.tokens, 0))
    return Slice(row.t0, max(row.t0, row.t1), track, name, _told(row, names, keys), ending)


# --------------------------------------------------------------------------------- moments


def _effect(row: rows.Effect, names: Names, writer: _Writer) -> None:
    if max(row.slots, row.bytes, row.files) <= 0:
        return
    name = _callee(Kind.HOOK, row.head)
    copied = "slots_written" if rows.flags(row.head) & Flag.LOAD else "slots_read"
    values = _values(**{copied: row.slots}, bytes=row.bytes or None, files=row.files or None)
    values |= _told(row, names, ("layer", "step"))
    writer.instant(("hook", name, rows.thread(row.head), 0), row.t, "effect", values)


def _outside(row: rows.Outside, names: Names, writer: _Writer) -> None:
    way = WAYS.get(rows.code(row.head), "unknown way")
    values = _values(bytes=row.bytes, errors=row.errors, step=row.step & STEP_MASK or None)
    writer.instant((_OUTSIDE,), row.t, way, values)


def _quiet(row: rows.QuietCalls, names: Names, writer: _Writer) -> None:
    is_op = rows.detail(row.head) & DETAIL_IS_OP
    name = (ops if is_op else hooks).name_of(rows.code(row.head)) or "unknown"
    track = (*_thread(row.head), 0) if is_op else ("hook", name, rows.thread(row.head), 0)
    values = _values(calls=row.count, total_ns=row.total_ns, step=row.step & STEP_MASK or None)
    writer.instant(track, row.t0, f"{name}, quiet", values)


_MOMENTS: dict[Kind, Callable[[Any, Names, _Writer], None]] = {
    Kind.EFFECT: _effect,
    Kind.OUTSIDE: _outside,
    Kind.QUIET: _quiet,
}


# ------------------------------------------------------------------------------------ flows


class _Flows:
    """From each entry of the metadata to the first call, on each worker, that works on it.

    Flows are numbered by entry and worker; a worker that never makes the call leaves its flow open.
    """

    def __init__(self, run: Opened, found: Sequence[Life]) -> None:
        self._workers = [one for one in run.processes if one.ranks]
        self._saving = {
            (one.spool, one.engine): _saving(one) for engine in run.run.engines for one in engine.workers
        }
        self._entries: dict[tuple[int, Flag], list[int]] = {}
        for life in found:
            for entry in life.entries:
                for direction in (Flag.STORE, Flag.LOAD):
                    if rows.flags(entry.row.head) & direction and entry.row.slots:
                        self._entries.setdefault((entry.row.step, direction), []).append(entry.number)
        self._done: set[tuple[int, Flag, str]] = set()

    def beginning(self, entry: NumberedEntry) -> list[int]:
        """The flows that begin in an entry, one for each worker of its engine."""
        tag = entry.row.step >> STEP_SHIFT
        if entry.row.slots == 0:
            return []  # nothing was asked for
        return [
            self._flow(entry.number, at) for at, worker in enumerate(self._workers) if tag in worker.ranks
        ]

    def ending(self, row: rows.HookCall, process: SpoolProcess) -> tuple[int, ...]:
        """The flows that end in a call: where it is the first of its step that works on its entries."""
        hook = hooks.BY_CODE.get(rows.code(row.head))
        if hook is None or hook.direction is None or row.slots <= 0 or rows.role(row.head) != Role.WORKER:
            return ()
        key = (row.step, hook.direction, process.stem)
        if key in self._done or key[:2] not in self._entries:
            return ()
        saving = self._saving.get((process.path.name, row.step >> STEP_SHIFT))
        if hook.direction is Flag.STORE and saving is not None and hook is not saving:
            return ()
        self._done.add(key)
        at = self._workers.index(process)
        return tuple(self._flow(entry, at) for entry in self._entries[key[:2]])

    def _flow(self, entry: int, worker: int) -> int:
        return 1 + entry * len(self._workers) + worker


def _saving(worker: Worker) -> hooks.Hook:
    return hooks.SAVE_LAYER if worker.saves_per_layer else hooks.WAIT_SAVE


# --------------------------------------------------------------------------------- requests


def _write_life(life: Life, writer: _Writer, flows: _Flows) -> None:
    """A request's track: a slice from its arrival to its end, and in it what happened to it."""
    here = writer.process.shift_ns
    title = shown(life.client or life.id) or "request"
    track = ("request", title, life.number)
    values = _values(id=shown(life.id), client=shown(life.client), verdict=life.verdict, **life.numbers)
    values["finished"] = life.finished
    calls = [Slice(life.began - here, life.ended - here, track, f"request {title}", values)]
    calls += [Slice(t0 - here, t1 - here, track, name, _values(**more)) for t0, t1, name, more in life.spans]
    writer.slices(calls)
    lane = writer.tracks.get((*track, 0))
    for t, name, more in life.moments:
        writer.events.instant(lane, writer.at(t - here), name, _values(**more))
    for entry in life.entries:
        told = _told(entry.row, {}, ("step", "slots", "tokens", "start"))
        name = f"metadata: {_purpose(entry.row.head)}"
        writer.events.instant(lane, writer.at(entry.t - here), name, told, flows.beginning(entry))


def _purpose(head: int) -> str:
    words = [word for flag, word in ((Flag.STORE, "save"), (Flag.LOAD, "load")) if rows.flags(head) & flag]
    return " and ".join(words) or "entry"
