"""``--sample``: a py-spy profile of each worker and engine core, recorded from outside while the run goes on.

Each profile is made by a program of its own, which ends with the process that it looks at. It never stops
that process (py-spy's ``--nonblocking``), and it ends by itself after a number of samples: its memory and
its file are bounded, however long the run is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvtrace.launch.finish import pid_in
from kvtrace.launch.rundir import RunDir
from kvtrace.launch.say import say
from kvtrace.launch.spy import MISSING, program, why_not
from kvtrace.launch.stuck import ROLES
from kvtrace.trace.format import SPOOL_DIR, SPOOL_SUFFIX
from kvtrace.trace.run_file import PROFILE_DIR, PROFILE_SUFFIX
from kvtrace.words import plural

MOST_SAMPLES = 30_000
"""In one profile: ten minutes at 50 a second."""
MOST_PROFILES = 64
_PATIENCE_SECONDS = 20.0
"""For py-spy to write a profile, once its process has ended."""
_TICK_SECONDS = 0.05


@dataclass
class _Profile:
    path: Path
    process: subprocess.Popen[bytes]
    errors: IO[bytes]


class Sampler:
    """Called at every tick of a run.

    Args:
        rate: samples per second; 0: nothing is ever done.
        living: the pids of the run's processes that live; no other is ever looked at.
    """

    def __init__(self, rundir: RunDir, rate: int, living: Callable[[], Collection[int]]) -> None:
        self._rundir, self._rate, self._living = rundir, rate, living
        self._seen: set[int] = set()  # pids
        self._open: list[_Profile] = []
        self._said: set[str] = set()
        self._program = program() if rate else None
        if rate and self._program is None:
            self._say(f"no profile is recorded: {MISSING}")
            self._rate = 0

    def tick(self) -> None:
        """Begin the profiles of processes that are new, and see to those that ended. Raises OSError only."""
        if not self._rate:
            return
        self._collect()
        living = self._living()
        with os.scandir(self._rundir.path / SPOOL_DIR) as entries:
            spools = sorted(
                entry.path
                for entry in entries
                if entry.name.startswith(ROLES) and entry.name.endswith(SPOOL_SUFFIX)
            )
        for spool in map(Path, spools):
            pid = pid_in(spool)
            if pid is not None and pid in living and pid not in self._seen:
                self._seen.add(pid)
                self._begin(pid, spool.name.removesuffix(SPOOL_SUFFIX))

    def finish(self) -> list[Path]:
        """The command has ended: the profiles that were written. No py-spy is left behind."""
        until = time.monotonic() + _PATIENCE_SECONDS
        living = self._living()
        for one in self._open:
            if living:  # of a process that outlives the command: what was seen so far is written
                with contextlib.suppress(OSError):
                    one.process.send_signal(signal.SIGINT)
        while self._open and time.monotonic() < until:
            self._collect()
            time.sleep(_TICK_SECONDS)
        self.stop()
        folder = self._rundir.path / PROFILE_DIR
        found = sorted(folder.glob(f"*{PROFILE_SUFFIX}")) if folder.is_dir() else []
        if found:
            kept = plural(len(found), "profile")
            say(f"{kept} in {self._rundir.shown}/{PROFILE_DIR}: open them at https://www.speedscope.app")
        return found

    def stop(self) -> None:
        """End all that still records."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.process.kill()
            one.process.wait()
            one.errors.close()
        self._open.clear()

    def _begin(self, pid: int, name: str) -> None:
        if len(self._seen) > MOST_PROFILES or self._program is None:
            self._say(f"{MOST_PROFILES} processes are sampled, and no more")
            return
        folder = self._rundir.path / PROFILE_DIR
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{name}{PROFILE_SUFFIX}"
        seconds = max(1, MOST_SAMPLES // self._rate)
        command = [
            self._program, "record", "--pid", str(pid), "--rate", str(self._rate), "--format", "speedscope",
            "--output", str(path), "--duration", str(seconds), "--nonblocking", "--threads", "--idle",
        ]  # fmt: skip
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            # A session of its own: Ctrl-C is not for it.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            errors.close()
            self._say(f"no profile is recorded: py-spy cannot be started ({error.strerror})")
            return
        self._open.append(_Profile(path, process, errors))

    def _collect(self) -> None:
        for one in [one for one in self._open if one.process.poll() is not None]:
            self._open.remove(one)
            one.errors.seek(0)
            if one.process.returncode and not one.path.exists():
                text = one.errors.read(1 << 16).decode("utf-8", "replace")
                self._say(f"no profile of {one.path.name.removesuffix(PROFILE_SUFFIX)}: {why_not(text)}")
            one.errors.close()

    def _say(self, line: str) -> None:
        reason = line.partition(": ")[2] or line
        if reason not in self._said:  # once, not once a worker
            self._said.add(reason)
            say(line)
