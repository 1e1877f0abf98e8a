"""A report from a path: a ``report.json``, or a run directory (then made afresh from its spools).

Whatever the path holds, the answer is a report that is valid by the published schema and whose
ledgers balance, or one :class:`ReportError` of one line.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvtrace.regular import read_regular
from kvtrace.report import document
from kvtrace.report.digest import FIELD, digest_of
from kvtrace.report.published import SCHEMA, ReportError, published_schema
from kvtrace.trace.format import SPOOL_DIR, SPOOL_SUFFIX

if TYPE_CHECKING:
    from kvtrace.ledger import Progress
    from kvtrace.report.model import LedgerRow, Report, StateBook

REPORT_NAME = "report.json"
_HOW = "give a report.json or a run directory of kvtrace run"
_AGAIN = "make it again with kvtrace explain RUN_DIR"
KIND = document.DocumentKind(
    name="report",
    schema=SCHEMA,
    rules=published_schema,
    error=ReportError,
    max_bytes=64 << 20,
    how=_HOW,
    again=_AGAIN,
    spool="give the run directory it belongs to",
    others=(("run", "a run's run.json", "give the run directory"),),
)


def read_report(path: str | Path, progress: Progress | None = None) -> Report:
    """The report at `path`: of the file, or of the run directory.

    Args:
        progress: called with (bytes read, of so many), where spools are read.

    Raises:
        ReportError: nothing there, unreadable, no report, a newer one, or a damaged one.
        KvtraceError: a run directory whose spools cannot be read.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _of_directory(path, progress)
        if not stat.S_ISREG(mode):
            raise ReportError("not a file or a directory", path, _HOW)
        return parse_report(_read(path), str(path))
    except OSError as error:
        raise _unreadable(error, path) from None
    except ValueError as error:  # a NUL in the path
        raise ReportError("no such path", ascii(str(path)), str(error)) from None


def parse_report(data: bytes, where: str) -> Report:
    """The report in `data`; `where` names it in errors.

    Raises:
        ReportError: as of :func:`check_report`, or its checksum does not fit what it holds.
    """
    report = _balanced(document.parse(KIND, data, where), where)
    if report.get(FIELD) != digest_of(report):
        raise ReportError("damaged or altered report", where, "its checksum does not fit", _AGAIN)
    return report


def check_report(value: object, where: str) -> Report:
    """`value` as a report, if it is one.

    Raises:
        ReportError: another document, a newer or older report, a wrong type or field, an unbalanced ledger.
    """
    return _balanced(document.check(KIND, value, where), where)


def _balanced(value: object, where: str) -> Report:
    report = cast("Report", value)
    ledger = report["ledger"]
    books: list[tuple[str, LedgerRow | StateBook]] = [("saves", ledger["saves"]), ("loads", ledger["loads"])]
    if "states" in ledger:
        books += [("states", one) for one in (ledger["states"]["saves"], ledger["states"]["loads"])]
    for name, book in books:
        if sum(book["accounts"].values()) != book["total"]:
            raise ReportError("damaged report", where, f"the {name} ledger does not balance", _AGAIN)
    return report


def _of_directory(path: Path, progress: Progress | None) -> Report:
    spools = path / SPOOL_DIR
    if spools.is_dir() and any(spools.glob(f"*{SPOOL_SUFFIX}")):
        from kvtrace.report.build import build_report  # the analysis: only when it is needed

        return build_report(path, progress) if progress else build_report(path)
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
    return read_regular(path, KIND.max_bytes)


def _unreadable(error: OSError, path: Path) -> ReportError:
    if isinstance(error, FileNotFoundError):
        return ReportError("no such file or directory", error.filename or path, _HOW)
    return ReportError("cannot read", error.filename or path, error.strerror or str(error))
