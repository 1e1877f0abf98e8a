"""Whether py-spy could look into a process of vLLM that hangs: tried on a Python of our own."""

from __future__ import annotations

import subprocess
import sys
import time

from kvtrace.launch.spy import MISSING, Spy, SpyError, program

_WAITS = "import sys; print(flush=True); sys.stdin.read()"
_SECONDS = 20.0


def may_look() -> str | None:
    """ "" where it can; else why not, in one clause; None where that was not found out."""
    if program() is None:
        return MISSING
    try:
        waiting = subprocess.Popen(
            [sys.executable, "-c", _WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError:
        return None
    try:
        if waiting.stdout is not None:
            waiting.stdout.readline()  # py-spy reads no Python that is not up yet
        return _try(waiting.pid)
    finally:
        waiting.kill()
        waiting.communicate()


def _try(pid: int) -> str | None:
    end = time.monotonic() + _SECONDS
    try:
        spy = Spy(pid)
        while time.monotonic() < end:
            if spy.threads() is not None:
                return ""
            time.sleep(0.05)
    except SpyError as error:
        return str(error)
    spy.stop()
    return None
