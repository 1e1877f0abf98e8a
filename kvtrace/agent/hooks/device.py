"""Device time of hooks and ops on CUDA: pairs of events, never waited for.

In a step that is timed (``budget.py`` says which), the outermost connector's hooks, the attention bodies
and the KV-cache updates have an event recorded before and after them, each on the stream that is
current then. Nothing synchronises: at the end of a step the pairs of earlier steps are read if
``query()`` says that they are done, else they are left for the next step. The pool is made
once, when the worker's KV cache is; where it is empty a call goes untimed and is counted. While the stream
is being captured nothing is recorded and nothing is asked. (A query also breaks what another thread captures
in CUDA's global mode. vLLM captures before its first step, and waits for events in each: a capture that
survives its steps is of a mode that bears queries, too.)

What the device had left to do when a call began (``before``) follows from the events alone. They
stand on one device clock; an event is not done before it was recorded, so ``host time of recording -
device time`` of each event of the step is a lower bound of what lies between the two clocks. The
greatest of them places the device's clock on the host's, at the earliest possible.

Where the platform is not CUDA, or timing is off, no wrapper is made: see :func:`wanted`.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from kvtrace.agent.budget import BudgetAccount
from kvtrace.agent.facts import describe
from kvtrace.agent.state import AGENT, clock, complain
from kvtrace.agent.wrap import frames
from kvtrace.agent.wrap.codegen import generate
from kvtrace.agent.wrap.hooked import Hooked
from kvtrace.trace import rows
from kvtrace.trace.facts import DeviceTimingFact
from kvtrace.trace.format import DETAIL_IS_OP, Flag, Kind, Role, pack_head
from kvtrace.trace.ops import Op

_LEAST_PAIRS, _MOST_PAIRS = 64, 4096
_STEPS_IN_FLIGHT = 3
_CALLS_A_LAYER = 4  # wait, KV update, attention, save
_CALLS_A_STEP = 8
_TIMED = pack_head(Kind.TIMED, Role.WORKER)

_TEMPLATE = """
def _kvt_wrapper({parameters}):
    if not _kvt_device.on:
        return _kvt_body({arguments})
    try:
        return _kvt_timed(_kvt_body, _kvt_head, layer_name, {arguments})
    except BaseException as _kvt_error:
        _kvt_step_out(_kvt_error)
        raise
"""


def wanted() -> bool:
    """Whether calls of this process are to be wrapped for timing. Touches no device."""
    return AGENT.config.device_timing != "off" and describe.platform() == "cuda"


class EventPair:
    """Two events around one call, and what the host knows of it."""

    __slots__ = ("begun", "caught_up", "end", "ended", "head", "layer", "start", "streams", "t0", "t1")

    def __init__(self, start: Any, end: Any) -> None:
        self.start, self.end = start, end
        self.head = self.begun = self.t0 = self.t1 = self.ended = 0
        self.streams = (0, 0)
        """Those that it began and ended on."""
        self.layer: Any = None
        self.caught_up = False


class _Step:
    """The pairs of one timed step that are still to be read."""

    def __init__(self, step: int, pairs: list[EventPair], untimed: int, cost: int, busy: int) -> None:
        self.step, self.pairs, self.untimed, self.cost, self.busy = step, pairs, untimed, cost, busy
        # In a stream events are done in order: the last pair speaks for the others.
        self._last = list({pair.streams: pair for pair in pairs}.values())

    def done(self) -> bool:
        while self._last:
            pair = self._last[-1]
            if not (pair.end.query() and pair.start.query()):
                return False
            self._last.pop()
        return True


class Device:
    """The device timing of one worker process.

    Attributes:
        on: whether calls are timed just now. The wrappers read it at every call.
    """

    def __init__(self) -> None:
        self.on = False
        self._cuda: Any = None  # set while timing is possible
        self._sampler = BudgetAccount("sampled", 0.0)
        self._free: list[EventPair] = []
        self._pairs = 0
        self._taken: list[EventPair] = []
        self._steps: deque[_Step] = deque()
        self._index_of_device = 0
        self._step = self._began = self._busy = self._cost = self._untimed = 0

    # --- the pool -------------------------------------------------------------------------

    def open(self, layers: int) -> None:
        """Make the pool for a model of so many KV layers. Never raises: without it, no timing."""
        if not wanted():
            return
        least = _STEPS_IN_FLIGHT * (_CALLS_A_LAYER * layers + _CALLS_A_STEP)
        pairs = min(max(least, _LEAST_PAIRS), _MOST_PAIRS)
        try:
            cuda = sys.modules["torch"].cuda
            stream = cuda.current_stream()
            self._index_of_device = stream.device_index
            for _ in range(self._pairs, pairs):
                pair = EventPair(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
                # CUDA makes an event when it is recorded first: now, and not in a step.
                pair.start.record(stream)
                pair.end.record(stream)
                self._free.append(pair)
                self._pairs += 1
        except Exception as error:
            self._give_up(error)
            return
        self._cuda = cuda
        self._sampler = BudgetAccount(AGENT.config.device_timing, AGENT.config.budget)
        self._write_fact(True)

    def _give_up(self, error: BaseException) -> None:
        """No more timing in this process: one line in the report and one on stderr."""
        self.on, self._cuda = False, None
        self._free, self._taken = [], []
        self._pairs = 0
        self._steps.clear()
        try:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self._write_fact(False, why)
            complain(f"device times are not taken in process {AGENT.pid}: {why}")
        except Exception:
            AGENT.failed("device timing")

    def _write_fact(self, on: bool, why: str = "") -> None:
        AGENT.fact(DeviceTimingFact(on, why), Role.WORKER, standing="device")

    # --- steps ----------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step begins (0: none that counts)."""
        if self._cuda is None:
            return
        self._began = clock()
        recorder = AGENT.recorder
        # Past the spool's size limit quiet steps are kept as sums, and none is timed; nor is one where the
        # recording has ended (disk full).
        recording = recorder is not None and recorder.alive and not recorder.full
        self.on = bool(step) and recording and self._sampler.take()
        self._step = step

    def finish(self) -> None:
        """The step is over: keep its pairs, read those that are done."""
        if self._cuda is None or not self._began:
            return
        on, self.on = self.on, False
        try:
            now = clock()
            busy = now - self._began
            self._began = 0
            self._busy += busy
            self._sampler.busy += busy
            if on:
                self._sampler.spent(self._cost)
                self._steps.append(_Step(self._step, self._taken, self._untimed, self._cost, self._busy))
                self._taken, self._cost, self._untimed, self._busy = [], 0, 0, 0
            if self._steps and not self._cuda.is_current_stream_capturing():
                self._drain()
        except Exception as error:
            self._give_up(error)

    def _drain(self) -> None:
        while self._steps:
            began = clock()
            step = self._steps[0]
            if not step.done():
                self._sampler.spent(clock() - began)
                return
            self._steps.popleft()
            calls, lost = self._read(step)
            self._free.extend(step.pairs)
            now = clock()
            self._sampler.spent(now - began)
            cost = step.cost + now - began
            self._sampler.learned(cost)
            row = rows.TimedStep(
                _TIMED, now, step.step, calls, step.untimed, lost, own_ns=cost, busy_ns=step.busy
            )
            AGENT.add(row)

    def _read(self, step: _Step) -> tuple[int, int]:
        """Write the step's DEVICE records; (calls with times, pairs given up)."""
        if not step.pairs:
            return 0, 0
        base = step.pairs[0].start
        offset = None  # host clock - device clock, at least
        times: list[tuple[EventPair, int, int]] = []
        for pair in step.pairs:
            try:
                begin = _nanoseconds(base.elapsed_time(pair.start)) if pair.start is not base else 0
                device = _nanoseconds(pair.start.elapsed_time(pair.end))
            except Exception:
                continue
            times.append((pair, begin, device))
            least = max(pair.begun - begin, pair.ended - begin - device)
            offset = least if offset is None else max(offset, least)
        for pair, begin, device in times:
            before = max(0, (offset or 0) + begin - pair.t0)
            flags = 0
            if pair.streams[0] != pair.streams[1]:
                flags |= Flag.STREAMS
            if pair.caught_up:
                flags |= Flag.CAUGHT_UP
            layer = pair.layer
            if layer is not None:
                layer = layer if layer.__class__ is str else getattr(layer, "value", str(layer))
            ident = AGENT.ids.get(layer) or AGENT.id(layer) if layer else 0
            AGENT.add(
                (pair.head | flags << 32, pair.t0, step.step, ident, device, before,
                 pair.t1 - pair.t0, 0)
            )  # fmt: skip
        return len(times), len(step.pairs) - len(times)

    # --- one call -------------------------------------------------------------------------

    def timed(self, body: Callable[..., Any], head: int, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``body`` between two events; a call that gets no pair runs all the same."""
        pair = self._start()
        if pair is None:
            return body(*args, **kwargs)
        try:
            result = body(*args, **kwargs)
        except BaseException as error:
            self._free.append(pair)
            frames.step_out(error)
            raise
        self._stop(pair, head, layer)
        return result

    def _start(self) -> EventPair | None:
        begun = clock()
        cuda = self._cuda
        if cuda is None:  # given up since the step began
            return None
        try:
            stream = self._stream(cuda)
            pair = self._take() if stream is not None else None
            if stream is None or pair is None:
                self._untimed += 1
                return None
            pair.begun = begun
            pair.start.record(stream)
            pair.streams = stream.cuda_stream, 0
            pair.t0 = clock()
            self._cost += pair.t0 - begun
            return pair
        except Exception as error:
            self._give_up(error)
            return None

    def _stop(self, pair: EventPair, head: int, layer: Any) -> None:
        t1 = clock()
        cuda = self._cuda
        if cuda is None:
            return
        try:
            stream = self._stream(cuda)
            if stream is None:
                self._untimed += 1
                self._free.append(pair)
                return
            pair.t1, pair.head, pair.layer = t1, head, layer
            pair.caught_up = pair.start.query()
            pair.ended = clock()
            pair.end.record(stream)
            pair.streams = pair.streams[0], stream.cuda_stream
            self._taken.append(pair)
            self._cost += clock() - t1
        except Exception as error:
            self._give_up(error)

    def _stream(self, cuda: Any) -> Any:
        """The current stream; None where no event of the pool can be recorded on it."""
        if cuda.is_current_stream_capturing():
            return None
        stream = cuda.current_stream()
        # An event belongs to the device on which it was recorded first. The current device is a
        # thread's own: in a connector's thread it may be another one.
        return stream if stream.device_index == self._index_of_device else None

    def _take(self) -> EventPair | None:
        try:  # two threads may be after the last one
            return self._free.pop()
        except IndexError:
            return None

    # --- wrappers -------------------------------------------------------------------------

    def around_hook(self, body: Callable[..., Any], hooked: Hooked) -> Callable[..., Any]:
        around = self._around_layer if hooked.hook.layered else self._around
        return around(body, hooked.hook.code, hooked.index & ~DETAIL_IS_OP)

    def around_op(self, body: Callable[..., Any], op: Op) -> Callable[..., Any]:
        return self._around_layer(body, op.code, DETAIL_IS_OP)

    def _around_layer(self, body: Callable[..., Any], code: int, detail: int) -> Callable[..., Any]:
        """``body`` (with a parameter ``layer_name``), timed in the steps that are timed."""
        names = {
            "_kvt_body": body,
            "_kvt_device": self,
            "_kvt_timed": self.timed,
            "_kvt_step_out": frames.step_out,
            "_kvt_head": _head(code, detail),
        }
        return generate(body, _TEMPLATE, names, ("layer_name",)) or self._around(body, code, detail)

    def _around(self, body: Callable[..., Any], code: int, detail: int) -> Callable[..., Any]:
        """``body`` with any signature: the record names no layer."""
        head = _head(code, detail)

        @functools.wraps(body)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return body(*args, **kwargs)
            return self.timed(body, head, None, *args, **kwargs)

        return wrapper


def _head(code: int, detail: int) -> int:
    return pack_head(Kind.DEVICE, Role.WORKER, code, detail)


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


DEVICE = Device()
