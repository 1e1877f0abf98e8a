"""The formats of an export: a row each, with what it writes and where."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvtrace.errors import KvtraceError
from kvtrace.export.folder import Output, into_file, into_folder
from kvtrace.words import count, plural, size

if TYPE_CHECKING:  # the command line's help names the formats: nothing large is loaded for that
    from kvtrace.export.run import Opened
    from kvtrace.ledger import Progress

    _Write: TypeAlias = Callable[[Opened, Output, Progress], dict[str, int]]


@dataclass(frozen=True)
class Destination:
    """What is to be written where. ``force``: replace what is there."""

    run: Opened
    place: Path
    force: bool
    progress: Progress


@dataclass(frozen=True)
class ExportFormat:
    """One format. ``suffix``: of the name that it gets where the user gives none; ``write`` returns what was
    written, in words."""

    name: str
    suffix: str
    write: Callable[[Destination], str]
    needs: str = ""
    """A module that no base install has; the extra that brings it has the format's name."""

    def check(self) -> None:
        """Raises KvtraceError where the format cannot be written here, before anything is read."""
        if self.needs:
            try:
                import_module(self.needs)
            except ImportError:
                install = f"pip install 'kvtrace[{self.name}]'"
                raise KvtraceError(f"{self.name} needs {self.needs}", f"install it: {install}") from None

    def place(self, run: Opened) -> Path:
        """The name in the working directory where the user gives none."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", run.name).lstrip(".-")[:100]
        return Path(f"{name or 'run'}{self.suffix}")


def _perfetto(target: Destination) -> str:
    from kvtrace.export.timeline import write_perfetto

    found = into_file(
        target.place, target.force, lambda path: write_perfetto(target.run, path, target.progress)
    )
    amounts = (
        f"{plural(found.tracks, 'track')}, {plural(found.slices, 'slice')}, {plural(found.flows, 'flow')}"
    )
    return f"{target.place} ({size(target.place.stat().st_size)}): {amounts}; open it at ui.perfetto.dev"


def _csv(target: Destination) -> str:
    from kvtrace.export.csv_files import write_csv

    return _tables(target, write_csv)


def _parquet(target: Destination) -> str:
    from kvtrace.export.parquet_files import write_parquet

    return _tables(target, write_parquet)


def _tables(target: Destination, write: _Write) -> str:
    counts = into_folder(
        target.place, target.force, lambda output: write(target.run, output, target.progress)
    )
    return f"{target.place}/: {', '.join(f'{name} {count(rows)}' for name, rows in counts.items())} rows"


FORMATS = (
    ExportFormat("perfetto", ".pftrace", _perfetto),
    ExportFormat("parquet", "-parquet", _parquet, "pyarrow"),
    ExportFormat("csv", "-csv", _csv),
)
BY_NAME = {one.name: one for one in FORMATS}
