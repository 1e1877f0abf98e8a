"""The agent's one mutable object per process, and its rule: nothing of ours reaches vLLM.

Every wrapper keeps to this order: clock, call, clock, record. Recording happens in a
``try`` whose handler is :meth:`Agent.failed`; after a few failures the agent turns itself
off in this process, and the report says so.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvtrace import __version__
from kvtrace.agent.boot import boot
from kvtrace.agent.code import foreign, owners, traces
from kvtrace.trace import format as fmt
from kvtrace.trace import mask
from kvtrace.trace.config import AgentConfig
from kvtrace.trace.facts import AgentErrorFact, AnyFact, Header, HookExceptionFact
from kvtrace.trace.format import Role, Stop
from kvtrace.trace.writer import COMPILED, Recorder

_MAX_FAILURES = 5
_MAX_EXCEPTION_FACTS = 50
UNARMED = AgentConfig(Path(os.devnull), b"", device_timing="off", watch="sampled")
"""Of an agent that nobody asked to record."""

clock = time.perf_counter_ns
processor_clock = time.thread_time_ns
"""Of this thread: what the watch costs, also where the machine is busy with something else."""
get_ident = threading.get_ident


def _nobody() -> None:
    """No Scheduler."""


class SchedulerState:
    """The scheduler-side step that is being put together. (Of both sides: the recorder in C reads slots.)"""

    __slots__ = ("allocated", "current", "loading", "step")

    def __init__(self) -> None:
        self.step = 0
        self.current: Callable[[], Any] = _nobody
        """Says the Scheduler whose ``schedule`` runs, or ran last, as long as vLLM has it."""
        self.allocated: list[str] = []
        """Requests for which the connector was told of an allocation since it began."""
        self.loading: set[str] = set()
        """Requests for which it loads, and that were not scheduled yet."""


class WorkerState:
    """The worker-side step that is being executed. Read on every hook call."""

    __slots__ = (
        "bound", "declared", "direct_depth", "finishes", "gathering", "hooked_layer", "latest",
        "load_entries", "load_slots", "mode", "of_children", "padded", "prompt", "recorded_done", "step",
        "store_entries", "store_slots", "watch_after", "watch_load", "watch_store", "watched",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step = 0
        self.latest = 0
        """The step that runs, or ran last."""
        self.mode = fmt.UNKNOWN
        self.padded = 0
        """Tokens of the batch that the model ran, padding included; 0 unknown."""
        self.store_slots = 0
        self.store_entries = 0
        self.load_slots = 0
        self.load_entries = 0
        self.bound = False
        self.hooked_layer: str | None = None
        """Layer whose ``wait_for_layer_load`` came last: its op body runs next."""
        self.gathering = False
        """Whether the spool is past its size limit: of this step, if it is quiet, sums are kept."""
        self.direct_depth = 0
        """Above 0 while an attention op was called as a Python function, not dispatched."""
        self.of_children: dict[int, Any] = {}
        """Index of a connector inside another one -> what its part of the metadata names (``Totals``)."""
        self.recorded_done: tuple[object, set[tuple[int, int, str]]] = (None, set())
        """(role, step) and the transfers whose end was recorded in it."""
        self.declared: Any = None
        """What the scheduler read in this step's metadata (``metadata.Totals``, a tuple), or None."""
        self.finishes = False
        """Whether requests end with the step."""
        self.prompt = False
        """Whether the step computes prompt tokens."""
        self.watch_store: bool | None = None
        self.watch_load: bool | None = None
        self.watch_after: bool | None = None
        """True while the calls of the hooks for saving, or loading, run watched; and in the step after such a
        one, those that are not called layer by layer. Else None: the recorder in C asks for that alone."""
        self.watched = 0
        """Flag.STORE and LOAD where they were in this step."""


class _Threads(dict[int, int]):
    """Thread ident -> small index, given at the first question."""

    def __init__(self) -> None:
        self._heads: list[dict[int, int]] = []

    def __missing__(self, ident: int) -> int:
        index = self[ident] = len(self)
        return index

    def heads(self, head: int) -> dict[int, int]:
        """Thread ident -> a record's first word that ends in ``head``: in hooks the sum itself counts."""
        made = _Heads(head, self)
        self._heads.append(made)
        return made

    def clear(self) -> None:
        super().clear()
        for heads in self._heads:
            heads.clear()


class _Heads(dict[int, int]):
    def __init__(self, head: int, threads: _Threads) -> None:
        self._head, self._threads = head, threads

    def __missing__(self, ident: int) -> int:
        head = self[ident] = self._head | self._threads[ident] << 48
        return head


class Agent:
    """Process-wide state of the agent."""

    def __init__(self) -> None:
        self.config = UNARMED
        self.recorder: Recorder | None = None
        self.add: Callable[[Sequence[int]], None] = _drop
        self.pid = os.getpid()
        self.roles: set[Role] = set()
        self.scheduler = SchedulerState()
        self.worker = WorkerState()
        self.ids: dict[str, int] = {}
        """Layer names and other long-lived strings -> NAME ids of the open spool."""
        self.threads = _Threads()
        self.standing_facts: dict[tuple[int, object], tuple[AnyFact, int]] = {}
        """Facts that hold until further notice; repeated into each spool that is opened."""
        self.openings: list[Callable[[], object]] = []
        """Called when a spool is opened: what was said in an earlier one must be said in it too."""
        self.endings: list[Callable[[], None]] = []
        """Called where no step may come any more: what others hold back is written then."""
        self._failures = 0
        self._exceptions = 0
        self._lock = threading.RLock()

    # --- opening and closing -------------------------------------------------------------

    @property
    def armed(self) -> bool:
        return self.config is not UNARMED

    def arm(self, config: AgentConfig) -> None:
        """Open a spool when there is something to write."""
        self.config = config
        mask.use(config.salt, config.keep_settings)
        self.add = self._first_add

    def open(self, config: AgentConfig) -> None:
        """Start a spool in ``config.dir``. Never raises; without a spool nothing is recorded."""
        self.config = config
        mask.use(config.salt, config.keep_settings)
        self.pid = os.getpid()
        try:
            folder = config.dir / fmt.SPOOL_DIR
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = f"process-{self.pid}-{secrets.token_hex(4)}{fmt.SPOOL_SUFFIX}"
            header = self._header(config.run)
            self.recorder = Recorder(folder / name, header, config.limit_bytes, config.compiled)
        except OSError as error:
            self.recorder = None
            self.add = _drop
            complain(f"cannot write to {config.dir} ({error.strerror}): this process is not traced")
            return
        self.roles.clear()
        # Emptied, never replaced: generated wrappers hold these two dictionaries.
        self.ids.clear()
        self.threads.clear()
        self._failures = 0
        for forget in self.openings:
            forget()
        self.threads[get_ident()] = 0
        self.add = self.recorder.add
        self.recorder.use()
        for document, role in list(self.standing_facts.values()):
            self.recorder.fact(document, role)
        self.recorder.flush()

    def write_all(self) -> None:
        """Write what was recorded, and what is held back: no step may come any more. Never raises. Not called
        at the exit of the process: vLLM kills its workers."""
        if self.recorder is None or self.pid != os.getpid():
            return
        for ending in self.endings:
            ending()
        self.flush()

    def close(self) -> None:
        self.write_all()
        if self.recorder is not None:
            self.recorder.stop(Stop.CLEAN)
        self.recorder = None
        self.add = _drop

    @property
    def compiled(self) -> Any:
        """The recorder in C, for wrappers that are made now; None where it is not there, or not wanted."""
        return COMPILED if self.config.compiled else None

    def after_fork(self) -> None:
        """In a forked child: the parent's file is the parent's. A file of our own is opened
        when there is something to write (most forked children are not vLLM's)."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        recorder.abandon()
        self.roles.clear()
        self.ids.clear()
        self.threads.clear()
        self._lock = threading.RLock()
        self.add = self._first_add

    def _first_add(self, words: Sequence[int]) -> None:
        with self._lock:
            if self.recorder is None:
                self.open(self.config)
        if words:
            self.add(words)

    def set_role(self, role: Role, label: str) -> None:
        """Give the spool a telling name once this process knows what it is.

        An in-process engine is front, scheduler and worker at once: ``engine-...``.
        """
        recorder = self.live()
        if recorder is None or role in self.roles:
            return
        self.roles.add(role)
        if {Role.SCHEDULER, Role.WORKER} <= self.roles:
            label = "engine"
        elif role == Role.FRONT and len(self.roles) > 1:
            return
        tail = "-".join(recorder.path.name.split("-")[-2:])  # pid and random part
        target = recorder.path.with_name(f"{label}-{tail}")
        with contextlib.suppress(OSError):
            os.rename(recorder.path, target)
            recorder.path = target

    def _header(self, run: str) -> Header:
        return Header(
            kvtrace=__version__,
            run=run,
            pid=self.pid,
            ppid=os.getppid(),
            role=_guess_role(),
            process=multiprocessing.current_process().name,
            python=".".join(str(part) for part in sys.version_info[:3]),
            argv=tuple(mask.mask_argv(list(sys.argv))[:64]),
            host=socket.gethostname(),
            wall_ns=time.time_ns(),
            perf_ns=clock(),
            vllm=version_of("vllm"),
            boot=boot(),
        )

    # --- recording -----------------------------------------------------------------------

    def live(self) -> Recorder | None:
        """The open recorder; opens one where none is yet, as in a forked child."""
        if self.recorder is None and self.add is not _drop:
            self._first_add(())
        return self.recorder

    def id(self, text: str) -> int:
        """NAME id of a long-lived string (layers, statuses, types); cached."""
        ident = self.ids.get(text)
        if ident is None:
            recorder = self.live()
            if recorder is None:
                return 0
            ident = self.ids[text] = recorder.name(text)
        return ident

    def request_id(self, req_id: str) -> int:
        """NAME id of a request; forgotten at its finish."""
        recorder = self.live()
        return 0 if recorder is None else recorder.name(req_id)

    @contextlib.contextmanager
    def passing_request(self, req_id: str) -> Iterator[int]:
        """NAME id of a request that nobody here will see finish (a worker's, or one that the
        scheduler has already forgotten): forgotten at once, unless it is known anyway."""
        recorder = self.live()
        if recorder is None:
            yield 0
            return
        known = recorder.knows(req_id)
        yield recorder.name(req_id)
        if not known:
            recorder.forget_name(req_id)

    def thread(self) -> int:
        """Small index of the calling thread; 0 is the one that opened the spool."""
        return self.threads[get_ident()]

    def fact(self, document: AnyFact, role: Role, standing: object = None, flush: bool = True) -> None:
        """Write a fact; ``standing`` is its identity where it must outlive this spool. Such a fact waits for
        a spool where none is open yet."""
        if standing is not None:
            self.standing_facts[(int(document.CODE), standing)] = (document, int(role))
        recorder = self.recorder if standing is not None else self.live()
        if recorder is not None:
            recorder.fact(document, int(role))
            if flush:
                recorder.flush()

    @property
    def scheduler_writes(self) -> bool:
        """Whether a scheduler shares this process: what is recorded is written with its next step."""
        return Role.SCHEDULER in self.roles

    def flush(self) -> None:
        recorder = self.recorder
        if recorder is not None:
            recorder.flush()

    # --- trouble -------------------------------------------------------------------------

    def said(self, error: BaseException, most: int = 500, trace: TracebackType | None = None) -> str:
        """The message of an exception, as far as it is recorded. Never raises. ``trace``: how far it has
        come, where it is still on its way."""
        return foreign.of_exception(error, self.config.keep_messages, most, trace)

    def exception(
        self, hook: str, layer: str | None, step: int, index: int, error: BaseException, called: Any = None
    ) -> None:
        """Note an exception that the connector of that index raised out of a hook (it is re-raised).
        ``called``: as of :func:`where_raised`."""
        self._exceptions += 1
        if self._exceptions > _MAX_EXCEPTION_FACTS:
            return
        fact = HookExceptionFact(
            hook=hook,
            layer=layer,
            step=step,
            connector=index,
            type=traces.type_name(error),
            message=self.said(error),
            where=where_raised(error, owners.owner_of(index), called),
            count_so_far=self._exceptions,
        )
        self.fact(fact, Role.WORKER)

    def failed(self, where: str, error: BaseException | None = None) -> None:
        """The agent itself failed. Says so in the trace; after a few times it goes silent."""
        with contextlib.suppress(Exception):
            error = error or sys.exc_info()[1]
            self._failures += 1
            if self._failures > _MAX_FAILURES:
                return
            text = f"{traces.type_name(error)}: {self.said(error)} at {where_raised(error)}" if error else "?"
            self.fact(AgentErrorFact(where, text[:500]), Role.FRONT)
            if self._failures == _MAX_FAILURES:
                self.fact(AgentErrorFact("agent", "turned off"), Role.FRONT)
                if self.recorder is not None:
                    self.recorder.stop(Stop.AGENT_ERROR)
                self.add = _drop


def _drop(words: Sequence[int]) -> None:
    """Where records go while nothing is recorded."""


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def where_raised(
    error: BaseException | None, owner: owners.Owner | owners.OwnerToCome | None = None, called: Any = None
) -> str:
    """``file.py:12 in function`` of the innermost frame that is the ``owner``'s, else of the innermost in the
    package that was entered first, but for vLLM's, torch's, Python's own and ours: not that of a library
    which this one calls. Where there are none but ours, ``called`` was not even entered, as it does not take
    these arguments: where it is defined."""
    code = getattr(called, "__code__", None)
    trace = error.__traceback__ if error is not None else None
    frames = [(one.tb_frame.f_code, one.tb_lineno) for one in traces.entries(trace)]
    if code is not None and all(is_ours(one.co_filename) for one, _ in frames):
        return traces.place(code, code.co_firstlineno)
    owned = [one for one in frames if owner is not None and owner.owns(one[0].co_filename)]
    theirs = [one for one in frames if not _is_the_engines(one[0].co_filename)]
    entered = [owners.package_of(one.co_filename) for one, _ in theirs]
    first = next((package for package in entered if package != "vllm"), "vllm")
    alike = [one for one, package in zip(theirs, entered, strict=True) if package == first]
    found = owned or alike or frames[:1]
    return traces.place(*found[-1]) if found else ""


def _is_the_engines(filename: str) -> bool:
    """vLLM's but for its connectors, torch's, Python's own, or ours."""
    parts = filename.replace("\\", "/").split("/")
    of_vllm = "vllm" in parts and "kv_connector" not in parts
    ours = filename.startswith((_OURS, "<"))
    return of_vllm or "torch" in parts or ours or owners.is_stdlib_file(filename)


def _guess_role() -> str:
    name = multiprocessing.current_process().name.lower()
    if "worker" in name:
        return "worker"
    return "scheduler" if "engine" in name or "core" in name else "front"


def version_of(module: str) -> str | None:
    """Of an imported package; None where it does not say."""
    version = getattr(sys.modules.get(module), "__version__", None)
    return str(version) if version is not None else None


def complain(message: str) -> None:
    """One line on stderr, in one write: other processes write there too."""
    with contextlib.suppress(Exception):
        shown = "".join(char if char.isprintable() else " " for char in message)
        sys.stderr.write(f"kvtrace: {shown}\n")
        sys.stderr.flush()


AGENT = Agent()
