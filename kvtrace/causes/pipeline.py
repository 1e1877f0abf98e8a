"""The save pipeline: how many prompt tokens entered each stage, and how many passed it."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.evidence import measured
from kvtrace.causes.evidence.steps import bodies, calls, product
from kvtrace.causes.model import StageRow
from kvtrace.causes.registry import CATALOGUE
from kvtrace.causes.tables import rows
from kvtrace.terms import SAVED, Stage
from kvtrace.trace import hooks
from kvtrace.words import count, plural


def prompt_tokens(case: Case) -> tuple[float, float]:
    """(saved, computed here and to be saved) tokens of prompts: what was reused, accepted from the
    connector, in flight or not observed is neither."""
    base = case.run.base
    kept = base[base["outcome"] == SAVED]
    saved = sum(row.prompt / max(1, case.engines[row.engine].pairs) for row in rows(kept))
    return saved, saved + sum(_lost(case).values())


def _lost(case: Case) -> dict[Stage, float]:
    """Prompt tokens lost at each stage."""
    lost = dict.fromkeys(Stage, 0.0)
    for ident, assigned in case.assigned.items():
        stage = CATALOGUE[ident].stage
        assert stage is not None, f"tokens lost by {ident}, which has no stage"
        lost[stage] += sum(n / max(1, case.engines[tag].pairs) for tag, n in assigned.prompts.items())
    return lost


def stage_rows(case: Case) -> list[StageRow]:
    """A row for each stage, in order."""
    _, left = prompt_tokens(case)
    lost, notes = _lost(case), _notes(case)
    found = []
    for stage in Stage:
        after = left - lost[stage]
        found.append(StageRow(stage, round(left), round(after), notes.get(stage, "")))
        left = after
    return found


def _notes(case: Case) -> dict[Stage, str]:
    run = case.run
    notes: dict[Stage, str] = {}
    workers = run.workers()
    configured = [engine for engine in run.engines if engine.configured]
    if configured:
        live = sum(bool(worker.connector_live) for worker in workers)
        made = [engine for engine in configured if engine.facts.connector_created is not False]
        where = "in the scheduler" if made else "not in the scheduler"
        notes[Stage.WIRING] = f"connector live {where} and in {live}/{len(workers)} workers"
        stores = sum(engine.store_entries for engine in configured)
        with_store = sum(bool(request.entries) for request in case.requests)
        noun = "entry" if stores == 1 else "entries"
        notes[Stage.SCHEDULE] = (
            f"{count(stores)} store {noun} in the metadata, for {with_store} of "
            f"{plural(len(case.requests), 'request')}"
        )
    elif run.engines:
        notes[Stage.WIRING] = "no connector is configured"
    eligible, bound, _, _ = calls(run, hooks.BIND_METADATA.name)
    if configured and eligible:
        notes[Stage.BIND] = f"metadata bound in {count(bound)}/{count(eligible)} worker-steps"
    ran = bodies(run)
    if ran.eligible:
        notes[Stage.FORWARD] = f"{ran.share}{product(run)}"
    _, fired, work, _ = calls(run, hooks.SAVE_LAYER.name)
    if configured:
        notes[Stage.HOOK] = f"save_kv_layer called in {count(fired)} layer-steps, in {count(work)} with work"
        notes[Stage.EFFECT] = measured.stage_note(case.run.trust)
    return notes
