"""After the child: make the report, or say why there is nothing to report."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from kvtrace.errors import KvtraceError
from kvtrace.launch.child import ChildEnd
from kvtrace.launch.errors import reason
from kvtrace.launch.processes import ProcessTable
from kvtrace.launch.rundir import RunDir, shown
from kvtrace.launch.say import say
from kvtrace.regular import open_regular, write_json
from kvtrace.trace.format import RECORD_SIZE, SPOOL_DIR, SPOOL_SUFFIX, unpack_header_block
from kvtrace.words import listed, plural

NOTHING_TRACED = 2
_MANY = 6


def traced_pids(run_dir: Path) -> dict[Path, int | None]:
    """The spools of a run and the pid in each one's header (None where it is unreadable)."""
    spools = sorted((run_dir / SPOOL_DIR).glob(f"*{SPOOL_SUFFIX}"))
    return {spool: pid_in(spool) for spool in spools}


def sizes(spools: Iterable[Path]) -> dict[str, int]:
    """File name -> bytes, of those that are still there."""
    found = {}
    for spool in spools:
        with suppress(OSError):
            found[spool.name] = spool.stat().st_size
    return found


def make_report(rundir: RunDir) -> None:
    """Write report.json and say what to do next. Never raises: the recording stays either way."""
    again = f"the recording is kept, try: kvtrace explain {shlex.quote(rundir.shown)}"
    try:
        with interruptible():
            from kvtrace.report.build import build_report  # the whole analysis: only now
            from kvtrace.report.load import REPORT_NAME

            report, path = build_report(rundir.path), rundir.path / REPORT_NAME
            write_json(path, report)
    except KeyboardInterrupt:
        say(f"the report was interrupted; {again}")
    except KvtraceError as error:
        say(f"cannot make the report: {error}; {again}")
    except OSError as error:
        say(f"cannot write the report to {rundir.shown}: {reason(error)}; {again}")
    except Exception as error:  # a fault of the analysis must not change what the command gave
        text = " ".join(str(error).split())
        say(f"cannot make the report: {type(error).__name__}: {text}; {again}")
    else:
        say(str(report.get("verdict") or "report written"))
        say(f"next: kvtrace explain {shlex.quote(shown(path))}")


def why_nothing(outcome: ChildEnd, table: ProcessTable) -> str:
    """One line: why no process of the run loaded the agent, as far as that is known."""
    ended = f"was ended by {outcome.signal}" if outcome.signal else f"ended with exit code {outcome.code}"
    vllm = [process for process in table.processes if process.vllm]
    suspects = vllm or [process for process in table.processes if process.python]
    obstacle = next((process for process in suspects if process.obstacle), None)
    if obstacle is not None:
        kind = "vLLM" if obstacle.vllm else "Python"
        return f"nothing was traced: {kind} ran as pid {obstacle.pid}, but {obstacle.obstacle}"
    if vllm:
        pids = listed((str(process.pid) for process in vllm), _MANY)
        seen = f"vLLM was seen (pid {pids}) but loaded no plugin"
        hint = (
            "a client such as vllm bench serve has none (trace the server), and the agent needs Python 3.10 "
            "or newer there; VLLM_LOGGING_LEVEL=DEBUG shows what vLLM loads"
        )
    else:
        seen = f"no vLLM process was seen among {plural(len(table.processes), 'process')}"
        hint = (
            "give the command that starts vLLM on this machine "
            "(in a container or on another host, run kvtrace there)"
        )
    if outcome.code:
        hint = f"the command {ended}, its own output says why"
    return f"nothing was traced: {seen}; {hint}"


def pid_in(spool: Path) -> int | None:
    try:
        with open_regular(spool) as file:
            _, _, length, _ = unpack_header_block(file.read(RECORD_SIZE))
            pid = json.loads(file.read(min(length, 1 << 20)))["pid"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return pid if isinstance(pid, int) else None


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt like Ctrl-C does: the exit code stays the child's."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
