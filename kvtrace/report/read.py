"""A report from a path: a ``report.json``, or a run directory (then made afresh from its spools).

Whatever the path holds, the answer is a report that is valid by the published schema and whose
ledgers balance, or one :class:`ReportError` of one line.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any, NoReturn, cast

from kvtrace.report.model import SCHEMA, Report, ReportError
from kvtrace.report.validate import schema_problem
from kvtrace.trace.format import MAGIC, SPOOL_DIR, SPOOL_SUFFIX

REPORT_NAME = "report.json"
MAX_BYTES = 64 << 20
"""Reports are bounded: a file beyond this is something else, and is not read."""

_HOW = "give a report.json or a run directory of kvtrace run"


def read_report(path: str | Path) -> Report:
    """The report at `path`: of the file, or of the run directory.

    Raises:
        ReportError: nothing there, unreadable, no report, a newer one, or a damaged one.
        KvtraceError: a run directory whose spools cannot be read.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _of_directory(path)
        if not stat.S_ISREG(mode):
            raise ReportError("not a file or a directory", path, _HOW)
        return parse_report(_read(path), str(path))
    except OSError as error:
        raise _unreadable(error, path) from None
    except ValueError as error:  # a NUL in the path
        raise ReportError("no such path", ascii(str(path)), str(error)) from None


def parse_report(data: bytes, where: str) -> Report:
    """The report in `data`; `where` names it in errors."""
    if data.startswith(MAGIC):
        raise ReportError("this is a spool, not a report", where, "give the run directory it belongs to")
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise ReportError("not JSON (not UTF-8 text)", where, _HOW) from None
    except RecursionError:
        raise ReportError("JSON nested too deep for a report", where, _HOW) from None
    except ValueError as error:
        if not data.strip():
            raise ReportError("the file is empty", where, _HOW) from None
        raise ReportError(f"not JSON, or cut short ({_json_error(error)})", where, _HOW) from None
    return check_report(value, where)


def check_report(value: object, where: str) -> Report:
    """`value` as a report, if it is one.

    Raises:
        ReportError: another document, a newer or older report, a wrong type or field, an unbalanced ledger.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, str):
        raise ReportError("JSON, but no kvtrace report (no schema field)", where, _HOW)
    if schema != SCHEMA:
        _refuse_schema(schema, where)
    try:
        if found := schema_problem(value):
            raise ReportError("damaged report", where, found, "make it again with kvtrace explain RUN_DIR")
    except RecursionError:
        raise ReportError("JSON nested too deep for a report", where, _HOW) from None
    report = cast(Report, value)
    for name, one in (("saves", report["ledger"]["saves"]), ("loads", report["ledger"]["loads"])):
        if sum(one["accounts"].values()) != one["total"]:
            raise ReportError(
                "damaged report",
                where,
                f"the {name} ledger does not balance",
                "make it again with kvtrace explain RUN_DIR",
            )
    return report


def _refuse_schema(schema: str, where: str) -> NoReturn:
    match = re.fullmatch(r"kvtrace\.report/(\d{1,9})", schema)
    if match and int(match[1]) > int(SCHEMA.rpartition("/")[2]):
        raise ReportError(f"{schema} was made by a newer kvtrace", where, "upgrade kvtrace to read it")
    if match:
        raise ReportError(
            f"{schema} was made by an older kvtrace, this one reads {SCHEMA}",
            where,
            "make it again with kvtrace explain RUN_DIR",
        )
    if re.fullmatch(r"kvtrace\.run/\d{1,9}", schema):
        raise ReportError("this is a run's run.json, not a report", where, "give the run directory")
    raise ReportError(f"JSON of another kind (schema {ascii(schema)[:60]})", where, _HOW)


def _of_directory(path: Path) -> Report:
    spools = path / SPOOL_DIR
    if spools.is_dir() and any(spools.glob(f"*{SPOOL_SUFFIX}")):
        from kvtrace.report.build import build_report  # pandas: only when it is needed

        return build_report(path)
    report = path / REPORT_NAME
    if report.is_file():
        return parse_report(_read(report), str(report))
    if (path / "run.json").is_file():
        raise ReportError(
            "a run without a trace (no process loaded the agent)",
            path,
            "see the messages of kvtrace run, and run it again",
        )
    raise ReportError("no run in this directory (no spools, no report.json)", path, _HOW)


def _read(path: Path) -> bytes:
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ReportError(f"larger than any report ({MAX_BYTES >> 20} MiB)", path, _HOW)
    return data


def _unreadable(error: OSError, path: Path) -> ReportError:
    if isinstance(error, FileNotFoundError):
        return ReportError("no such file or directory", error.filename or path, _HOW)
    return ReportError("cannot read", error.filename or path, error.strerror or str(error))


def _json_error(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, line {error.lineno}"
    return "a number or constant that no report has"


def _no_constant(name: str) -> Any:
    raise ValueError(name)
