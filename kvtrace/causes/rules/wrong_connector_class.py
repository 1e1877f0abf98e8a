"""wrong-connector-class: another class than the configured one is live, or two copies of it."""

from __future__ import annotations

from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, Stage
from kvtrace.ledger.run import Connector, Engine
from kvtrace.trace.facts import KvTransfer
from kvtrace.words import listed

CAUSE = Cause(
    id="wrong-connector-class",
    stage=Stage.WIRING,
    severity=FAULT,
    ledger=SAVES,
    meaning="Another class or module than the configured one is live: two installations, or a bundled copy.",
    seen_as="The class, module and file of the live connector in each process.",
    remedy=(
        "Set kv_connector_module_path, and remove the copy that you do not want (pip uninstall, or take "
        "its folder out of PYTHONPATH)."
    ),
)


def rule(case: Case) -> Results:
    agree: list[Connector] = []
    known = True
    for engine in case.run.engines:
        if engine.configured is None:
            continue
        live = [engine.connector, *(worker.connector for worker in engine.workers)]
        made = [connector for connector in live if connector is not None and connector.ok]
        known = known and len(made) == len(live)
        wrong = [connector for connector in made if connector.resolves is False]
        if wrong:
            yield _other_class(case, wrong[0], engine.configured)
        elif len(files := _files(made)) > 1:
            yield _two_copies(case, engine, files)
        elif all(_agrees(connector, engine.configured) for connector in made):
            agree += made
            continue
        known = False
    if known and agree:
        names = listed(f"{c.module}.{c.cls}" for c in agree)
        yield CAUSE.ruled_out(f"{names} is live in {len(agree)}/{len(agree)} places, as configured")


def _agrees(connector: Connector, configured: KvTransfer) -> bool:
    path = configured.module_path
    return connector.cls == configured.connector and (not path or connector.module == path)


def _files(made: list[Connector]) -> dict[str, list[str]]:
    """File -> where it is live, if every connector's file is known."""
    files: dict[str, list[str]] = {}
    for connector in made:
        files.setdefault(connector.file, []).append(f"{connector.role} of process {connector.pid}")
    return {} if "" in files else files


def _other_class(case: Case, live: Connector, configured: KvTransfer) -> Finding:
    asked = f"{configured.module_path}.{configured.connector}"
    return case.finding(
        CAUSE,
        f"{live.module}.{live.cls} is live; configured is {asked}.",
        evidence=[f"the live class is of {live.file or 'an unknown file'}"],
        headline="another connector class than the configured one was live",
    )


def _two_copies(case: Case, engine: Engine, files: dict[str, list[str]]) -> Finding:
    name = engine.connector.cls if engine.connector is not None else "the connector"
    return case.finding(
        CAUSE,
        f"{len(files)} copies of {name} are live in one engine.",
        evidence=[f"{file}: {listed(sorted(set(places)))}" for file, places in sorted(files.items())],
        headline="the roles of one engine run different copies of the connector",
    )
