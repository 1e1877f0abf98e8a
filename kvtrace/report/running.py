"""Whether a run still goes on: a process that records is still there, on this host. And who outlived a run:
processes of vLLM that nobody ends any more."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence

from kvtrace.ledger.run import Run
from kvtrace.trace.facts import Header
from kvtrace.trace.run_file import ListedProcess, RunFile

_OPEN = ("open", "cut")
"""Ends of a spool whose process has not closed it."""
_SLACK_NS = 2_000_000_000
_MOST = 8


def still_running(run: Run) -> bool:
    """False as well where that cannot be told: another host, another container, no ``/proc``."""
    if run.run.ended_wall_ns is not None:
        return False
    return any_alive(one.header for one in run.processes if one.agent and one.end in _OPEN)


def any_alive(headers: Iterable[Header]) -> bool:
    """Whether a process that wrote one of these spools is there, on this host."""
    host = socket.gethostname()
    for one in headers:
        began = _began_wall_ns(one.pid) if one.host == host else None
        # a process that began later than the spool has got its number
        if began is not None and began <= one.wall_ns + _SLACK_NS:
            return True
    return False


def left_behind(file: RunFile) -> list[str]:
    """A line where ``run.json`` names some; those of a run whose ``kvtrace run`` was killed as it last saw
    them, as nobody has looked since."""
    if file.left:
        return [f"{_named(file.left)} outlived the command: {_end(file.left, file.host)}"]
    alive = tuple(one for one in file.processes if one.vllm and one.alive)
    if alive and _launcher_is_gone(file):
        return [f"kvtrace run was killed, and {_named(alive)} lived then: {_end(alive, file.host)}"]
    return []


def _end(processes: Sequence[ListedProcess], host: str) -> str:
    pids = " ".join(str(one.pid) for one in processes[:_MOST])
    where = f" on {host}" if host else ""
    return f"what still runs of these may spin and hold its memory; to end it{where}: kill {pids}"


def _named(processes: Sequence[ListedProcess]) -> str:
    shown = ", ".join(f"pid {one.pid} ({one.name})" for one in processes[:_MOST])
    more = len(processes) - _MOST
    return shown + (f" and {more} more" if more > 0 else "")


def _launcher_is_gone(file: RunFile) -> bool:
    """Whether a run has no end since its ``kvtrace run`` was killed. False where that cannot be told."""
    if file.ended_wall_ns is not None or file.launcher <= 0 or file.host != socket.gethostname():
        return False
    began = _began_wall_ns(file.launcher)
    return began is None or began > (file.started_wall_ns or 0) + _SLACK_NS


def _began_wall_ns(pid: int) -> int | None:
    """When the process of this number began, None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        with open("/proc/stat", encoding="ascii", errors="replace") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime "))
        if fields[0] in ("Z", "X"):
            return None
        return boot * 1_000_000_000 + int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None
