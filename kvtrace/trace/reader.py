"""Read a spool: header, names, facts, and chunks of fixed records.

Never dies on bad input: a cut file is a valid prefix, and of a damaged one the blocks that do not
match their checksum are left out and counted. What a killed process had recorded of its open step has no
checksum yet; it is read, and counted as that. Only :class:`SpoolError` leaves this module. Memory is bounded
by one chunk, the names and the facts.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtrace.errors import KvtraceError
from kvtrace.regular import open_regular
from kvtrace.trace import blocks, facts
from kvtrace.trace import format as fmt
from kvtrace.trace.format import Fact, Kind
from kvtrace.trace.rows import code, kind
from kvtrace.trace.shifts import shift_of
from kvtrace.words import plural

Records = blocks.Records
Documents = list[tuple[int, facts.AnyFact]]
"""When each fact was written (``perf_counter_ns``), and the fact; in file order."""
F = TypeVar("F", bound=facts.Document)

_MAX_HEADER = 1 << 20
_MAX_TEXT = 1 << 24
_LATE = 1 << 14
_MOST_AT_ONCE = 64
_NAME, _BYTES, _TRAILER = int(Kind.NAME), int(Kind.BYTES), int(Kind.TRAILER)
_KINDS = np.arange(256)
_IS_BAD = (_KINDS == Kind.END) | (max(Kind) < _KINDS)
_IS_TEXT = np.isin(_KINDS, (Kind.NAME, Kind.FACT, Kind.BYTES, Kind.TRAILER))
_IS_FIXED = ~np.isin(_KINDS, (Kind.NAME, Kind.FACT, Kind.BYTES, Kind.SEAL))


class SpoolError(KvtraceError):
    """A spool that cannot be read; the message is one line and names the file."""


@dataclass(frozen=True)
class SpoolInfo:
    """One spool file, as far as it was read."""

    path: Path
    size: int = 0
    records: int = 0
    """Fixed records read (names and facts not counted)."""
    end: str = "open"
    """``trailer`` (recording was stopped on purpose), ``open`` (file ends on a block: the
    process was killed or still runs), ``cut`` (in the middle of one), ``damaged``."""
    stop: int | None = None
    """:class:`~kvtrace.trace.format.Stop` of the trailer."""
    lost: int = 0
    """Records that the process dropped after it stopped recording."""
    detail: str = ""
    left_out: int = 0
    """Records that were not read because their block is damaged or cut; at least that many."""
    whole: bool = False
    """All of its bytes behind the header and the window, up to ``size``, are blocks that match their
    checksums."""
    blocks: int = 0
    """How many these are."""
    windowed: bool = False
    """It has a window: the recorder in C wrote it."""
    late: int = 0
    """Records that stood in the window."""
    open: int = 0
    """Records at the end that have no checksum: of the step in which the process was killed, or is."""

    @property
    def name(self) -> str:
        return self.path.name


class _Damage(Exception):
    """The records up to here are good; what follows is not."""


class Spool:
    """One process's spool. ``seed``: its header's CRC; ``window``: where its window begins, None without one.

    Iterate :meth:`chunks` once; ``names`` and ``facts`` fill as it goes, and everything a
    chunk refers to is there when the chunk is.

    Raises:
        SpoolError: the file cannot be opened, or its header is not one of this version.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.names: dict[int, str] = {}
        self.facts: list[tuple[Fact, int, dict[str, Any]]] = []
        self.header: dict[str, Any] = {}
        self._info = SpoolInfo(self.path)
        self._data_start = self._rest = 0
        # The text that a NAME or FACT announced and whose BYTES are still to come:
        # (kind, id or fact code, time, length, crc, bytes so far).
        self._pending: tuple[int, int, int, int, int, bytearray] | None = None
        with self._opened() as file:
            self._read_header(file)
        try:
            self._shift = shift_of(self.path)
        except KvtraceError as error:
            raise SpoolError(str(error)) from None
        if self._shift is not None:
            self.header = self._shift.header(self.header)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with open_regular(self.path) as file:
                yield file
        except OSError as error:
            raise SpoolError(f"{self.path}: cannot be read ({error.strerror or error})") from None

    def _read_header(self, file: BinaryIO) -> None:
        block = file.read(fmt.RECORD_SIZE)
        try:
            version, record_size, length, crc = fmt.unpack_header_block(block)
        except ValueError as error:
            raise SpoolError(f"{self.path}: {error}") from None
        if not fmt.OLDEST <= version <= fmt.VERSION:
            raise SpoolError(
                f"{self.path}: spool format {version}, this kvtrace reads {fmt.VERSION}: "
                "use the kvtrace that recorded it"
            )
        self.seed = crc
        body = file.read(min(length, _MAX_HEADER))
        same = len(body) == length and fmt.header_crc(version, body) == crc
        try:
            header = json.loads(body) if same and record_size == fmt.RECORD_SIZE else None
            window = fmt.window_of(block)
        except (ValueError, RecursionError):
            header, window = None, 0
        if not isinstance(header, dict):
            raise SpoolError(f"{self.path}: damaged header")
        self.header = header
        self._data_start = fmt.RECORD_SIZE + length + (-length % fmt.RECORD_SIZE)
        self._behind = self._data_start + window
        self.window = self._data_start if window else None
        self._read(size=self._data_start, windowed=self.window is not None)

    def chunks(self, records: int = 65536, bare: bool = True) -> Iterator[Records]:
        """Arrays of shape (n, 8): all records but NAME, BYTES, FACT, SEAL, END; n <= ``records`` and a block.

        Args:
            bare: False: NAME, BYTES, FACT and SEAL may be among them, which spares a copy.

        Raises:
            SpoolError: the file vanished or a read failed.
        """
        whole = True
        with self._opened() as file:
            file.seek(self._data_start)
            for table in self._tables(file, records):
                table, fixed, stop = self._digest(table)
                whole &= not stop
                if number := int(fixed.sum()):
                    self._read(records=self._info.records + number)
                    good = table[fixed] if bare and number < len(table) else table
                    yield good if self._shift is None else self._shift.records(good)
                if stop:
                    break
        if self._pending is not None and self._info.end == "open":
            self._read(end="cut", detail="the last text is cut off")
        losses = self._info.left_out or self._info.end not in ("open", "trailer")
        self._read(whole=whole and not losses and not self._rest and self._pending is None)

    def again(self, info: SpoolInfo, records: int = 32768) -> Iterator[Records]:
        """What :meth:`chunks` gave (``bare=False``) when it read as far as `info` says, where that is known
        to be whole: its checksums are not looked at again. Of another spool all that is there now.

        Raises:
            SpoolError: the file vanished or a read failed.
        """
        if not info.whole:
            yield from self.chunks(records, bare=False)
            return
        left = (info.size - self._behind) // fmt.RECORD_SIZE
        with self._opened() as file:
            file.seek(self._behind)
            while left > 0 and (data := file.read(min(left, records) * fmt.RECORD_SIZE)):
                table = np.frombuffer(data, dtype="<i8", count=len(data) // 8 // fmt.WORDS * fmt.WORDS)
                left -= min(left, records)
                table = table.reshape(-1, fmt.WORDS)
                yield table if self._shift is None else self._shift.records(table)
            for table in self._late(file, info) if info.late else ():
                yield table if self._shift is None else self._shift.records(table)

    def _late(self, file: BinaryIO, info: SpoolInfo) -> Iterator[Records]:
        """The records that stood in the window when `info` was made: they may be in the file by now."""
        left = info.late
        found = blocks.Blocks(file, self.seed, info.blocks, self.window)
        for table in (table for _, table in found.tables(_LATE)):
            if left > 0:
                yield table[:left]
            left -= len(table)
        if left > 0:
            yield found.open[:left]

    def _tables(self, file: BinaryIO, records: int) -> Iterator[Records]:
        """The blocks that match their checksums, ``records`` of them at a time, then what has none yet."""
        found = blocks.Blocks(file, self.seed, 0, self.window)
        late = number = 0
        for gap, table in found.tables(records, seals=True):
            self._read(size=self._data_start + found.read_bytes)
            if gap:
                self._pending = None  # the rest of a text may be in what was left out
            if found.in_window:
                late += int((kind(table[:, 0]) != Kind.SEAL).sum())
            else:
                number = found.next
            yield table
        if len(found.open):
            yield found.open
        losses = found.losses
        self._rest = found.rest
        self._read(
            size=self._data_start + found.read_bytes, left_out=losses.records + losses.tail,
            blocks=number, late=late + len(found.open), open=len(found.open),
        )  # fmt: skip
        if losses.damage:
            self._damaged(losses.damage)
        elif losses.tail:
            self._read(
                end="cut", detail=f"the last block is cut off: {plural(losses.tail, 'record')} left out"
            )
        elif self._info.size < self._behind:
            self._read(end="cut", detail="it is cut off in its window, and what came behind that is lost")

    def _digest(self, table: Records) -> tuple[Records, NDArray[np.bool_], bool]:
        """Texts of a chunk go to names and facts; the chunk as far as it is good, and which of it is no text.

        Stops at the first END record or at damage; the last value says so.
        """
        kinds = table[:, 0].astype(np.uint8)  # the lowest byte
        stop = False
        bad = np.flatnonzero(_IS_BAD[kinds] | (table[:, 0] < 0))
        if len(bad):
            at = int(bad[0])
            if kinds[at] != Kind.END or table[at].any():
                number = self._info.records + at - int((kinds[:at] == Kind.SEAL).sum())
                self._damaged(f"record {number}: unknown kind {int(kinds[at])}")
            table, kinds, stop = table[:at], kinds[:at], True
        texts = np.flatnonzero(_IS_TEXT[kinds])
        fixed: NDArray[np.bool_] = _IS_FIXED[kinds]
        if self._pending is None and not len(texts):
            return table, fixed, stop
        limit, at = len(table), 0
        rows, of = table[texts].tolist(), kinds[texts].tolist()
        payload = table[texts, 1:].astype("<i8").tobytes()
        while at < len(rows):
            size = 1
            try:
                if of[at] == _TRAILER:
                    stop_reason, lost = code(rows[at][0]), max(0, rows[at][2])
                    self._read(end="trailer", stop=stop_reason, lost=lost)
                else:
                    size = self._text(rows[at], of[at : at + 1 + _MOST_AT_ONCE], payload, at)
            except _Damage as damage:
                self._damaged(str(damage))
                limit, stop = int(texts[at]), True
                break
            at += size
        # Nothing but BYTES may stand between a text's announcement and its end.
        if self._pending is not None and len(texts) and (kinds[texts[-1] + 1 :] != Kind.SEAL).any():
            self._damaged("a text is interrupted by another record")
            self._pending = None
        return table[:limit], fixed[:limit], stop

    def _damaged(self, detail: str) -> None:
        if self._info.end != "damaged":
            self._read(end="damaged", detail=detail)

    def _text(self, row: list[int], kinds: list[int], payload: bytes, at: int) -> int:
        """The next record of a text, or all of them if they are here; how many.

        Args:
            kinds: of this record and those after it.
            payload: what the records hold behind their heads; this one is number `at`.
        """
        begin = at * fmt.PAYLOAD_BYTES
        if kinds[0] != _BYTES:
            if self._pending is not None:
                raise _Damage("a text is interrupted by another")
            _, t, length, crc, *_ = row
            if not 0 <= length <= _MAX_TEXT:
                raise _Damage(f"a text of {length} bytes")
            ident = t if kinds[0] == _NAME else code(row[0])
            amount = -(-length // fmt.PAYLOAD_BYTES)
            if kinds[1 : 1 + amount] == [_BYTES] * amount:
                begin += fmt.PAYLOAD_BYTES
                self._finish_text(kinds[0], ident, t, crc, payload[begin : begin + length])
                return 1 + amount
            self._pending = (kinds[0], ident, t, length, crc, bytearray())
            return 1
        if self._pending is None:
            raise _Damage("text bytes without a name or fact")
        row_kind, ident, t, length, crc, buffer = self._pending
        buffer.extend(payload[begin : begin + fmt.PAYLOAD_BYTES])
        if len(buffer) >= length:
            self._pending = None
            self._finish_text(row_kind, ident, t, crc, bytes(buffer[:length]))
        return 1

    def _finish_text(self, row_kind: int, ident: int, t: int, crc: int, text: bytes) -> None:
        if zlib.crc32(text) != crc:
            raise _Damage("a text does not match its checksum")
        if row_kind == _NAME:
            self.names[ident] = text.decode("utf-8", "replace")
            return
        try:
            value = json.loads(text)
            fact = Fact(ident)
        except (ValueError, RecursionError):
            raise _Damage("a fact is not readable") from None
        if not isinstance(value, dict):
            raise _Damage("a fact is not an object")
        self.facts.append((fact, t + (self._shift.ns if self._shift else 0), value))

    def documents(self) -> Documents:
        """The facts read so far, typed."""
        return [(t, facts.FACTS[fact].from_json(value)) for fact, t, value in self.facts]

    def _read(self, **more: Any) -> None:
        self._info = replace(self._info, **more)

    def info(self) -> SpoolInfo:
        """What was read so far; complete after :meth:`chunks` is exhausted."""
        return self._info


def layer_ids(text: str) -> list[int]:
    """The ids of the names in a layer set (of :class:`~kvtrace.trace.rows.QuietCalls`); [] where damaged."""
    try:
        value = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    ids = value if isinstance(value, list) else []
    return [one for one in ids if isinstance(one, int) and 0 <= one < 1 << 62]


def layers_in(names: Mapping[int, str], ident: int) -> list[str]:
    """The names in the layer set of that id, "" for one that is not known."""
    return [names.get(one, "") for one in layer_ids(names.get(ident, ""))]


def of_type(kind: type[F], documents: Documents) -> list[tuple[int, F]]:
    """The documents of one type, each with its time."""
    return [(t, fact) for t, fact in documents if isinstance(fact, kind)]


def spool_paths(run_dir: Path) -> list[Path]:
    """The spools of a run directory, one a process, in a stable order."""
    return without_copies(run_dir)[0]


def without_copies(run_dir: Path) -> tuple[list[Path], list[str]]:
    """The spools of a run directory, and a note on each one that is left out because another is of the same
    process: a copy would count all of it twice. The longest is kept; of equals, that of the shortest name."""
    kept: dict[object, Path] = {}
    notes = []
    every = (run_dir / fmt.SPOOL_DIR).glob(f"*{fmt.SPOOL_SUFFIX}")
    for path in sorted(every, key=lambda path: (-_size(path), len(path.name), path.name)):
        process = _process(path) or path.name
        if process in kept:
            notes.append(
                f"spool left out: {path.name} is a copy of {kept[process].name}, of the same process"
            )
        else:
            kept[process] = path
    return sorted(kept.values()), sorted(notes)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _process(path: Path) -> tuple[object, ...] | None:
    """What tells the processes of a run apart; None where the header does not say it."""
    try:
        header = facts.Header.from_json(Spool(path).header)
    except SpoolError:
        return None
    return (header.host, header.pid, header.wall_ns, header.perf_ns) if header.wall_ns else None
