"""One watched call of a hook: what it did, as EFFECT and SLOTS records.

In a watched step (``policy.py``) the calls of ``save_kv_layer``, ``wait_for_save``, ``start_load_kv`` and
``wait_for_layer_load`` run watched: tensor operations on the KV caches (``operations.py``), files
(``outside/call.py``), ways by which KV can leave unseen (``escapes.py``), exceptions that the
connector handles itself (``errors/swallowed.py``). All other calls pay one attribute check.

How a call's record is to be read:

- ``slots`` > 0: so many slots of this layer were copied by tensor operations in the calling
  thread (a lower bound where the connector also copies by other means).
- ``slots`` 0: the whole call was watched, no operation copied anything, and none of the known
  ways around was open: no memory address of a KV tensor was ever taken, no custom operation ran
  on one, no third-party native code ran, nothing was handed to another thread, and no other
  thread is inside the connector's code. Nor can the call have found that all is stored already:
  it asked no file and no socket, or the connector was seen to read in another call.
- ``slots`` -1: it can't be said. Native code that another native library calls can still hide
  from a 0.

A record with layer 0 speaks of a call as a whole in which no layer was touched. ``bytes``,
``files`` and ``target`` are the call's and stand in its first record only; further layers of
the same call have -1 there. Hooks whose body does nothing have no record. Of the
worker's hooks that are not for copying (``get_finished``), a call has one where it copied all the
same, or handed work to where that can't be seen. A connector inside
another one has records of its own, and its copies count in its parent's too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from kvtrace.agent import limits
from kvtrace.agent.code import owners
from kvtrace.agent.errors.swallowed import About, CallErrors
from kvtrace.agent.facts.connector_facts import does_nothing
from kvtrace.agent.kv.caches import CACHES
from kvtrace.agent.origin import HERE, WorkOrigin
from kvtrace.agent.outside.call import OutsideCall
from kvtrace.agent.state import AGENT, clock, processor_clock
from kvtrace.agent.steps.prefixes import digest_of
from kvtrace.agent.watch.escapes import Escapes, works_elsewhere
from kvtrace.agent.watch.operations import READ, WRITTEN, CopyWatch
from kvtrace.agent.watch.policy import POLICY
from kvtrace.agent.watch.records import CallEffect, Touching
from kvtrace.agent.watch.states import STATES, StateWatch, TouchingStates
from kvtrace.agent.watch.work import followed
from kvtrace.agent.wrap import frames
from kvtrace.agent.wrap.hooked import Hooked
from kvtrace.trace import hooks
from kvtrace.trace.facts import Limit
from kvtrace.trace.format import UNKNOWN, Flag, Role

_seen_to_read: set[int] = set()
"""Connectors of which a watched call read a KV tensor."""
FIRST_CALLS = 16
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
"""What a connector leaves to vLLM's base class copies nothing."""


class _FirstCalls:
    """``remaining`` is None once the first calls are over."""

    __slots__ = ("remaining",)

    def __init__(self, calls: int | None) -> None:
        self.remaining = calls

    def passed(self) -> None:
        if self.remaining is not None:
            self.remaining = self.remaining - 1 or None


class WatchPoint(NamedTuple):
    """When and how the calls of a hook are watched.

    The hook's wrapper calls ``watched(connector, method, layer, *args, **kwargs)`` where one of the
    ``switches`` (pairs of an object and the name of its attribute) is not None, and the method itself, which
    is bound, elsewhere.
    """

    switches: tuple[tuple[Any, str], ...]
    watched: Callable[..., Any]

    def off(self) -> bool:
        return all(getattr(holder, attribute) is None for holder, attribute in self.switches)


def watch_point(hooked: Hooked) -> WatchPoint:
    """The watch point of a hook. Of the hooks that copy no KV the first 16 calls are watched, for the
    exceptions that they handle themselves alone (and the registration of the caches for whether it takes
    their addresses); those of the worker also in steps whose saves are watched, for what they copy all the
    same.
    """
    hook, on_worker = hooked.hook, hooked.role == Role.WORKER
    switches: list[tuple[Any, str]] = []
    first = None
    if hook.watch is hooks.Watch.COPY and on_worker:
        names = ["watch_store" if hook.direction == Flag.STORE else "watch_load"]
        if not hook.layered:
            names.append("watch_after")
        switches = [(AGENT.worker, name) for name in names]
    elif hook.watch is hooks.Watch.CAUGHT and hook.role == hooked.role:
        bounded = POLICY.bounded and hook is not hooks.REGISTER_KV_CACHES
        first = _FirstCalls(None if bounded else FIRST_CALLS)
        switches = [(first, "remaining")]
        if on_worker:
            switches += [(AGENT.worker, "watch_store"), (AGENT.worker, "watch_after")]
    return WatchPoint(tuple(switches), _watched(hooked, first))


def _watched(hooked: Hooked, first: _FirstCalls | None) -> Callable[..., Any]:
    @frames.internal
    def watched(connector: Any, method: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = None
        try:
            if first is not None:
                first.passed()
            if hooked.hook is hooks.REGISTER_KV_CACHES:
                _register(kwargs["kv_caches"] if "kv_caches" in kwargs else args[0])
            idle = does_nothing(method) or getattr(method, "__module__", "") == _BASE
            if AGENT.recorder is not None and not idle and not _must_not_watch():
                call = _WatchedCall(hooked, connector)
                call.start(None if layer is None else str(layer), args, kwargs)
        except Exception:
            AGENT.failed(f"watching {hooked.hook.name}")
        error: BaseException | None = None
        try:
            return method(*args, **kwargs)
        except BaseException as caught:
            error = caught
            frames.step_out(caught)
            raise
        finally:
            if call is not None:
                call.stop(error)
            error = None  # it holds this frame

    return watched


def _must_not_watch() -> bool:
    """While a CUDA graph is captured or torch.compile traces, the call runs as it is."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    cuda = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


class _WatchedCall:
    """One watched call. Each part is on its own: one that fails takes no other with it."""

    def __init__(self, hooked: Hooked, connector: Any) -> None:
        self._began, self._began_busy = clock(), processor_clock()
        self._own = self._cost = 0
        """ns of host time, and of processor time, that it took to begin."""
        self._hook = hooked.hook
        self._index = hooked.index
        self._role = hooked.role
        self._layer: str | None = None
        self._running: list[Any] = []
        self.outside = OutsideCall(hooked.index)
        self._effects = hooked.hook.watch is hooks.Watch.COPY
        self._elsewhere = self._role == Role.WORKER and not self._effects and hooked.hook.in_step
        self._watch: CopyWatch | None = None
        self._states: StateWatch | None = None
        self._before: tuple[Any, WorkOrigin | None] = None, None
        self._escapes = Escapes(to_the_end=bool(STATES.layers))
        self._owner = owners.owner_of(hooked.index) or owners.register(connector, hooked.index)
        self.swallowed = CallErrors(hooked.hook.name, hooked.role, self._owner)

    def start(self, layer: str | None, args: Any, kwargs: Any) -> None:
        self._layer = layer
        self._before = HERE.work, HERE.origin
        HERE.work, HERE.origin = self, WorkOrigin(self._step(), self._index, self._hook.name, layer)
        if self._hook is hooks.SAVE_LAYER and layer is not None:
            for value in (kwargs.get("kv_layer"), *args[1:2]):
                if value is not None:
                    CACHES.add(layer, value)
        if self._role == Role.WORKER:
            self._watch = watch = CopyWatch(CACHES, layer)
            watch.before = self._escapes.enough
            watch.loads = self._hook in hooks.LOADING
            watch.saves = not watch.loads
            self._begin(watch)
            states = StateWatch() if STATES.layers else None
            if states is not None and self._begin(states):
                self._states = states
        # The last to begin: what calls back for every call in this thread sees little code of ours.
        if self._effects or self._elsewhere:
            self._begin(self._escapes)
        self._begin(self.swallowed)
        self._own, self._cost = clock() - self._began, processor_clock() - self._began_busy

    def _begin(self, part: Any) -> bool:
        try:
            if part.start() is False:
                return False
            self._running.append(part)
            return True
        except Exception:
            AGENT.failed(f"watching {self._hook.name}")
            return False

    def stop(self, error: BaseException | None) -> None:
        """Never raises."""
        began, began_busy = clock(), processor_clock()
        while self._running:
            try:
                self._running.pop().stop()
            except Exception:
                AGENT.failed(f"watching {self._hook.name}")
        HERE.work, HERE.origin = self._before
        if self._escapes.native:
            limits.say(Limit.NATIVE, self._escapes.native, self._index, self._step())
        try:
            step = self._step()
            t = clock()
            if self._watch is not None and (self._effects or self._elsewhere):
                self._write(self._watch, step, t)
                if self._states is not None:
                    self._write_states(self._watch, self._states, step, t)
            self.outside.write(step, AGENT.thread(), self._role)
            self.swallowed.report(error, About(self._layer, step))
            copying = sum(one.cost for one in (self._watch, self._states) if one)
            now = clock()
            HERE.own += self._own + copying + now - began  # what is added up per operation never waits
            cost = self._cost + copying + processor_clock() - began_busy
            POLICY.spent(now - self._began if POLICY.bounded else cost)
        except Exception:
            AGENT.failed(f"watching {self._hook.name}")

    def _step(self) -> int:
        return AGENT.worker.step if self._role == Role.WORKER else AGENT.scheduler.step

    def _write(self, watch: CopyWatch, step: int, t: int) -> None:
        if watch.copied_some(READ):
            _seen_to_read.add(self._index)
            if self._elsewhere:
                POLICY.copied_elsewhere(self._index)
        touching = Touching(watch, self._hook.code, self._index, step, t, AGENT.thread(), self.outside.call)
        touching.effect = self._effect(watch) if self._effects else self._effect_elsewhere()
        touching.write()

    def _effect(self, watch: CopyWatch) -> CallEffect:
        worker = AGENT.worker
        loads = self._hook.direction == Flag.LOAD
        way, other = (WRITTEN, READ) if loads else (READ, WRITTEN)
        nothing = None
        # In the step after a watched one its layers' hooks are not watched, so that 0 says nothing.
        if (worker.watch_load if loads else worker.watch_store) is not None:
            nothing = UNKNOWN if watch.copied_some(way) else self._nothing(watch)
        size, count, path = self.outside.files()
        target = digest_of(path, AGENT.config.salt) if path else 0
        return CallEffect((way, other), nothing, self._layer, size, count, target)

    def _effect_elsewhere(self) -> CallEffect:
        """Of a hook that is not for copying: what it read, and work that it handed out of sight."""
        out_of_sight = self._escapes.handed_over or self._escapes.native
        return CallEffect((READ,), UNKNOWN if out_of_sight else None)

    def _write_states(self, watch: CopyWatch, states: StateWatch, step: int, t: int) -> None:
        """Which states it read and wrote, and whether it can have done more."""
        touching = TouchingStates(
            states, self._hook.code, self._index, step, t, AGENT.thread(), self.outside.call
        )
        alone = not self._escapes.any and not works_elsewhere(self._owner, followed(states=True))
        touching.sure = alone and STATES.complete and not watch.unsure
        touching.write()

    def _nothing(self, watch: CopyWatch) -> int:
        """0 where it is sure that nothing was copied by tensor operations, else -1."""
        if watch.unsure or self._escapes.any:
            return UNKNOWN
        if not watch.caches.layers or (self._layer and self._layer not in watch.caches.layers):
            return UNKNOWN  # no KV tensor is known to look at
        if self._escapes.asked and self._index not in _seen_to_read:
            return UNKNOWN  # it may have found that all is there
        elsewhere = works_elsewhere(self._owner, followed())
        if elsewhere:
            limits.say(Limit.THREAD, elsewhere, self._index, self._step(), elsewhere)
        return UNKNOWN if elsewhere else 0


def _register(kv_caches: Any) -> None:
    """The KV tensors of this worker, before the connector gets them."""
    if isinstance(kv_caches, dict):
        CACHES.address_taken = False
        CACHES.register(kv_caches)
        STATES.address_taken = False
        STATES.register(kv_caches)
