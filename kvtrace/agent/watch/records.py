"""EFFECT and SLOTS records: which KV slots one watched call, or one piece of background work, touched.

Where the values of an index are still on their way from a device, the records of that call wait until they
are there: they are asked for at the end of each step, and never waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvtrace.agent.ids import Names, next_call
from kvtrace.agent.kv.touch import Spans, completing, text_of
from kvtrace.agent.state import AGENT
from kvtrace.agent.watch.operations import GIVEN_OUT, NO_SLOTS, READ, WRITTEN, CopyWatch, Touched
from kvtrace.trace.format import UNKNOWN, Flag, Kind, Role, pack_head
from kvtrace.trace.rows import Effect, SlotsTouched

_MOST_NAMES = 64
_MOST_WAITING = 256
_MOST_HALVES, _MOST_PARTS = 512, 32
FLAGS: dict[str, int] = {READ: Flag.STORE, WRITTEN: Flag.LOAD, GIVEN_OUT: Flag.STORE | Flag.LOAD}
"""Of memory that was given out by address it is not known which of both was done."""

_waiting: list[Touching] = []
_halves: dict[tuple[int, str], list[Spans]] = {}
"""(step, layer) -> what was read of it by calls that read parts of slots, in whatever thread."""
AGENT.openings += (_halves.clear,)


class CallEffect(NamedTuple):
    """What the EFFECT records of a hook's call say beside the slots.

    Attributes:
        ways: of which they speak (READ, WRITTEN), first the one that the hook is for.
        nothing: slots in the record of a call that copied nothing in this way; None: there is no record then.
        layer: name of the layer in that record.
        bytes, files, target: as in :class:`~kvtrace.trace.rows.Effect`.
    """

    ways: tuple[str, ...]
    nothing: int | None
    layer: str | None = None
    bytes: int = UNKNOWN
    files: int = UNKNOWN
    target: int = 0


@dataclass
class Touching:
    """One watched call, over. ``code``: the hook's, 0 where it was none; ``t``: host time of its end, ns;
    ``call``: of :func:`next_call`."""

    watch: CopyWatch
    code: int
    connector: int
    step: int
    t: int
    thread: int
    call: int = 0
    over: bool = False
    """Of work in the background: all of it is done."""
    effect: CallEffect | None = None
    """Of a hook's call."""

    def write(self) -> None:
        """Now, or once all that names its slots is on the host."""
        self.call = self.call or next_call()
        if self.watch.settled():
            self._write()
            return
        _waiting.append(self)
        if len(_waiting) > _MOST_WAITING:
            _waiting.pop(0)._write(known=False)

    def _write(self, known: bool = True) -> None:
        touched = self.watch.touched()
        if not known:
            touched.update(self.watch.unsettled())
        shared = {
            layer
            for layer, _ in touched
            if any(other != layer and self.watch.caches.on_the_same(layer, other) for other, _ in touched)
        }
        if self.effect is not None:
            self._effects(self.effect, touched, shared)
        for (layer, way), slots in touched.items():
            if way == READ and slots is not None and slots.partly:
                slots = self._with_halves(layer, slots)
            marks = FLAGS[way] | (Flag.SHARED if layer in shared else 0)
            # A hook's call is over at once; work in the background may go on over several steps.
            t = self.t if self.code else self.watch.time(layer, way) or self.t
            self._slots(marks, t, layer, slots)
        for layer in sorted(self.watch.blind):
            self._slots(Flag.STORE, self.t, layer, None)
        for layer in sorted(self.watch.maybe_written) if self.over else ():
            self._slots(Flag.LOAD | Flag.ASYNC, self.t, layer, None)

    def _effects(
        self, effect: CallEffect, touched: Mapping[tuple[str, str], Touched | None], shared: Collection[str]
    ) -> None:
        found: list[tuple[str, str | None, int]] = []
        for its in effect.ways:
            for (layer, way), slots in touched.items():
                if way == its and slots is not NO_SLOTS:
                    # Layers of different groups share memory: nothing says whose it is now.
                    known = slots is not None and layer not in shared
                    found.append((way, layer, slots.copied if slots and known else UNKNOWN))
        if effect.nothing is not None and not any(way == effect.ways[0] for way, _, _ in found):
            found.insert(0, (effect.ways[0], effect.layer, effect.nothing))
        written = effect.bytes, effect.files, effect.target
        for way, name, copied in found:
            head = pack_head(Kind.EFFECT, Role.WORKER, self.code, self.connector, FLAGS[way], self.thread)
            AGENT.add(Effect(head, self.t, AGENT.id(name) if name else 0, self.step, copied, *written))
            written = UNKNOWN, UNKNOWN, 0  # it is the call's, not the layer's

    def _with_halves(self, layer: str, slots: Touched) -> Touched:
        """With what other calls for the same step read of these slots: K in one job, V in another. That it
        read a part itself is still said: its bytes are a part, too."""
        own, every = self.watch.parts_read(layer), _halves.setdefault((self.step, layer), [])
        while len(_halves) > _MOST_HALVES:
            _halves.pop(next(iter(_halves)), None)  # those of the oldest steps
        if not self.step or len(every) + len(own) > _MOST_PARTS:
            return slots
        every += own
        others = every[: -len(own)]  # of two threads at once the later one sees both
        layout = self.watch.layout(layer) if others else None
        found = None if layout is None else completing(layout, own, others)
        return slots if found is None else slots._replace(full=len(found.full), text=text_of(found))

    def _slots(self, marks: int, t: int, layer: str, slots: Touched | None) -> None:
        """``slots`` None: which is not known."""
        head = pack_head(Kind.SLOTS, Role.WORKER, self.code, self.connector, marks, self.thread)
        ident, amounts = 0, (UNKNOWN, UNKNOWN)
        if slots is not None:
            ident, amounts = _NAMES.id(slots.text), (slots.full, slots.partly)
        AGENT.add(SlotsTouched(head, t, AGENT.id(layer), self.step, ident, *amounts, self.call))


def settle() -> None:
    """Write what has been waiting and is there by now, in the order of the calls."""
    while _waiting and _waiting[0].watch.settled():
        _waiting.pop(0)._write()


_NAMES = Names(_MOST_NAMES)
