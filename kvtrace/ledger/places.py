"""Where the connectors' writes went, as people name it: directories (of shared memory too), databases, peers.

From the OUTSIDE records of the workers, and what lay at those paths when the run was over.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvtrace.ledger.run import Engine, Place
from kvtrace.ledger.scan import SpoolScan
from kvtrace.trace import rows
from kvtrace.trace.format import Way
from kvtrace.trace.rest_file import RestFile, RestingFile, by_directory

DIRECTORY, DATABASE, PEERS, CONFIGURED = "directory", "database", "peer", "configured"
_KIND = {Way.FILE: DIRECTORY, Way.SHARED_MEMORY: DIRECTORY, Way.SQLITE: DATABASE, Way.SOCKET: PEERS}
_LEAST_SIZE = 4096
"""Bytes of a directory's files that may hold KV."""
_LEAST_SENT = 0.001
"""Of what another peer got: one that got less was sent no KV, but questions and acknowledgements."""


@dataclass
class _Wrote:
    """Bytes that were written there, and the tags of the engines whose workers did."""

    size: int = 0
    engines: set[int] = field(default_factory=set)

    def add(self, size: int, engines: Iterable[int]) -> None:
        self.size += size
        self.engines.update(engines)


def places(scans: Sequence[SpoolScan], engines: Sequence[Engine], rest: RestFile) -> list[Place]:
    """The places that were written to, those with most files first; then what the configuration names, where
    nothing was written to any place."""
    tags: dict[str, set[int]] = defaultdict(set)  # of each worker's spool
    for engine in engines:
        for worker in engine.workers:
            tags[worker.spool].add(engine.tag)
    wrote: dict[tuple[str, str], _Wrote] = defaultdict(_Wrote)
    for scan in scans:
        if scan.name in tags:
            for kind, target, size in _written(scan):
                wrote[kind, target].add(size, tags[scan.name])
    roots = [path for engine in engines for path in configured_paths(engine.extra)]
    lies = {one.path: one for one in rest.files}
    found = [*_directories(wrote, roots, lies), *_others(wrote, lies)]
    found = [replace(one, older=_older(one.name, rest)) for one in found]
    if found:
        return sorted(found, key=lambda one: (-one.files, -one.size, one.name))
    return [Place(CONFIGURED, path) for path in dict.fromkeys(roots)]


def _older(place: str, rest: RestFile) -> int:
    """Files from before the run in a directory. What was counted in one that holds it may be another's."""
    name = os.path.normpath(os.path.expanduser(place)) + "/"
    return sum(one.files for one in rest.older if f"{one.directory}/".startswith(name))


def _written(scan: SpoolScan) -> Iterable[tuple[str, str, int]]:
    wrote = rows.columns(rows.Outside, scan.outside)
    of, place = np.unique(
        np.stack([rows.code(wrote.head), wrote.target], axis=1), axis=0, return_inverse=True
    )
    sizes = np.zeros(len(of), dtype=np.int64)
    np.add.at(sizes, place.reshape(-1), np.clip(wrote.bytes, 0, None))
    for (way, target), size in zip(of.tolist(), sizes.tolist(), strict=True):
        name, kind = scan.names.get(target, ""), _KIND.get(way, "")
        if name and kind:
            yield kind, name, size


def _directories(
    wrote: Mapping[tuple[str, str], _Wrote], roots: Sequence[str], lies: Mapping[str, RestingFile]
) -> Iterable[Place]:
    """Files by the configured directory that they lie in, else by the one that all others share."""
    files: dict[str, list[str]] = defaultdict(list)
    loose: list[str] = []
    whole = {root: os.path.normpath(os.path.expanduser(root)).rstrip("/") + "/" for root in roots}
    for kind, path in wrote:
        if kind == DIRECTORY:
            # "~" stands for the user's home in a record, as it may in a configuration
            here = (os.path.expanduser(path) if path.startswith("~") else path) + "/"
            root = next((root for root, of in whole.items() if here.startswith(of)), None)
            (loose if root is None else files[root]).append(path)
    for root, alike in by_directory(loose):
        files[root] += alike
    for root, inside in files.items():
        there = [path for path in inside if path not in lies or lies[path].exists is not False]
        sizes = [lies[path].size if path in lies else None for path in there]
        size = sum(
            wrote[DIRECTORY, path].size if n is None else n for path, n in zip(there, sizes, strict=True)
        )
        by = frozenset().union(*(wrote[DIRECTORY, path].engines for path in inside))
        if 0 < size < _LEAST_SIZE:
            continue  # a line of a log
        yield Place(DIRECTORY, root, len(there), size, by)


def _others(wrote: Mapping[tuple[str, str], _Wrote], lies: Mapping[str, RestingFile]) -> Iterable[Place]:
    most = max((one.size for (kind, _), one in wrote.items() if kind == PEERS), default=0)
    for (kind, name), one in wrote.items():
        if kind != DIRECTORY and not (kind == PEERS and one.size < most * _LEAST_SENT):
            size = (lies[name].size if name in lies else None) or one.size
            yield Place(kind, name, size=size, engines=frozenset(one.engines))


def configured_paths(value: Any, depth: int = 0) -> list[str]:
    """Absolute paths and peers (``redis://host:6379``) that stand in a connector's configuration."""
    if isinstance(value, str):
        return [value] if value.startswith(("/", "~/")) or "://" in value else []
    if depth < 6 and isinstance(value, Mapping):
        return [path for inner in value.values() for path in configured_paths(inner, depth + 1)]
    if depth < 6 and isinstance(value, (list, tuple)):
        return [path for inner in value for path in configured_paths(inner, depth + 1)]
    return []
