"""layer-not-hooked: layers that own KV and whose hooks never fire."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.causes.steps import calls
from kvtrace.words import count, listed, plural

ID = "layer-not-hooked"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    run = case.run
    hooks = run.hooks[(run.hooks["hook"] == "save_kv_layer") & (run.hooks["rank"] >= 0)]
    silent: list[str] = []
    owning = 0
    for worker in run.workers():
        if worker.connector_live is False or not worker.steps:
            continue
        rows = hooks[(hooks["engine"] == worker.engine) & (hooks["pid"] == worker.pid)]
        # In a step in which a hook raised, the layers after it never ran.
        whole = worker.steps - int(rows["raised"].sum())
        if whole <= 0:
            continue
        fired = {row.layer: int(row.fired) for row in rows.itertuples() if row.layer in set(worker.kv_layers)}
        owning += len(worker.kv_layers)
        if any(fired.values()):
            silent += [layer for layer in worker.kv_layers if not fired.get(layer)]
    if ID not in case.booked and "metadata-cleared-early" in case.booked:
        return  # these layers have their hooks: the metadata was gone when they ran
    if ID in case.booked or silent:
        layers = listed(dict.fromkeys(silent)) if silent else "layers without a hook"
        yield case.finding(
            ID,
            f"{plural(len(set(silent)), 'layer')} with KV {'pass' if len(set(silent)) > 1 else 'passes'} no "
            f"connector hook: {layers}."
            if silent
            else "Layers that own KV passed no connector hook in steps with a store entry.",
            evidence=[
                f"save_kv_layer fired on {count(owning - len(silent))} of {count(owning)} layers and ranks"
            ],
            events=case.events(ID, "a store entry, and no hook in this layer"),
            headline="some layers pass no connector hook",
        )
        return
    eligible, fired_all, work, _ = calls(run, "save_kv_layer")
    if eligible and fired_all == eligible:
        yield RuledOut(
            ID,
            f"save_kv_layer was called in {count(fired_all)}/{count(eligible)} layer-steps, "
            f"{count(work)} of them with work",
        )
