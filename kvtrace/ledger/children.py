"""Connectors inside another one (vLLM's MultiConnector), each seen as if it were its engine's only one.

A child's books are kept by the same stages as an engine's, from its own records alone: its hook calls, its
entries of the metadata, the slots that it touched, what left through it, its exceptions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtrace.ledger.run import Connector, Engine
from kvtrace.ledger.scan import SpoolScan, of_a_connector
from kvtrace.ledger.topology import Topology
from kvtrace.trace import facts, rows
from kvtrace.trace.reader import Records

Path = tuple[int, ...]
"""Where a child stands: its number among those inside the same connector, from the outermost one inwards."""

_OF_CONNECTORS = (
    facts.HookExceptionFact, facts.SwallowedFact, facts.LogFact, facts.WatchLimitsFact, facts.ConfigKeysFact,
    facts.UnreadableMetadataFact,
)  # fmt: skip
"""Facts about one connector: ``connector`` is its index, 0 or less where it is not known whose they are."""


@dataclass(frozen=True)
class Child:
    """One connector inside another one.

    Attributes:
        name: its class, with its number where several are of one class, and with the names of those that it
            is nested in.
        engines: those that have it, with it as their connector.
        indexes: spool -> its objects' indexes there.
    """

    name: str
    engines: tuple[Engine, ...]
    indexes: Mapping[str, frozenset[int]]

    def within(self, who: Topology) -> Topology:
        """Its engines alone."""
        workers = {worker.key: worker for engine in self.engines for worker in engine.workers}
        here = tuple(workers[one.key] for one in who.workers if one.key in workers)
        return replace(who, engines=self.engines, workers=here)

    def records(self, scan: SpoolScan) -> SpoolScan:
        """A spool without what other children did."""
        own = self.indexes.get(scan.name, frozenset())
        everyone = scan.of_everyone
        mine = np.isin(rows.detail(everyone[:, 0]), list(own))
        return replace(
            scan,
            documents=[(t, fact) for t, fact in scan.documents if _concerns(fact, own)],
            of_requests=everyone[mine | ~of_a_connector(everyone)],
            unreadable={index: steps for index, steps in scan.unreadable.items() if index in own},
            effects=_only(scan.effects, own),
            slots=_only(scan.slots, own),
            states=_only(scan.states, own),
            outside=_only(scan.outside, own),
            hooks_of=own,
        )


def children(
    engines: Sequence[Engine], known: Sequence[Connector], scans: Sequence[SpoolScan]
) -> list[Child]:
    """The children of all engines' connectors, in order; none of those that hold one connector alone, and
    none where the spools are of a kvtrace that did not tell them apart."""
    if all(len(scan.of_everyone) == len(scan.of_requests) for scan in scans):
        return []
    inside: dict[tuple[str, int], list[Connector]] = defaultdict(list)
    for one in sorted(known, key=lambda one: one.ordinal):
        if one.parent is not None and one.ok:
            inside[one.spool, one.parent].append(one)
    found: dict[tuple[Path, str], list[Engine]] = defaultdict(list)
    indexes: dict[tuple[Path, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for engine in engines:
        tops = [engine.connector, *(worker.connector for worker in engine.workers)]
        leaves = [{} if top is None else _leaves(top, inside) for top in tops]
        paths = {path: names for one in reversed(leaves) for path, (names, _) in one.items()}
        for path, names in sorted(paths.items()) if len(paths) > 1 else ():
            key = path, " > ".join(names)
            its = [one[path][1] if path in one else None for one in leaves]
            found[key].append(_engine_of(engine, path, its))
            for one in filter(None, its):
                indexes[key][one.spool].add(one.ordinal & rows.MOST_DETAIL)
    times = Counter(name for _, name in found)
    return [
        Child(
            name=name if times[name] == 1 else f"{name} #{'.'.join(str(at + 1) for at in path)}",
            engines=tuple(of),
            indexes={spool: frozenset(here) for spool, here in indexes[path, name].items()},
        )
        for (path, name), of in found.items()
    ]


def outermost(scan: SpoolScan, known: Sequence[Connector]) -> SpoolScan:
    """A spool without the hook calls of connectors inside others: those that vLLM itself makes."""
    inner = {
        one.ordinal & rows.MOST_DETAIL for one in known if one.spool == scan.name and one.parent is not None
    }
    return replace(scan, hooks_of=frozenset(range(rows.MOST_DETAIL + 1)) - inner)


def _leaves(
    top: Connector, inside: Mapping[tuple[str, int], Sequence[Connector]]
) -> dict[Path, tuple[tuple[str, ...], Connector]]:
    """Path -> names on the way and the connector there, of those that hold no other one."""
    found: dict[Path, tuple[tuple[str, ...], Connector]] = {}
    for at, one in enumerate(inside.get((top.spool, top.ordinal), ())):
        name = one.cls or "connector"
        for path, (names, leaf) in _leaves(one, inside).items():
            longer = at, *path
            found[longer] = (name, *names), leaf
        if (one.spool, one.ordinal) not in inside:
            found[(at,)] = (name,), one
    return found


def _engine_of(engine: Engine, path: Path, its: Sequence[Connector | None]) -> Engine:
    """An engine with a child as its connector. ``its``: the scheduler's object, then the workers'."""
    workers = tuple(
        replace(worker, connector=one or worker.connector)
        for worker, one in zip(engine.workers, its[1:], strict=True)
    )
    configured: facts.KvTransfer | None = engine.facts.kv_transfer
    for at in path:
        configured = _configured(configured, at)
    return replace(
        engine, connector=its[0], workers=workers, facts=replace(engine.facts, kv_transfer=configured)
    )


def _configured(outer: facts.KvTransfer | None, at: int) -> facts.KvTransfer | None:
    """A child's part of the configuration: one of ``connectors`` in kv_connector_extra_config."""
    parts: Any = outer.extra.get("connectors") if outer else None
    if not isinstance(parts, (list, tuple)) or at >= len(parts) or not isinstance(parts[at], Mapping):
        return outer
    part = parts[at]
    extra = part.get("kv_connector_extra_config")
    return facts.KvTransfer(
        connector=part.get("kv_connector"),
        role=part.get("kv_role"),
        module_path=part.get("kv_connector_module_path"),
        extra=extra if isinstance(extra, Mapping) else {},
    )


def _only(table: Records, indexes: frozenset[int]) -> Records:
    """The records of some connectors."""
    result: Records = table[np.isin(rows.detail(table[:, 0]), list(indexes))]
    return result


def _concerns(fact: facts.Document, indexes: frozenset[int]) -> bool:
    if not isinstance(fact, _OF_CONNECTORS):
        return True
    return fact.connector <= 0 or fact.connector & rows.MOST_DETAIL in indexes
