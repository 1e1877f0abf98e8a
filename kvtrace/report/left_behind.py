"""Who outlived a run: processes of vLLM that nobody ends any more."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.ledger.run_file import ListedProcess, RunFile
from kvtrace.report.running import launcher_is_gone

_MOST = 8


def left_behind(file: RunFile) -> list[str]:
    """A line where ``run.json`` names some; those of a run whose ``kvtrace run`` was killed as it last saw
    them, as nobody has looked since."""
    if file.left:
        return [f"{_named(file.left)} outlived the command: {_end(file.left, file.host)}"]
    alive = tuple(one for one in file.processes if one.vllm and one.alive)
    if alive and launcher_is_gone(file):
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
