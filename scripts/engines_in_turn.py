"""Engines that stay alive side by side and work in turn, so that a drift of the machine meets all of them.

The process of an engine reads a line for each block of requests, and writes a line of JSON with its figures:
among them ``tokens``, what it generated, which must be the same in all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent


def answers() -> TextIO:
    """In an engine's process, before vLLM is imported: where its figures go; prints go to stderr."""
    figures = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return figures


class Engine:
    """One of them, from its start to its end.

    Args:
        traced: the options of ``kvtrace run``; None: without kvtrace.
        log: a file for what it prints.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, traced: Sequence[str] | None
    ) -> None:
        self._log = log
        if traced is not None:
            command = [sys.executable, "-m", "kvtrace", "run", *traced, "--", *command]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                cwd=ROOT,
            )  # fmt: skip

    def block(self, asked: str = "go") -> dict[str, Any]:
        """Raises SystemExit: it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(asked + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended early: see {self._log}")
        figures: dict[str, Any] = json.loads(line)
        return figures

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def one_turn(engines: Mapping[str, Engine], turn: int, asked: str = "go") -> dict[str, dict[str, Any]]:
    """The figures of a block of each: in one order, in the next turn in the other one.

    Raises SystemExit: one ended, or they made different tokens.
    """
    names = list(reversed(engines)) if turn % 2 else list(engines)
    figures = {name: engines[name].block(asked) for name in names}
    if any(one["tokens"] != figures[names[0]]["tokens"] for one in figures.values()):
        raise SystemExit(f"{' and '.join(names)} made different tokens")
    return figures
