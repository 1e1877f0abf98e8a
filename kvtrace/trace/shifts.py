"""``clocks.json`` (``kvtrace.clocks/1``) of a run directory that ``kvtrace merge`` put together of spools of
several hosts: by how much the times of each spool are moved, so that all are of one clock."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtrace.errors import KvtraceError
from kvtrace.regular import read_regular
from kvtrace.trace.blocks import Records
from kvtrace.trace.facts import Document
from kvtrace.trace.rows import KIND_OF, kind

CLOCKS_FILE = "clocks.json"
SCHEMA = "kvtrace.clocks/1"
_MAX_BYTES = 1 << 24


@dataclass(frozen=True)
class Shift(Document):
    """What is different about a spool: ``ns`` is added to its times, ``pid`` to its process ids, as two hosts
    give the same ones; ``boot`` stands for its own."""

    ns: int = 0
    pid: int = 0
    boot: str = ""

    def header(self, header: dict[str, Any]) -> dict[str, Any]:
        """A spool's header, moved: its pair of clocks stays one."""
        moved = {"boot": self.boot}
        for name, by in (("perf_ns", self.ns), ("pid", self.pid), ("ppid", self.pid)):
            if isinstance(header.get(name), int):
                moved[name] = header[name] + by
        return header | moved

    def records(self, table: Records) -> Records:
        """Records of shape (n, 8), moved."""
        table = table.copy()
        kinds = kind(table[:, 0])
        for word, has in enumerate(_HAS_TIME, 1):
            table[:, word] += self.ns * (has[kinds] & (table[:, word] != 0))
        return table


_HAS_TIME = np.zeros((2, 256), dtype=bool)
"""Word (from 1) x kind of record -> whether a time stands there."""
for _row, _kind in KIND_OF.items():
    _HAS_TIME[0, _kind] = _row._fields[1] in ("t", "t0")
    _HAS_TIME[1, _kind] = _row._fields[2] == "t1"


def shift_of(spool: Path) -> Shift | None:
    """How a spool is moved; None for one of an ordinary run.

    Raises:
        KvtraceError: its run has a clocks.json that cannot be read, or that does not know it.
    """
    path = spool.parent.parent / CLOCKS_FILE
    try:
        data = read_regular(path, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise KvtraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        value = json.loads(data)["spools"][spool.name]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise KvtraceError(f"{path}: damaged, or without {spool.name}: merge the runs again") from None
    return Shift.from_json(value if isinstance(value, dict) else {})
