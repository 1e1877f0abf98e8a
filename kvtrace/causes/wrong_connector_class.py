"""wrong-connector-class: only its rule-out, where configured and live names agree everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import RuledOut
from kvtrace.causes.words import listed
from kvtrace.ledger.model import Connector

ID = "wrong-connector-class"


def rule(case: Case) -> Iterator[RuledOut]:
    live: list[tuple[Connector, dict[str, object]]] = []
    for engine in case.run.engines:
        if engine.configured is None:
            continue
        for connector in (engine.connector, *(worker.connector for worker in engine.workers)):
            if connector is None:
                return
            live.append((connector, dict(engine.configured)))
    if live and all(_agrees(connector, configured) for connector, configured in live):
        names = listed(f"{c.module}.{c.cls}" for c, _ in live)
        yield RuledOut(ID, f"{names} is live in {len(live)}/{len(live)} places, as configured")


def _agrees(connector: Connector, configured: dict[str, object]) -> bool:
    path = configured.get("module_path")
    return connector.cls == configured.get("connector") and (not path or connector.module == path)
