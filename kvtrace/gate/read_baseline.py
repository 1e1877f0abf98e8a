"""Reading a baseline: checked against its schema, or one line that says what it is instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvtrace.gate.baseline import SCHEMA, Baseline, GateError, baseline_schema
from kvtrace.gate.contract import line_of
from kvtrace.regular import read_regular
from kvtrace.report import document

_HOW = "give a baseline that kvtrace baseline wrote"
KIND = document.DocumentKind(
    name="baseline",
    schema=SCHEMA,
    rules=baseline_schema,
    error=GateError,
    max_bytes=4 << 20,
    how=_HOW,
    again="make it again with kvtrace baseline --force",
    spool=_HOW,
    others=(("report", "a report", "make a baseline of it: kvtrace baseline {} -o FILE"),),
)


@dataclass(frozen=True)
class BaselineFile:
    """A baseline, its path as it was given, and where its rows stand in the file."""

    path: str
    baseline: Baseline
    lines: dict[str, int]

    def line(self, row: object) -> int:
        """The line of `row`, 1 where the file was formatted anew."""
        return self.lines.get(line_of(row), 1)


def read_baseline(path: str | Path) -> BaselineFile:
    """The baseline at `path`.

    Raises:
        GateError: nothing there, unreadable, another document, a newer or a damaged baseline.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise GateError("a directory, not a baseline", path, _HOW)
        data = read_regular(path, KIND.max_bytes)
    except FileNotFoundError:
        raise GateError(
            "no such baseline", path, f"make it from a good run: kvtrace baseline PATH -o {path}"
        ) from None
    except OSError as error:
        raise GateError("cannot read", path, error.strerror or str(error)) from None
    except ValueError as error:  # a NUL in the path
        raise GateError("no such path", ascii(str(path)), str(error)) from None
    return parse_baseline(data, str(path))


def parse_baseline(data: bytes, where: str) -> BaselineFile:
    """The baseline in `data`; `where` names it in errors."""
    value = document.parse(KIND, data, where)
    lines: dict[str, int] = {}
    for number, line in enumerate(data.decode("utf-8-sig").splitlines(), 1):
        row = line.strip().rstrip(",")
        lines.setdefault(row, number)
        lines.setdefault(row.partition(": ")[2] if row.startswith('"') else row, number)  # "saves": {...}
    return BaselineFile(where, cast(Baseline, value), lines)
