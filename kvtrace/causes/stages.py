"""The stages of a prompt token: how many tokens entered each stage, and how many passed."""

from __future__ import annotations

from kvtrace.causes import trust
from kvtrace.causes.case import Case
from kvtrace.causes.catalogue import STAGES, stage_of
from kvtrace.causes.model import StageRow
from kvtrace.causes.steps import bodies, calls, product
from kvtrace.causes.tables import rows
from kvtrace.ledger.model import SAVED
from kvtrace.words import count, plural


def prompt_tokens(case: Case) -> tuple[float, float]:
    """(saved, computed here and to be saved) tokens of prompts: what was reused, accepted from the
    connector, in flight or not observed is neither."""
    base = case.run.base
    mine = base[base["account"] == SAVED]
    saved = sum(row.prompt / max(1, case.engines[row.engine].pairs) for row in rows(mine))
    return saved, saved + sum(_lost(case).values())


def _lost(case: Case) -> dict[str, float]:
    return {
        ident: sum(n / max(1, case.engines[tag].pairs) for tag, n in booked.prompts.items())
        for ident, booked in case.booked.items()
    }


def stages(case: Case) -> list[StageRow]:
    _, left = prompt_tokens(case)
    lost = [0.0] * len(STAGES)
    for ident, tokens in _lost(case).items():
        lost[stage_of(ident)] += tokens
    notes = _notes(case)
    found = []
    for stage, name in enumerate(STAGES):
        after = left - lost[stage]
        found.append(StageRow(stage, name, round(left), round(after), notes.get(stage, "")))
        left = after
    return found


def _notes(case: Case) -> dict[int, str]:
    run = case.run
    notes: dict[int, str] = {}
    workers = run.workers()
    configured = [engine for engine in run.engines if engine.configured]
    if configured:
        live = sum(bool(worker.connector_live) for worker in workers)
        made = [engine for engine in configured if engine.facts.connector_created is not False]
        where = "in the scheduler" if made else "not in the scheduler"
        notes[0] = f"connector live {where} and in {live}/{len(workers)} workers"
        stores = sum(engine.store_entries for engine in configured)
        with_store = sum(bool(request.entries) for request in case.requests)
        noun = "entry" if stores == 1 else "entries"
        notes[1] = (
            f"{count(stores)} store {noun} in the metadata, for {with_store} of "
            f"{plural(len(case.requests), 'request')}"
        )
    elif run.engines:
        notes[0] = "no connector is configured"
    eligible, bound, _, _ = calls(run, "bind_connector_metadata")
    if configured and eligible:
        notes[2] = f"metadata bound in {count(bound)}/{count(eligible)} worker-steps"
    ran = bodies(run)
    if ran.eligible:
        size = f" ({product(run)})" if product(run) else ""
        notes[3] = f"op body ran in {count(ran.ran)}/{count(ran.eligible)} layer-steps{size}"
    _, fired, work, _ = calls(run, "save_kv_layer")
    if configured:
        notes[4] = f"save_kv_layer called in {count(fired)} layer-steps, in {count(work)} with work"
        notes[5] = trust.stage_note(case.run.trust)
    return notes
