"""``kvtrace run``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import typer

from kvtrace.errors import KvtraceError
from kvtrace.trace.config import TIMINGS, WATCHES, AgentConfig, new_salt

_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?\Z", re.IGNORECASE)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_LEAST = 64 << 10
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")


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


def parse_share(option: str, text: str) -> float:
    """``10%`` -> 0.1, "" -> 0.

    Raises:
        KvtraceError: no percentage.
    """
    number = text.strip().removesuffix("%").strip()
    try:
        share = float(number or 0) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 10 or (text and not text.strip().endswith("%")):
        raise KvtraceError(f"{option} {text!r} is no share", "write a percentage, for example 5%")
    return share


def _budget(text: str) -> float:
    share = parse_share("--budget", text)
    if not 0 < share <= 1:
        raise KvtraceError(f"--budget {text!r} is out of range", "it is above 0% and up to 100%")
    return share


def one_of(option: str, text: str, known: Sequence[str]) -> str:
    """Raises KvtraceError where it is none of these."""
    if text not in known:
        raise KvtraceError(f"{option} {text!r} is not known", f"write one of {', '.join(known)}")
    return text


def parse_name(option: str, text: str | None, what: str, example: str) -> str:
    """``module:function`` or ``module:Class``; "" for none.

    Raises:
        KvtraceError: it is no such name. Whether it is there shows in the vLLM process.
    """
    if text is not None and not _NAME.match(text):
        how = f"write module:{what}, for example {example}"
        raise KvtraceError(f"{option} {text!r} is no {what.lower()}", how)
    return text or ""


def run(
    command: list[str] | None = typer.Argument(
        None, metavar="[--] COMMAND...", help="Any command that starts vLLM, with its own options unchanged."
    ),
    output: Path | None = typer.Option(
        None,
        "-o",
        "--output",
        metavar="DIR",
        help="Run directory: new, or empty. [default: reports/<timestamp>-<name>]",
    ),
    name: str | None = typer.Option(
        None, "--name", metavar="NAME", help="Name of the run. [default: the command's program]"
    ),
    limit: str = typer.Option(
        f"{AgentConfig.limit_bytes >> 30}G",
        "--limit",
        metavar="SIZE",
        help="Per process: past this size, steps in which nothing was stored or loaded are kept as sums.",
    ),
    device_timing: str = typer.Option(
        AgentConfig.device_timing,
        "--device-timing",
        metavar="|".join(TIMINGS),
        help="CUDA only: device time of hooks and attention, in no step, in as many as the budget allows, "
        "or in all.",
    ),
    watch: str = typer.Option(
        AgentConfig.watch,
        "--watch",
        metavar="|".join(WATCHES),
        help="Steps with prompt tokens, saves or loads whose reads and writes of KV slots are watched: "
        "the first 8, every 32nd too, or all that the budget allows.",
    ),
    budget: str | None = typer.Option(
        None,
        "--budget",
        metavar="SHARE",
        help="Share of the steps' time that the watch may take, from the first step on, and sampled device "
        f"timing. Without it {AgentConfig.budget:.0%}, which the watch keeps to when it has taken "
        f"{AgentConfig.credit:.0f} seconds of processor time.",
        show_default=False,
    ),
    metadata_adapter: str | None = typer.Option(
        None,
        "--metadata-adapter",
        metavar="MODULE:FUNCTION",
        help="A function that says what the connector's metadata declares, where its shape does not.",
    ),
    keep_messages: bool = typer.Option(
        False,
        "--keep-messages",
        help="Record messages of exceptions and logs with the values in them, which may be users' content.",
    ),
    keep_settings: bool = typer.Option(
        False,
        "--keep-settings",
        help="Record the strings of the command line and of the connector's configuration as they are; else "
        "what may be a secret becomes its length and a digest.",
    ),
    stuck_after: float = typer.Option(
        30.0,
        "--stuck-after",
        min=0,
        max=86400,
        metavar="SECONDS",
        help="Look with py-spy (kvtrace[spy]) at where a process of vLLM stands that has recorded nothing "
        "for so long; 0: only on 'kill -RTMIN PID' of kvtrace, or s in kvtrace top.",
    ),
    sample: int = typer.Option(
        0,
        "--sample",
        min=0,
        max=1000,
        metavar="RATE",
        help="Record a py-spy profile (kvtrace[spy]) of each worker and engine core: so many samples per "
        "second, in speedscope format beside the trace.",
        show_default=False,
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
    adapter = parse_name("--metadata-adapter", metadata_adapter, "function", "mine.kv:kv_entries")
    agent = AgentConfig(
        Path(), new_salt(),
        limit_bytes=parse_size(limit),
        device_timing=one_of("--device-timing", device_timing, TIMINGS),
        budget=AgentConfig.budget if budget is None else _budget(budget),
        watch=one_of("--watch", watch, WATCHES),
        metadata_adapter=adapter, keep_messages=keep_messages, keep_settings=keep_settings,
        credit=AgentConfig.credit if budget is None else 0.0,
    )  # fmt: skip
    raise typer.Exit(run_session(RunOptions(command, agent, output, name, stuck_after, sample)))
