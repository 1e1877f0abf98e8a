"""One piece of a connector's work in the background, watched like a hook call: a thread between two items of
its queue, a job of an executor, a step of an event loop."""

from __future__ import annotations

import threading
from types import FrameType

from kvtrace.agent.code import owners
from kvtrace.agent.errors.swallowed import ASYNCIO, EXECUTOR, THREAD, About, CallErrors
from kvtrace.agent.kv.caches import CACHES
from kvtrace.agent.origin import HERE, WorkOrigin
from kvtrace.agent.outside.call import OutsideCall
from kvtrace.agent.state import AGENT, clock, get_ident, processor_clock
from kvtrace.agent.watch.operations import CopyWatch
from kvtrace.agent.watch.policy import POLICY
from kvtrace.agent.watch.records import Touching
from kvtrace.agent.watch.states import STATES, StateWatch, TouchingStates
from kvtrace.trace import hooks
from kvtrace.trace.format import Role

_working: dict[int, tuple[threading.Thread, Work]] = {}
"""The threads in which work is watched, by their ident (another thread may have it later), each with the
innermost piece."""
_LONGEST = 100_000_000
"""ns after which what was done is written down, where nothing says that one piece of work is over."""
_LONGEST_IN_HALVES = 10 * _LONGEST
"""... the same, after that, where a part of a slot was touched, and the rest may still come."""
_PATIENCE = {THREAD: 2, EXECUTOR: 64, ASYNCIO: 2}
"""Steps after which a thread (a job, a task) that still works may well do so for later ones."""


class Work:
    """``start`` and ``stop`` in the thread that works.

    Args:
        kind: THREAD, EXECUTOR or ASYNCIO.
        file: of the code that works: whose it is, where nothing else says so.
        exact: whether what it hands over in turn is surely for the same step.
    """

    def __init__(self, kind: str, origin: WorkOrigin, file: str, exact: bool = False) -> None:
        self.kind = kind
        self.origin = origin
        self.exact = exact
        self.queue = 0
        """id of the queue that gives this thread its work."""
        self._until = AGENT.worker.latest + _PATIENCE[kind]
        self._file = file
        self._outer: Work | None = None
        self._watch = CopyWatch(CACHES, None, alone=True)
        self._states: StateWatch | None = None
        self.outside: OutsideCall | None = None
        """What it does to files and peers, while it is watched."""
        self._watching = False
        self._due = self._during = 0
        owner = owners.owner_of(self._index()) or owners.OwnerToCome(file)
        self.swallowed = CallErrors(kind, Role.WORKER, owner, self._goes_on if kind == THREAD else None)
        self._cost = 0
        """ns of processor time that it took to begin."""
        self._thread = 0

    def start(self) -> bool:
        """False in a thread that is inside a watched hook: that sees all."""
        began = processor_clock()
        outer = HERE.work
        if outer is not None:
            if not isinstance(outer, Work):
                return False
            outer._pause()
            self._outer = outer
        HERE.work, HERE.origin = self, self.origin
        _working[get_ident()] = threading.current_thread(), self
        self._thread = AGENT.thread()
        self._watch.before = self._before
        self._resume()
        self._cost = processor_clock() - began
        return True

    def stop(self, error: BaseException | None = None, over: bool = True) -> None:
        """``error``: in which the work ended; ``over``: all of it was done here. Never raises."""
        try:
            self._pause()
            self._write(error, over=over)
        except Exception:
            AGENT.failed(self.kind)
        finally:
            outer = HERE.work = self._outer
            if outer is None:
                _working.pop(get_ident(), None)
            else:
                _working[get_ident()] = threading.current_thread(), outer
            HERE.origin = outer.origin if outer is not None else None
            if outer is not None:
                outer._resume()

    def asks(self, queue: int) -> None:
        """This thread asks a queue for its next item."""
        if self.kind == THREAD and self.queue in (0, queue):
            self._write(None)
            self._take(WorkOrigin(0, self.origin.connector))

    def got(self, queue: int, origin: WorkOrigin | None, caller: FrameType | None) -> None:
        """It got one, that a hook put there (of ``origin``), or somebody else (None)."""
        if origin is not None:
            self._write(None)
            self._take(origin)
            self.queue = queue
        elif self.kind == THREAD and not self.queue:
            self.queue = queue
        self._resume()
        self.swallowed.raises.callers_too(caller)

    def _take(self, origin: WorkOrigin) -> None:
        self.origin = HERE.origin = origin
        self.exact = False
        self._until = AGENT.worker.latest + _PATIENCE[EXECUTOR]

    # --- its parts ------------------------------------------------------------------------

    def _resume(self) -> None:
        """Also where torch, or the connector, came after this thread began. Past the budget only what the
        work was for is kept, and the exception in which it ends."""
        if not POLICY.background(self.origin.step):
            self.swallowed.stop()
            return
        if not self.swallowed.running:
            self.swallowed.start()
        if not self._watching:
            self._watching = self._watch.start()
            if self._watching and self._states is not None:
                self._states.start()
            if self._watching and self.outside is None:
                self.outside = OutsideCall(self._index())
        if self._watching and self._states is None and STATES.layers:
            self._states = StateWatch()
            self._states.start()
        if self.outside is not None:
            # Whose work it is may be known only by now.
            self.outside.connector = self.origin.connector or self.outside.connector or self._index()
            # A thread may save for one item of its queue, and load for the next one.
            hook = hooks.BY_NAME.get(self.origin.hook)
            self._watch.loads = hook is None or hook in hooks.LOADING
            self._watch.saves = hook is None or not self._watch.loads

    @property
    def sees_states(self) -> bool:
        return self._watching and self._states is not None

    def _pause(self) -> None:
        self.swallowed.stop()
        if self._watching and self.kind != THREAD:
            self._watching = False
            if self._states is not None:
                self._states.stop()
            self._watch.stop()

    def _index(self) -> int:
        return self.origin.connector or owners.index_of(self._file)

    def _before(self) -> None:
        """A KV tensor is touched. What is touched first decides for which step all of a piece is. From one
        step to the next a block may get another holder: what is read then is told on its own."""
        now, latest = clock(), AGENT.worker.latest
        old = self.origin.step and latest > self._until
        due = now > self._due
        ends = due or old or latest != self._during
        surely = (old and due) or now > self._due + _LONGEST_IN_HALVES
        # The halves of a slot stay together: K now, and V once this thread has its turn again.
        if self._watch.saw and ends and (surely or self._watch.whole):
            self._write(None, still=not old, over=False)
        if not self._watch.saw:
            self._due, self._during = now + _LONGEST, latest
            self.origin = HERE.origin = self.origin.unless_after(self._until)

    def _write(self, error: BaseException | None, still: bool = False, over: bool = True) -> None:
        """``still``: it goes on with the same; whether what it caught was the end of it shows later.
        ``over``: all of it is done."""
        t, began, cost = clock(), processor_clock(), self._watch.cost + self._cost
        self._cost = self._watch.cost = 0
        step, index = self.origin.step, self._index()
        outside = self.outside
        if outside is not None:
            if self._watch.saw:
                seen = self._watch.take()
                Touching(seen, 0, index, step, t, self._thread, outside.call, over).write()
            if self._states is not None:
                cost += self._states.cost
                if self._states.saw:
                    states = self._states.take()
                    TouchingStates(states, 0, index, step, t, self._thread, outside.call).write()
                self._states.cost = 0
            outside.write(step, self._thread)
        if not still:
            cost += self.swallowed.raises.cost()
            self.swallowed.report(error, About(self.origin.layer, step, self.origin.hook))
        if not AGENT.worker.step:
            AGENT.flush()  # no step is under way at whose end it would be written
        POLICY.spent(cost + processor_clock() - began)

    def _goes_on(self) -> None:
        """All that was raised so far in a loop that nothing need end was handled."""
        POLICY.spent(self.swallowed.raises.cost())
        self.swallowed.report(None, About(self.origin.layer, self.origin.step, self.origin.hook))
        if not POLICY.background(self.origin.step):
            self.swallowed.stop()

    def write_so_far(self) -> None:
        """From another thread. Never raises."""
        try:
            self._write(None, still=True, over=False)
        except Exception:
            AGENT.failed(self.kind)


def followed(states: bool = False) -> set[int]:
    """Idents of the threads in which work is watched now; of ``states``: in which these are watched too."""
    for ident, (thread, _) in list(_working.items()):
        if not thread.is_alive():
            _working.pop(ident, None)
    return {ident for ident, (_, work) in list(_working.items()) if work.sees_states or not states}


def write_all() -> None:
    """What all pieces of work have done so far, as nobody knows whether they end before the process does."""
    for _, work in list(_working.values()):
        work.write_so_far()


def forget() -> None:
    """In a forked child: the threads that work are the parent's."""
    _working.clear()


def begin(kind: str, origin: WorkOrigin, file: str, exact: bool = False) -> Work | None:
    """A piece of work that has begun in this thread; None where a hook's watch sees it. Never raises."""
    try:
        if AGENT.recorder is None:
            return None
        work = Work(kind, origin, file, exact)
        return work if work.start() else None
    except Exception:
        AGENT.failed(kind)
        return None
