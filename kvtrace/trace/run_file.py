"""``run.json`` (``kvtrace.run/1``), as ``kvtrace run`` wrote it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvtrace.trace.facts import Document
from kvtrace.trace.sums import read_document

PROFILE_DIR, PROFILE_SUFFIX = "profiles", ".speedscope.json"
"""Where ``kvtrace run --sample`` puts what py-spy recorded, in a run directory."""
_MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class ListedProcess(Document):
    """A process that was seen below the command. ``vllm``: it is one of vLLM's; ``alive``: when that was
    written."""

    pid: int = -1
    ppid: int = -1
    name: str = ""
    command: str = ""
    vllm: bool = False
    alive: bool = False


@dataclass(frozen=True)
class RunFile(Document):
    """What ran, with which processes, and how it ended. Times are wall times, ns; None where unknown."""

    name: str = ""
    command: tuple[str, ...] = ()
    started_wall_ns: int | None = None
    ended_wall_ns: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    host: str = ""
    kvtrace: str = ""
    python: str = ""
    launcher: int = 0
    """pid of ``kvtrace run``."""
    processes: tuple[ListedProcess, ...] = ()
    left: tuple[ListedProcess, ...] = ()
    """Those of vLLM's that outlived the command."""
    spools: dict[str, int] = field(default_factory=dict)
    """Spool's file name -> its size in bytes when the run had ended; empty where nobody looked."""
    profiles: tuple[str, ...] = ()
    """py-spy's profiles, as paths in the run directory."""


def read_run_file(run_dir: Path) -> tuple[RunFile, list[str]]:
    """The run.json of a directory and notes on reading it; all unknown where there is none to be read."""
    unknown = "the command and its processes are unknown"
    return read_document(run_dir / "run.json", _MAX_BYTES, RunFile, unknown, [f"no run.json: {unknown}"])
