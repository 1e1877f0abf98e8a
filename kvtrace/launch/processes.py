"""The processes of a run, watched through ``/proc`` while they live.

A look costs one listing of ``/proc`` and a few reads per process of the run. A process
belongs to it when its parent does, or when its environment holds this run's configuration:
that finds the ones whose parent has gone between two looks.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtrace import CONFIG_VARIABLE
from kvtrace.launch.commands import TITLE, ignores_pythonpath, is_python, is_vllm
from kvtrace.launch.environment import PLUGINS_VARIABLE
from kvtrace.launch.interpreter import ENTRY_POINT_NAME
from kvtrace.trace.mask import mask_argv

MAX_PROCESSES = 1024
_COMMAND_CHARS = 200
_TRIES = 3
"""In the middle of an exec a process shows no environment: it is looked at again."""


@dataclass
class RunProcess:
    """One process of the run. ``obstacle``: why its environment keeps the agent out, if it does."""

    pid: int
    ppid: int
    started: int
    argv: list[str]
    alive: bool = True
    obstacle: str | None = None
    looked_at: bool = False

    @property
    def name(self) -> str:
        first = self.argv[0] if self.argv else "?"
        return first if TITLE in first else os.path.basename(first.split(" ")[0]) or "?"

    @property
    def command(self) -> str:
        masked = mask_argv(self.argv)
        return (masked[0] if len(masked) == 1 else shlex.join(masked))[:_COMMAND_CHARS]

    @property
    def vllm(self) -> bool:
        return is_vllm(self.argv)

    @property
    def python(self) -> bool:
        return is_python(self.argv)


class ProcessTable:
    """All processes of a run that were seen, dead ones included.

    Args:
        config: the text of the agent's configuration that this run hands down.
        overlay: the folder that it put on PYTHONPATH.
    """

    def __init__(self, config: str, overlay: Path, proc: Path = Path("/proc")) -> None:
        self._config = f"{CONFIG_VARIABLE}={config}".encode(errors="surrogateescape")
        self._overlay = str(overlay)
        self._proc = proc
        self._live: dict[int, RunProcess] = {}
        self._undecided: dict[int, int] = {}
        self.processes: list[RunProcess] = []
        self.overflow = 0
        """Processes past :data:`MAX_PROCESSES`, counted only."""
        self._known = self._pids()
        """Of the last look. Everything that runs already is not ours, kvtrace included."""

    def start(self, root: int, argv: Sequence[str] = ()) -> bool:
        """The child is there: it is of the run. ``argv`` stands for it if it ended at once."""
        self._adopt(root, self._read_stat(root), argv)
        self._known.add(root)
        return True

    def scan(self) -> bool:
        """Look once. True where something changed that run.json should know."""
        before = [(p.pid, p.started, p.alive, p.argv) for p in self._live.values()]
        pids = self._pids()
        new = pids - self._known
        self._known = pids
        for pid in [pid for pid in self._live if pid not in pids or self._is_zombie(pid)]:
            self._live.pop(pid).alive = False
        self._adopt_new(new)
        for pid, process in list(self._live.items()):
            self._refresh(pid, process)
        return before != [(p.pid, p.started, p.alive, p.argv) for p in self._live.values()]

    def living(self) -> list[RunProcess]:
        """Those that still ran at the last look."""
        return list(self._live.values())

    def rows(self, traced: frozenset[int] = frozenset()) -> list[dict[str, object]]:
        """For run.json. ``traced``: pids that wrote a spool, which are vLLM's by that."""
        return [
            {
                "pid": p.pid,
                "ppid": p.ppid,
                "name": p.name,
                "command": p.command,
                "vllm": p.vllm or p.pid in traced,
                "alive": p.alive,
            }
            for p in self.processes
        ]

    def _adopt_new(self, new: set[int]) -> None:
        tries, self._undecided = self._undecided, {}
        stats = {pid: stat for pid in new.union(tries) if (stat := self._read_stat(pid)) is not None}
        while True:  # a new process may be the child of another new one
            found = [pid for pid, stat in stats.items() if stat[0] in self._live]
            if not found:
                break
            for pid in found:
                self._adopt(pid, stats.pop(pid))
        for pid, stat in stats.items():
            environ = self._read(pid, "environ")
            if self._config in environ.split(b"\0"):
                self._adopt(pid, stat)
            elif not environ and tries.get(pid, 0) < _TRIES:
                self._undecided[pid] = tries.get(pid, 0) + 1

    def _adopt(self, pid: int, stat: tuple[int, int] | None, argv: Sequence[str] = ()) -> None:
        if stat is None:
            return
        process = RunProcess(pid, stat[0], stat[1], list(argv))
        self._live[pid] = process
        if len(self.processes) < MAX_PROCESSES:
            self.processes.append(process)
        else:
            self.overflow += 1
        self._refresh(pid, process)

    def _refresh(self, pid: int, process: RunProcess) -> None:
        argv = _split(self._read(pid, "cmdline"))
        if not argv or (process.looked_at and argv == process.argv):  # empty: a zombie, keep its last name
            return
        process.argv, process.looked_at = argv, True
        if TITLE not in argv[0]:  # setting a title overwrites the environment's memory
            process.obstacle = self._obstacle(self._read(pid, "environ"), argv)

    def _obstacle(self, environ: bytes, argv: list[str]) -> str | None:
        """Why such a process would not load the agent; None: no such reason is known."""
        entries = environ.split(b"\0")
        if len(entries) < 2:
            return None  # unreadable
        variables = dict(entry.partition(b"=")[::2] for entry in entries if entry)
        if self._config not in entries:
            return f"its environment lacks {CONFIG_VARIABLE} (sudo, env -i or a container drops it)"
        path = os.fsdecode(variables.get(b"PYTHONPATH", b"")).split(os.pathsep)
        if self._overlay not in path:
            lost = "PYTHONPATH was replaced on the way and leaves kvtrace's folder out"
        elif ignores_pythonpath(argv):
            lost = "python -I or -E ignores PYTHONPATH"
        else:
            return None
        # Left is vLLM's own way, its plugins.
        plugins = variables.get(PLUGINS_VARIABLE.encode())
        if plugins is not None and ENTRY_POINT_NAME not in os.fsdecode(plugins).split(","):
            given = f"{PLUGINS_VARIABLE}={os.fsdecode(plugins)!r}"
            return f"{lost}, and {given} leaves {ENTRY_POINT_NAME} out (add it there)"
        return f"{lost} (install kvtrace in that Python's environment)"

    def _pids(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        except OSError:
            return set()

    def _read_stat(self, pid: int) -> tuple[int, int] | None:
        """(parent, start time in clock ticks); None for a process that has gone."""
        # "pid (comm) state ppid ...": comm may hold spaces and parentheses
        fields = self._read(pid, "stat").rpartition(b")")[2].split()
        try:
            return int(fields[1]), int(fields[19])
        except (IndexError, ValueError):
            return None

    def _is_zombie(self, pid: int) -> bool:
        """Whether it has ended, and nobody has asked how."""
        return self._read(pid, "stat").rpartition(b")")[2].split()[:1] == [b"Z"]

    def _read(self, pid: int, name: str) -> bytes:
        try:
            return (self._proc / str(pid) / name).read_bytes()
        except OSError:
            return b""


def _split(cmdline: bytes) -> list[str]:
    """A process title pads its line with zeros; real empty arguments in between are kept."""
    text = cmdline.rstrip(b"\0")
    return [os.fsdecode(word) for word in text.split(b"\0")] if text else []
