"""Long runs with the shape of a short one: its records again and again, as of other requests.

In each repetition the steps and times go on, the requests have ids, prompts and files of their own (new
names, other digests), and what a process keeps (layers, blocks, sets of slots) is the same. Further engines
are the same spools as of other processes. What the short run says once, at its start, is said once.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvtrace.trace import format as fmt
from kvtrace.trace import rows
from kvtrace.trace.facts import ClientIdFact
from kvtrace.trace.format import STEP_MASK, STEP_SHIFT, Fact, Kind, Way
from kvtrace.trace.reader import Spool

Table = NDArray[np.int64]
_ODD = 0x5851F42D4C957F2D
_MOST = (1 << 63) - 1
_TIMES, _DIGESTS = ("t", "t0", "t1"), ("digest", "prefix", "print", "target")
_BLOCK = fmt.MOST_BLOCK - 1


@dataclass
class _Words:
    """Which cells of a table hold what."""

    times: NDArray[np.bool_]
    steps: NDArray[np.bool_]
    calls: NDArray[np.bool_]
    digests: NDArray[np.bool_]
    names: NDArray[np.bool_]  # of requests and files: others in each repetition


def _words(table: Table) -> _Words:
    found = _Words(*(np.zeros(table.shape, dtype=bool) for _ in range(5)))
    kinds = rows.kind(table[:, 0])
    for kind, row in rows.ROWS.items():
        here = kinds == kind
        if not here.any():
            continue
        for word, name in enumerate(row._fields):
            of = (
                found.times if name in _TIMES
                else found.steps if name == "step"
                else found.calls if name == "call"
                else found.names if (name == "request" and word) or (kind, name) == (Kind.OUTSIDE, "target")
                else found.digests if name.rstrip("0123456789") in _DIGESTS
                else None
            )  # fmt: skip
            # a step says how many requests it has, a request which one it is
            if of is not None and not (name == "request" and kind in (Kind.STEP, Kind.EXEC)):
                of[:, word] |= here
        if kind == Kind.OUTSIDE:
            found.names[:, 6] |= here & (rows.code(table[:, 0]) == Way.NAME)
    for mask in (found.times, found.steps, found.calls, found.digests, found.names):
        mask &= table > 0
    return found


class Template:
    """One spool of the short run."""

    def __init__(self, path: Path) -> None:
        spool = Spool(path)
        tables = [chunk.copy() for chunk in spool.chunks()]
        table = np.concatenate(tables) if tables else np.empty((0, 8), dtype=np.int64)
        self.trailer = table[rows.kind(table[:, 0]) == Kind.TRAILER]
        self.table: Table = table[rows.kind(table[:, 0]) != Kind.TRAILER]
        self.stem, self.header, self.names = path.stem, spool.header, dict(spool.names)
        told = [(fact, t, value) for fact, t, value in spool.facts]
        self.facts = [one for one in told if one[0] != Fact.CLIENT_ID]
        self.clients = [ClientIdFact.from_json(value) for fact, _, value in told if fact == Fact.CLIENT_ID]
        self.words = _words(self.table)
        self.renamed = np.unique(self.table[self.words.names]).tolist()
        steps = self.table[self.words.steps]
        times = self.table[self.words.times]
        self.steps = int((steps & STEP_MASK).max(initial=0)) + 1
        self.begin, self.end = int(times.min(initial=_MOST)), int(times.max(initial=0))
        self.calls = int(self.table[self.words.calls].max(initial=0)) + 1

    @property
    def requests(self) -> int:
        return int((rows.kind(self.table[:, 0]) == Kind.REQUEST).sum())


class _Out:
    """A spool that is written: whole blocks, each with its seal."""

    def __init__(self, file: BinaryIO, header: Mapping[str, Any]) -> None:
        self._file, head = file, fmt.pack_header(dict(header))
        self._seed = fmt.unpack_header_block(head)[3]
        self._number = 0
        self._held: list[Table] = []
        self._rows = 0
        file.write(head)

    def text(self, announcement: rows.Name | rows.FactRecord, body: bytes) -> None:
        words = np.array([*announcement, *fmt.payload_words(body)], dtype=np.int64)
        self.add(words.reshape(-1, 8))

    def add(self, table: Table) -> None:
        self._held.append(table)
        self._rows += len(table)
        if self._rows >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        table = np.concatenate(self._held)
        for at in range(0, len(table), _BLOCK):
            block = table[at : at + _BLOCK].tobytes()
            self._file.write(block + fmt.seal(block, self._number, self._seed))
            self._number += 1
        self._held, self._rows = [], 0


def _name(ident: int, text: str) -> tuple[rows.Name, bytes]:
    body = text.encode()
    return rows.Name(fmt.pack_head(Kind.NAME), ident, len(body), zlib.crc32(body)), body


def _fact(fact: Fact, t: int, value: object) -> tuple[rows.FactRecord, bytes]:
    body = json.dumps(value, separators=(",", ":")).encode()
    return rows.FactRecord(fmt.pack_head(Kind.FACT, 0, fact), t, len(body), zlib.crc32(body)), body


def _retagged(value: Any, tags: Mapping[int, int]) -> Any:
    """A fact of another engine: tags, and steps that have one, are its own."""
    if isinstance(value, dict):
        return {
            key: tags.get(one, one) if key in ("tag", "engine") and isinstance(one, int)
            else (one & STEP_MASK) | tags.get(one >> STEP_SHIFT, one >> STEP_SHIFT) << STEP_SHIFT
            if key == "step" and isinstance(one, int) and one > STEP_MASK
            else _retagged(one, tags)
            for key, one in value.items()
        }  # fmt: skip
    return [_retagged(one, tags) for one in value] if isinstance(value, list) else value


def repeat(source: Path, target: Path, records: int, engines: int = 1) -> tuple[int, int, int]:
    """Write a run of about so many records with the shape of `source`; (records, requests, spools).

    Args:
        engines: so many times the spools of `source`, side by side.
    """
    found = [Template(path) for path in sorted((source / fmt.SPOOL_DIR).glob(f"*{fmt.SPOOL_SUFFIX}"))]
    per = sum(len(one.table) for one in found)
    times = max(1, round(records / engines / per))
    (target / fmt.SPOOL_DIR).mkdir(parents=True)
    run = json.loads((source / "run.json").read_text(encoding="utf-8"))
    for word in ("crc32", "spools"):
        run.pop(word, None)
    (target / "run.json").write_text(json.dumps(run), encoding="utf-8")
    begin, end = min(one.begin for one in found), max(one.end for one in found)
    steps = max(one.steps for one in found)
    calls = max(one.calls for one in found)
    tags = sorted({int(tag) for one in found for tag in np.unique(one.table[one.words.steps] >> STEP_SHIFT)})
    # Few bits: a step holds 31 of them.
    free = (tag for tag in itertools.count(1) if tag not in tags)
    for engine in range(engines):
        own = {tag: tag if not engine else next(free) for tag in tags}
        for one in found:
            header = dict(one.header)
            for word in ("pid", "ppid"):
                header[word] = header.get(word, 0) + 100_000 * engine
            header["perf_ns"] = header.get("perf_ns", 0) + engine  # so that it is no copy of another one
            header["wall_ns"] = header.get("wall_ns", 0) + engine
            path = target / fmt.SPOOL_DIR / f"{one.stem}-{engine}{fmt.SPOOL_SUFFIX}"
            with open(path, "wb") as file:
                out = _Out(file, header)
                for part in _parts(one, times, engine, own, steps, end - begin + 1_000_000, calls):
                    if isinstance(part, tuple):
                        out.text(*part)
                    else:
                        out.add(part)
                out.add(one.trailer)
                out.flush()
    requests = sum(one.requests for one in found) * times * engines
    return per * times * engines, requests, len(found) * engines


def _parts(
    one: Template, times: int, engine: int, tags: Mapping[int, int], steps: int, ns: int, calls: int
) -> Iterator[Table | tuple[rows.Name | rows.FactRecord, bytes]]:
    """What stands in a spool, in order: texts and tables of records."""
    for ident, text in one.names.items():
        if ident not in one.renamed:
            yield _name(ident, text)
    for fact, t, value in one.facts:
        yield _fact(fact, t, _retagged(value, tags))
    free = max(one.names, default=0) + 1
    table, words = one.table.copy(), one.words
    tag_of = table[words.steps] >> STEP_SHIFT
    moved = np.array([tags[int(tag)] for tag in tag_of.tolist()], dtype=np.int64)
    table[words.steps] += (moved - tag_of) << STEP_SHIFT
    at_name = np.searchsorted(one.renamed, table[words.names])
    digests = table[words.digests]
    table[words.steps] -= steps
    table[words.times] -= ns
    for turn in range(times):
        names = {}
        for place, ident in enumerate(one.renamed):
            text = names[one.names.get(ident, "")] = f"{one.names.get(ident, '')}~{engine}.{turn}"
            yield _name(free + turn * len(one.renamed) + place, text)
        for client in one.clients:
            told = {"engine": names.get(client.engine, client.engine), "client": client.client}
            yield _fact(Fact.CLIENT_ID, one.begin, told)
        table[words.steps] += steps
        table[words.times] += ns
        if turn:
            table[words.calls] += calls
        table[words.names] = free + turn * len(one.renamed) + at_name
        mix = (engine * times + turn) * _ODD & _MOST
        table[words.digests] = np.maximum(digests ^ mix, 1) if mix else digests
        yield table.copy()
