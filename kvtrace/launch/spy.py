"""py-spy: one look at the threads of a process, made by a program of its own and never waited for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvtrace.trace.mask import mask_text
from kvtrace.trace.stuck_file import Frame, Thread

_MOST_THREADS, _MOST_FRAMES, _MOST_CHARS = 64, 100, 300
_MOST_BYTES = 1 << 24
_PATIENCE_SECONDS = 30.0
MISSING = "py-spy is not installed: pip install 'kvtrace[spy]'"
FORBIDDEN = (
    "py-spy may not look into it: set kernel.yama.ptrace_scope=0 (sysctl), give the container the capability "
    "SYS_PTRACE, or run as root"
)


class SpyError(Exception):
    """Nothing was seen; the message is one clause: why, and what to do."""


def program() -> str | None:
    """py-spy beside this Python, or on PATH; None where it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


class Spy:
    """A look that is under way.

    Args:
        native: with the frames of native code; without them where that fails.

    Raises:
        SpyError: py-spy is not installed, or cannot be started.
    """

    no_native = "they are looked at in a process that hangs"
    """Why there are no native frames in what it saw; "" where there may be."""

    def __init__(self, pid: int, native: bool = False) -> None:
        path = program()
        if path is None:
            raise SpyError(MISSING)
        self._native = native
        self._plain = [path, "dump", "--pid", str(pid), "--json"]
        self._start([*self._plain, "--native"] if native else self._plain)

    def _start(self, command: list[str]) -> None:
        self._began = time.monotonic()
        self._out, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        try:
            # A session of its own: Ctrl-C is not for it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._errors,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._close()
            raise SpyError(f"py-spy cannot be started ({error.strerror})") from error

    def threads(self) -> tuple[Thread, ...] | None:
        """What it saw; None while it still looks.

        Raises:
            SpyError: it saw nothing.
        """
        try:
            seen = self._answer()
        except SpyError as error:
            if not self._native or str(error) == FORBIDDEN:
                raise
            # Frames of native code need more of a system than those of Python.
            self._native, self.no_native = False, str(error)
            self._start(self._plain)
            return None
        if seen is not None and self._native:
            self.no_native = ""
        return seen

    def _answer(self) -> tuple[Thread, ...] | None:
        code = self._process.poll()
        if code is None:
            if time.monotonic() - self._began < _PATIENCE_SECONDS:
                return None
            self.stop()
            raise SpyError(f"py-spy gave no answer in {_PATIENCE_SECONDS:.0f} s")
        try:
            self._out.seek(0)
            self._errors.seek(0)
            if code:
                raise SpyError(why_not(self._errors.read(1 << 16).decode("utf-8", "replace")))
            return read_dump(self._out.read(_MOST_BYTES))
        finally:
            self._close()

    def stop(self) -> None:
        """End it, if it still looks."""
        with contextlib.suppress(OSError):
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        self._out.close()
        self._errors.close()


def read_dump(data: bytes) -> tuple[Thread, ...]:
    """The threads in what ``py-spy dump --json`` wrote: names of threads, functions and files, and lines.

    Raises:
        SpyError: it is something else.
    """
    try:
        return tuple(_thread(thread) for thread in json.loads(data)[:_MOST_THREADS])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpyError("py-spy's answer has a shape that is not known") from error


def _thread(given: Any) -> Thread:
    name = _text(given.get("thread_name") or "") or f"thread {int(given.get('os_thread_id') or 0)}"
    frames = tuple(
        Frame(
            str(frame["name"])[:_MOST_CHARS],
            str(frame["filename"])[:_MOST_CHARS],
            int(frame.get("line") or 0),
            frame.get("module") is not None,  # of a shared library
        )
        for frame in given["frames"][:_MOST_FRAMES]
    )
    return Thread(name, bool(given.get("active")), frames)


def _text(value: object) -> str:
    return mask_text(str(value))[:_MOST_CHARS]


def why_not(errors: str) -> str:
    """What kept py-spy out, in one clause."""
    low = errors.lower()
    if "permission denied" in low or "operation not permitted" in low or "eperm" in low:
        return FORBIDDEN
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"py-spy: {mask_text(lines[0])[:200]}" if lines else "py-spy failed and did not say why"
