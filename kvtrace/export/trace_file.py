"""A Perfetto trace file, packet by packet (TrackEvent in protobuf).

Field numbers are those of Perfetto's published ``perfetto_trace.proto``; a test reads what is written here
with the published schema. https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from kvtrace.export.protobuf import block, fixed64, number, text

# Trace
_PACKET = 1
# TracePacket
_CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE, _TRACK_EVENT = 6, 8, 10, 11
_INTERNED, _SEQUENCE_FLAGS, _TRACK = 12, 13, 60
_CLEARED, _NEEDED = 1, 2  # of its sequence_flags
# ClockSnapshot and its Clock
_CLOCKS, _CLOCK_ID, _CLOCK_TIME = 1, 1, 2
_REALTIME, _BOOTTIME = 1, 6
# TrackDescriptor
_UUID, _NAME, _PROCESS, _THREAD, _PARENT, _COUNTER, _ORDER = 1, 2, 3, 4, 5, 8, 11
_CHRONOLOGICAL, _UNIT_NAME = 2, 6
# ProcessDescriptor, ThreadDescriptor
_PID, _PROCESS_NAME, _TID, _THREAD_NAME = 1, 6, 2, 5
# TrackEvent
_ANNOTATION, _TYPE, _NAME_IID, _TRACK_UUID, _COUNT, _FLOWS, _ENDING_FLOWS = 4, 9, 10, 11, 30, 47, 48
_BEGIN, _END, _INSTANT, _COUNTED = 1, 2, 3, 4
# DebugAnnotation
_KEY_IID, _BOOL, _INT, _TEXT_IID = 1, 2, 4, 17
# InternedData
_EVENT_NAMES, _KEYS, _TEXTS = 2, 3, 29

Value = int | bool | str
Values = Mapping[str, Value]
_FLOW_BYTES = len(fixed64(_FLOWS, 0))
_FIRST_EVENT = 1 << 32
"""Number of the first track that is no process's."""


@dataclass
class WrittenTimeline:
    """What a timeline holds. ``ended``: of the flows, those that arrived."""

    tracks: int = 0
    slices: int = 0
    instants: int = 0
    flows: int = 0
    ended: int = 0


class TraceFile:
    """Writes packets to a binary file. Times are nanoseconds of one clock, for all of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.written = WrittenTimeline()

    def clocks(self, t: int, wall_ns: int) -> None:
        """Says that time `t` was that wall time."""
        pairs = ((_BOOTTIME, t), (_REALTIME, wall_ns))
        snapshot = b"".join(
            block(_CLOCKS, number(_CLOCK_ID, clock) + number(_CLOCK_TIME, value)) for clock, value in pairs
        )
        self.packet(number(_TIMESTAMP, t) + block(_CLOCK_SNAPSHOT, snapshot) + number(_SEQUENCE, 1))

    def process(self, pid: int, name: str) -> int:
        """A track of a process; its number."""
        return self._track(block(_PROCESS, number(_PID, pid) + text(_PROCESS_NAME, name)), "", 0)

    def thread(self, pid: int, tid: int, name: str) -> int:
        """... of a thread of that process."""
        thread = number(_PID, pid) + number(_TID, tid) + text(_THREAD_NAME, name)
        return self._track(block(_THREAD, thread), "", 0)

    def track(self, name: str, parent: int, in_order: bool = False) -> int:
        """... below another one; with `in_order` its children stand in the order of their first events."""
        return self._track(number(_ORDER, _CHRONOLOGICAL) if in_order else b"", name, parent)

    def counter(self, name: str, unit: str, parent: int) -> int:
        """... of a number that changes."""
        return self._track(block(_COUNTER, text(_UNIT_NAME, unit)), name, parent)

    def _track(self, kind: bytes, name: str, parent: int) -> int:
        self.written.tracks += 1
        ident = _FIRST_EVENT + self.written.tracks
        body = number(_UUID, ident) + kind
        if name:
            body += text(_NAME, name)
        if parent:
            body += number(_PARENT, parent)
        self.packet(block(_TRACK, body) + number(_SEQUENCE, 1))
        return ident

    def packet(self, body: bytes) -> None:
        self._file.write(block(_PACKET, body))


class Sequence:
    """The events of one source: names, keys and texts are written once, and numbered.

    `ident` is above 1 and its own.
    """

    def __init__(self, file: TraceFile, ident: int) -> None:
        self._file = file
        self._tail = number(_SEQUENCE, ident)
        self._known: dict[int, dict[str, int]] = {_EVENT_NAMES: {}, _KEYS: {}, _TEXTS: {}}
        self._new: list[bytes] = []
        self._begun = False

    def begin(self, track: int, t: int, name: str, values: Values, ending: Iterable[int] = ()) -> None:
        """A slice begins; `ending`: numbers of flows that end in it."""
        flows = b"".join(fixed64(_ENDING_FLOWS, flow) for flow in ending)
        self._event(t, _BEGIN, track, self._named(name, values) + flows)
        self._file.written.slices += 1
        self._file.written.ended += len(flows) // _FLOW_BYTES

    def end(self, track: int, t: int) -> None:
        """The innermost open slice of a track ends."""
        self._event(t, _END, track, b"")

    def instant(self, track: int, t: int, name: str, values: Values, flows: Iterable[int] = ()) -> None:
        """A moment; `flows`: numbers of flows that begin in it."""
        starting = b"".join(fixed64(_FLOWS, flow) for flow in flows)
        self._event(t, _INSTANT, track, self._named(name, values) + starting)
        self._file.written.instants += 1
        self._file.written.flows += len(starting) // _FLOW_BYTES

    def count(self, track: int, t: int, value: int) -> None:
        """A counter's value from here on."""
        self._event(t, _COUNTED, track, number(_COUNT, value))

    def _named(self, name: str, values: Values) -> bytes:
        body = number(_NAME_IID, self._number(_EVENT_NAMES, name))
        for key, value in values.items():
            body += block(_ANNOTATION, number(_KEY_IID, self._number(_KEYS, key)) + self._value(value))
        return body

    def _value(self, value: Value) -> bytes:
        if isinstance(value, bool):
            return number(_BOOL, value)
        if isinstance(value, int):
            return number(_INT, value)
        return number(_TEXT_IID, self._number(_TEXTS, value))

    def _number(self, kind: int, name: str) -> int:
        known = self._known[kind]
        found = known.get(name)
        if found is None:
            found = known[name] = len(known) + 1
            self._new.append(block(kind, number(1, found) + text(2, name)))
        return found

    def _event(self, t: int, kind: int, track: int, more: bytes) -> None:
        event = number(_TYPE, kind) + number(_TRACK_UUID, track) + more
        body = number(_TIMESTAMP, t) + block(_TRACK_EVENT, event) + self._tail
        if self._new:
            body += block(_INTERNED, b"".join(self._new))
            self._new.clear()
        flags = _NEEDED if self._begun else _CLEARED | _NEEDED
        self._begun = True
        self._file.packet(body + number(_SEQUENCE_FLAGS, flags))
