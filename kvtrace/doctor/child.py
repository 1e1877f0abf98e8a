"""The look at vLLM and the connector, in a process of the command's Python: there it may crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtrace import CONFIG_VARIABLE
from kvtrace.agent.preflight import facts
from kvtrace.agent.preflight.facts import CommandLine
from kvtrace.launch.environment import imports_first
from kvtrace.launch.overlay import make_overlay

_PROBE = "kvtrace/agent/preflight/probe.py"
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in ', re.MULTILINE)
_NOT_THEIRS = re.compile(
    r"[/\\](kvtrace|importlib|vllm)[/\\]|^<|[/\\]lib[/\\]python[\d.]+[/\\](?!site-packages)"
)
_MOST_BYTES = 1 << 22
_TICK_SECONDS = 0.05

GiveUp = Callable[[str, float], bool]
"""(step, seconds that it has taken) -> whether to wait no longer."""


@dataclass(frozen=True)
class LookStep:
    """How a step of the look ended: ``done``, ``raised``, ``hung``, ``died``; ``where``: file and line."""

    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    where: str = ""


def look(
    python: str, environ: Mapping[str, str], asked: CommandLine, give_up: GiveUp, dump: float
) -> dict[str, LookStep]:
    """Step -> how it ended; steps that were not reached are not there.

    Args:
        python: the interpreter.
        environ: of the command.
        dump: seconds of a step after which the process writes where its threads stand.

    Raises:
        OSError: there is no place for temporary files, or the interpreter cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="kvtrace-doctor-") as name:
        folder = Path(name)
        overlay = make_overlay(folder / "overlay")
        (folder / "asked").write_text(json.dumps(asked.to_json()), encoding="utf-8")
        answer, stacks = folder / "answer", folder / "stacks"
        command = [python, str(overlay / _PROBE), str(folder / "asked"), str(answer), str(stacks), str(dump)]
        with open(folder / "said", "wb") as said:
            process = subprocess.Popen(
                command, env=_environment(environ, overlay), stdin=subprocess.DEVNULL,
                stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
            hung = _wait(process, answer, give_up)
        return _steps(_lines(answer), hung, process.returncode, _text(stacks), _text(folder / "said"))


def _environment(environ: Mapping[str, str], overlay: Path) -> dict[str, str]:
    child = {name: value for name, value in environ.items() if name != CONFIG_VARIABLE}
    return imports_first(child, overlay) | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def _wait(process: subprocess.Popen[bytes], answer: Path, give_up: GiveUp) -> bool:
    """Until it ends; whether it was ended because nobody waits any longer."""
    step, since, size = facts.PYTHON, time.monotonic(), 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK_SECONDS)
                return False
            now = answer.stat().st_size if answer.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
                step = str(_lines(answer)[-1].get("step", step)) if _lines(answer) else step
            if give_up(step, time.monotonic() - since):
                return True
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it has started. Where it can't be ended (a file system that hangs) it is left."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _lines(answer: Path) -> list[dict[str, Any]]:
    """Whole lines, so far."""
    found = []
    for line in _text(answer).split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            one = json.loads(line)
            if isinstance(one, dict):
                found.append(one)
    return found


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _steps(
    lines: list[dict[str, Any]], hung: bool, code: int | None, stacks: str, said: str
) -> dict[str, LookStep]:
    found: dict[str, LookStep] = {}
    begun = facts.PYTHON
    for line in lines:
        name = str(line["step"])
        if "error" in line:
            found[name] = LookStep("raised", error=str(line["error"]), where=str(line.get("where", "")))
        elif "facts" in line:
            found[name] = LookStep("done", line["facts"])
        else:
            begun = name
    if begun and begun not in found:
        if hung:
            found[begun] = LookStep("hung", where=stands_in(stacks))
        else:
            found[begun] = LookStep("died", error=_end_of(code, said))
    return found


def stands_in(stacks: str) -> str:
    """``file:line`` of the innermost call of the main thread that is neither Python's own nor vLLM's."""
    main = stacks.rpartition("Timeout (")[2].rpartition("Thread ")[2]
    frames = _FRAME.findall(main)
    theirs = [frame for frame in frames if not _NOT_THEIRS.search(frame[0])]
    return ":".join((theirs or frames)[0]) if frames else ""


def _end_of(code: int | None, said: str) -> str:
    """How a process ended, and the last line that it wrote."""
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}" if -code in list(signal.Signals) else f"signal {-code}"
    else:
        how = f"exit code {code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"{how}: {lines[-1][:300]}" if lines else how
