"""Start the command, pass signals on to it, wait for its end.

The child is an ordinary member of kvtrace's process group with kvtrace's own stdin, stdout
and stderr: terminal, job control and pipes behave as if kvtrace were not there.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtrace.launch.errors import LaunchError, reason
from kvtrace.launch.witness import Witness

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SHELL_FALLBACK = "/bin/sh"
_TICK_SECONDS = 0.5
ASK = signal.SIGRTMIN if hasattr(signal, "SIGRTMIN") else None
"""For kvtrace itself, never passed on: vLLM, Python and torch use no real-time signal."""


@dataclass(frozen=True)
class ChildEnd:
    """How the child ended. ``code`` is what the shell would give: 128 + N after signal N."""

    code: int
    signal: str | None


def run_child(
    program: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    started: Callable[[int], None],
    tick: Callable[[], None],
    heard: Callable[[int], None],
) -> ChildEnd:
    """Run ``program`` with ``command`` as its argv until it ends.

    ``started`` gets its pid at once, ``tick`` is called about twice a second, ``heard`` gets the number of
    each signal that comes; none of them may raise. Signals that come to kvtrace alone are passed on, once
    each; :data:`ASK` is not.

    Raises:
        LaunchError: the program cannot be executed.
    """
    if not hasattr(signal, "sigtimedwait"):
        raise LaunchError("kvtrace run needs Linux", "explain works here too")
    # A parent that ignores SIGCHLD makes the kernel throw the exit status away.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    waited = {*FORWARDED, signal.SIGCHLD, *([ASK] if ASK else [])}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        pid = _spawn(program, command, environ, before)
        witness = _call_witness()
        try:
            started(pid)
            return _wait(pid, witness, waited, tick, heard)
        finally:
            if witness is not None:
                witness.dismiss()
            # An impatient second Ctrl-C was meant for the child: it must not stop the report.
            while signal.sigtimedwait(waited, 0) is not None:
                pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(program: str, command: Sequence[str], environ: Mapping[str, str], mask: set[int]) -> int:
    def spawn(path: str, argv: Sequence[str]) -> int:
        # Python ignores these two for itself; the command must get what a shell would give it.
        return os.posix_spawn(
            path, list(argv), environ, setsigmask=mask, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
        )

    try:
        try:
            return spawn(program, command)
        except OSError as error:
            if error.errno != 8:  # ENOEXEC: a script without a first line; shells hand it to sh
                raise
            return spawn(_SHELL_FALLBACK, [_SHELL_FALLBACK, program, *command[1:]])
    except FileNotFoundError as error:
        raise LaunchError(f"cannot run {program}", "the interpreter that it names does not exist") from error
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise LaunchError(f"cannot run {program}", why) from error


def _call_witness() -> Witness | None:
    """None where the system is out of processes or files: a signal may then arrive twice."""
    try:
        return Witness(FORWARDED)
    except OSError:
        return None


def _wait(
    pid: int,
    witness: Witness | None,
    waited: set[signal.Signals],
    tick: Callable[[], None],
    heard: Callable[[int], None],
) -> ChildEnd:
    group_wide: set[int] = set()
    while True:
        info = signal.sigtimedwait(waited, _TICK_SECONDS)
        if info is not None:
            heard(info.si_signo)
        if info is not None and info.si_signo in FORWARDED:
            group_wide |= witness.seen() if witness is not None else set()
            # `timeout` signals us and then the group: the two are one.
            while signal.sigtimedwait([info.si_signo], 0) is not None:
                pass
            reached = info.si_signo in group_wide and _in_our_group(pid)
            # A positive code is the kernel's own: the terminal, whose keys signal the whole group
            # (its hang-up does not: only the session's leader hears of it).
            typed = info.si_code > 0 and info.si_signo in (signal.SIGINT, signal.SIGQUIT)
            if not reached and not typed:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, info.si_signo)
            group_wide &= set(signal.sigpending())
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return _outcome(status)
        tick()


def _in_our_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return False


def _outcome(status: int) -> ChildEnd:
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        try:
            name = signal.Signals(signum).name
        except ValueError:
            name = f"SIG{signum}"  # a real-time signal
        return ChildEnd(128 + signum, name)
    return ChildEnd(os.WEXITSTATUS(status), None)
