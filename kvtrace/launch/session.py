"""``kvtrace run``: the order in which a run happens."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtrace.launch import finish
from kvtrace.launch.child import ASK, ChildEnd, run_child
from kvtrace.launch.environment import child_environment
from kvtrace.launch.errors import LaunchError, reason
from kvtrace.launch.hanging import FrontWatch, named
from kvtrace.launch.interpreter import find_program
from kvtrace.launch.overlay import make_overlay
from kvtrace.launch.processes import ProcessTable
from kvtrace.launch.record import OVERLAY, RunRecord
from kvtrace.launch.rest import write_rest
from kvtrace.launch.rundir import RUN_FILE, RunDir, safe_name
from kvtrace.launch.sample import Sampler
from kvtrace.launch.say import at_a_terminal, say
from kvtrace.launch.stuck import StuckWatch
from kvtrace.regular import write_json
from kvtrace.trace import mask
from kvtrace.trace.config import AgentConfig
from kvtrace.trace.format import SPOOL_DIR, SPOOL_SUFFIX

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_GRACE_SECONDS = 2.0
"""How long the processes of a run may outlive the command before the report is made without them."""


@dataclass(frozen=True)
class RunOptions:
    """What the user asked for."""

    command: Sequence[str]
    agent: AgentConfig
    """How it is recorded; the run's directory and its name are put in when there are any."""
    output: Path | None = None
    name: str | None = None
    stuck_after: float = 30.0
    """Seconds without a record after which a process is looked at; 0: only where a signal asks."""
    sample: int = 0
    """Samples per second of each worker's and engine core's profile; 0: none is recorded."""


def run(options: RunOptions) -> int:
    """Run the command traced, make the report, return the exit code for ``kvtrace run``.

    That is the child's own (128 + N where signal N ended it); 2 where the child succeeded but
    nothing of it was traced.

    Raises:
        LaunchError: the command was not started. Nothing is left behind.
    """
    program = find_program(options.command, os.environ)
    name = safe_name(options.name or os.path.basename(options.command[0]))
    rundir = RunDir.create(name, options.output)
    session: _Session | None = None
    try:
        session = _Session(rundir, program, name, options)
        outcome = session.watch()
    except BaseException as error:
        if session is not None and session.started:
            raise
        rundir.discard()
        if isinstance(error, OSError):
            raise LaunchError(f"cannot prepare {rundir.shown}", reason(error)) from error
        raise
    return session.conclude(outcome)


class _Session:
    def __init__(self, rundir: RunDir, program: str, name: str, options: RunOptions) -> None:
        self.rundir = rundir
        self.started = False
        self._to_be_said = at_a_terminal()
        self._save_failed = False
        self._program = program
        self._command = options.command
        self._overlay = make_overlay(rundir.path / OVERLAY)
        agent = replace(options.agent, dir=rundir.path, run=name)
        mask.use(agent.salt, agent.keep_settings)
        config = agent.to_text()
        self._environ = child_environment(os.environ, options.command, config, self._overlay)
        self._table = ProcessTable(config, self._overlay)
        self._stuck = StuckWatch(rundir, options.stuck_after, self._pids)
        self._hanging = FrontWatch(
            rundir.path, options.stuck_after, lambda: self._table.processes, self._note
        )
        self._sampler = Sampler(rundir, options.sample, self._pids)
        self._record = RunRecord(name=name, command=options.command, started_wall_ns=time.time_ns())
        write_json(rundir.path / RUN_FILE, self._record.document())

    def _pids(self) -> set[int]:
        return {process.pid for process in self._table.living()}

    def watch(self) -> ChildEnd:
        """The child's life."""
        return run_child(
            self._program, self._command, self._environ, self._on_start, self._on_tick, self._on_signal
        )

    def conclude(self, outcome: ChildEnd) -> int:
        """Final run.json, then the report or the reason why there is none."""
        self._record.ended_wall_ns = time.time_ns()
        self._record.exit_code, self._record.signal = outcome.code, outcome.signal
        self._stuck.stop()
        self._wait_for_stragglers()
        self._look(self._end_samples)
        if not (self.rundir.path / SPOOL_DIR).is_dir():
            self.rundir.withdraw()  # written while the directory was being deleted
            deleted = f"{self.rundir.shown}/{SPOOL_DIR}" if self.rundir.path.is_dir() else self.rundir.shown
            say(f"{deleted} was deleted while the command ran: there is nothing left to report")
            return outcome.code
        spools = finish.traced_pids(self.rundir.path)
        traced = frozenset(pid for pid in spools.values() if pid is not None)
        self._record.processes = self._table.rows(traced)
        self._record.spools = finish.sizes(spools)
        if self._table.overflow:
            self._record.notes.append(f"{self._table.overflow} more processes are not listed")
        left = [p for p in self._table.living() if p.vllm or p.pid in traced]
        if left:
            pids = {p.pid for p in left}
            self._record.left = [row for row in self._record.processes if row["pid"] in pids and row["alive"]]
            line = (
                f"vLLM still runs, {named(left)}: the report holds what was recorded so far; to end it: "
                f"kill {' '.join(str(p.pid) for p in left)}"
            )
            self._record.notes.append(line)
            say(line)
        elif not self._table.living():
            shutil.rmtree(self._overlay, ignore_errors=True)
        nothing = None if spools else finish.why_nothing(outcome, self._table)
        if nothing:
            self._record.notes.append(nothing)
        self._save()
        if nothing:
            say(nothing)
            return outcome.code or finish.NOTHING_TRACED
        with contextlib.suppress(KeyboardInterrupt), finish.interruptible():
            write_rest(self.rundir.path, self._record.started_wall_ns)
        finish.make_report(self.rundir)
        return outcome.code

    def _on_start(self, pid: int) -> None:
        self.started = True
        say(f"recording to {self.rundir.shown}")
        self._look(lambda: self._table.start(pid, self._command))

    def _on_tick(self) -> None:
        self._look(self._say_traced)
        self._look(self._table.scan)
        self._look(self._stuck.tick)
        self._look(self._hanging.tick)
        self._look(self._sampler.tick)

    def _say_traced(self) -> None:
        """Once, to who sits at the terminal: that the tracing has begun, and where to look at it."""
        if self._to_be_said and any((self.rundir.path / SPOOL_DIR).glob(f"*{SPOOL_SUFFIX}")):
            self._to_be_said = False
            where = shlex.quote(self.rundir.shown)
            say(f"vLLM is traced; to look at it while it runs: kvtrace top {where}")

    def _on_signal(self, signum: int) -> None:
        if signum == ASK:
            self._stuck.ask()
        elif signum in _ENDING:
            self._stuck.end()

    def _note(self, line: str) -> None:
        self._record.notes.append(line)
        self._save()

    def _look(self, at: Callable[[], bool | None]) -> None:
        """Watching is a convenience: whatever fails in it, the child goes on."""
        try:
            if at():
                self._record.processes = self._table.rows()
                self._save()
        except Exception as error:
            note = f"processes were not all seen: {type(error).__name__}: {error}"
            if note not in self._record.notes:
                self._record.notes.append(note)

    def _end_samples(self) -> None:
        try:
            with finish.interruptible():
                found = self._sampler.finish()
                self._record.profiles = [str(path.relative_to(self.rundir.path)) for path in found]
        except KeyboardInterrupt:
            self._sampler.stop()

    def _wait_for_stragglers(self) -> None:
        """vLLM's engine and workers end a moment after their parent, and write until then."""
        deadline = time.monotonic() + _GRACE_SECONDS
        try:
            with finish.interruptible():
                self._look(self._table.scan)
                while self._table.living() and time.monotonic() < deadline:
                    time.sleep(0.05)
                    self._look(self._table.scan)
        except KeyboardInterrupt:
            pass

    def _save(self) -> None:
        try:
            write_json(self.rundir.path / RUN_FILE, self._record.document())
        except FileNotFoundError:
            pass  # the directory is being deleted: said at the end
        except OSError as error:
            if not self._save_failed:
                say(f"cannot update {self.rundir.shown}/{RUN_FILE}: {reason(error)}")
            self._save_failed = True
