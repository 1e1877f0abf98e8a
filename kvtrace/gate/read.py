"""Reading a baseline: checked against its schema, or one line that says what it is instead."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvtrace.gate.contract import line_of
from kvtrace.gate.model import SCHEMA, Baseline, GateError, baseline_schema
from kvtrace.report.validate import problem
from kvtrace.trace.format import MAGIC

MAX_BYTES = 4 << 20
_HOW = "give a baseline that kvtrace baseline wrote"


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
        if path.exists() and not path.is_file():
            raise GateError("not a file", path, _HOW)
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
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
    if len(data) > MAX_BYTES:
        raise GateError(f"larger than any baseline ({MAX_BYTES >> 20} MiB)", where, _HOW)
    if data.startswith(MAGIC):
        raise GateError("this is a spool, not a baseline", where, _HOW)
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise GateError("not JSON (not UTF-8 text)", where, _HOW) from None
    except RecursionError:
        raise GateError("JSON nested too deep for a baseline", where, _HOW) from None
    except ValueError as error:
        if not data.strip():
            raise GateError("the file is empty", where, _HOW) from None
        at = (
            f"{error.msg}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "a bad number"
        )
        raise GateError(f"not JSON, or cut short ({at})", where, _HOW) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, str):
        raise GateError("JSON, but no kvtrace baseline (no schema field)", where, _HOW)
    if schema != SCHEMA:
        _refuse(schema, where)
    try:
        found = problem(value, baseline_schema())
    except RecursionError:
        raise GateError("JSON nested too deep for a baseline", where, _HOW) from None
    if found:
        raise GateError("damaged baseline", where, found, "make it again with kvtrace baseline --force")
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        row = line.strip().rstrip(",")
        lines.setdefault(row, number)
        lines.setdefault(row.partition(": ")[2] if row.startswith('"') else row, number)  # "saves": {...}
    return BaselineFile(where, cast(Baseline, value), lines)


def _refuse(schema: str, where: str) -> None:
    match = re.fullmatch(r"kvtrace\.baseline/(\d{1,9})", schema)
    if match and int(match[1]) > 1:
        raise GateError(f"{schema} was made by a newer kvtrace", where, "upgrade kvtrace to read it")
    if re.fullmatch(r"kvtrace\.report/\d{1,9}", schema):
        raise GateError(
            "this is a report, not a baseline",
            where,
            f"make a baseline of it: kvtrace baseline {where} -o FILE",
        )
    raise GateError(f"JSON of another kind (schema {ascii(schema)[:60]})", where, _HOW)


def _no_constant(name: str) -> Any:
    raise ValueError(name)
