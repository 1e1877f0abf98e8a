"""What ends ``kvtrace run`` before the command was started."""

from __future__ import annotations

from kvtrace.errors import KvtraceError


class LaunchError(KvtraceError):
    """One line: the run could not be started. Exit code 2; nothing is left behind."""


def reason(error: OSError) -> str:
    """The operating system's words for an error, without its number and path."""
    return (error.strerror or type(error).__name__).lower()
