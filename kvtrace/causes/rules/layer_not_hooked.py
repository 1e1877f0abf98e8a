"""layer-not-hooked: layers that own KV and whose hooks never fire."""

from __future__ import annotations

from kvtrace.causes.case import unread_steps
from kvtrace.causes.evidence.steps import calls
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import count, listed, plural

CAUSE = Cause(
    id="layer-not-hooked",
    stage=Stage.FORWARD,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The layer owns KV, but its forward passes no connector hook (custom attention, indexer, Mamba and "
        "linear attention, some fused ops)."
    ),
    seen_as="Layers that own KV and whose hooks never fired.",
    remedy="This model needs a connector that takes the KV in wait_for_save from the registered caches.",
    save_ends=(SaveEnd.NO_HOOK,),
)


def rule(case: Case) -> Results:
    run = case.run
    hooks = [row for row in run.hooks if row.hook == "save_kv_layer" and row.rank >= 0]
    silent: list[str] = []
    owning = 0
    for worker in run.workers():
        if worker.connector_live is False or not worker.steps:
            continue
        own = [row for row in hooks if (row.engine, row.pid) == (worker.engine, worker.pid)]
        # In a step in which a hook raised, the layers after it never ran.
        steps = worker.steps - sum(row.raised for row in own)
        if steps <= 0:
            continue
        fired = {row.layer: row.fired for row in own}
        owning += len(worker.kv_layers)
        if any(fired.values()):
            silent += [layer for layer in worker.kv_layers if not fired.get(layer)]
    if not case.affected(CAUSE) and SaveEnd.CLEARED in case.ends:
        return  # these layers have their hooks: the metadata was gone when they ran
    if case.affected(CAUSE) or silent:
        layers = listed(dict.fromkeys(silent)) if silent else "layers without a hook"
        yield case.finding(
            CAUSE,
            f"{plural(len(set(silent)), 'layer')} with KV {'pass' if len(set(silent)) > 1 else 'passes'} "
            f"no connector hook: {layers}."
            if silent
            else "Layers that own KV passed no connector hook in steps with KV to store.",
            evidence=[
                f"save_kv_layer fired on {count(owning - len(silent))} of {count(owning)} layers and ranks"
            ],
            headline="some layers pass no connector hook",
        )
        return
    eligible, fired_all, work, _ = calls(run, "save_kv_layer")
    if eligible and fired_all == eligible:
        least = "at least " if any(map(unread_steps, run.engines)) else ""
        yield CAUSE.ruled_out(
            f"save_kv_layer was called in {count(fired_all)}/{count(eligible)} layer-steps, "
            f"{least}{count(work)} of them with work"
        )
