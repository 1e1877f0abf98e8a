"""``kvtrace run``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

import typer

from kvtrace.errors import KvtraceError

_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?\Z", re.IGNORECASE)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_LEAST = 64 << 10


def parse_size(text: str) -> int:
    """``512M``, ``2GiB``, ``65536`` -> bytes (powers of 1024).

    Raises:
        KvtraceError: no size, or less than 64K.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        raise KvtraceError(f"--limit {text!r} is no size", "write for example 512M or 2G")
    size = int(match.group(1)) << _SHIFTS[match.group(2).lower()]
    if not _LEAST <= size < 1 << 62:
        raise KvtraceError(f"--limit {text!r} is out of range", "it is at least 64K")
    return size


def run(
    command: Optional[list[str]] = typer.Argument(  # noqa: UP045 (typer on Python 3.10)
        None, metavar="[--] COMMAND...", help="Any command that starts vLLM, with its own options unchanged."
    ),
    output: Optional[Path] = typer.Option(  # noqa: UP045
        None,
        "-o",
        "--output",
        metavar="DIR",
        help="Run directory: new, or empty. [default: reports/<timestamp>-<name>]",
    ),
    name: Optional[str] = typer.Option(  # noqa: UP045
        None, "--name", metavar="NAME", help="Name of the run. [default: the command's program]"
    ),
    limit: str = typer.Option(
        "1G",
        "--limit",
        metavar="SIZE",
        help="Per process: past this size, steps in which nothing was stored or loaded are kept as sums.",
    ),
) -> None:
    """Run a vLLM command traced, then make the report.

    The command's stdin, stdout and stderr are untouched, signals reach it once, and its exit code is
    kvtrace's: 128 + N where signal N ended it; 2 where it succeeded but no vLLM process was traced.
    """
    from kvtrace.launch.session import RunOptions
    from kvtrace.launch.session import run as run_session

    if not command:
        raise KvtraceError("no command", "write kvtrace run -- vllm serve MODEL ...")
    code = run_session(RunOptions(command, output, name, parse_size(limit)))
    raise typer.Exit(code)
