"""The save pipeline: how many prompt tokens entered each stage, and how many passed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtrace.causes.case import Case, unread_steps
from kvtrace.causes.diagnosis import StageRow
from kvtrace.causes.evidence import measured
from kvtrace.causes.evidence.steps import bodies, calls
from kvtrace.causes.outcomes import not_saved
from kvtrace.causes.registry import CATALOGUE
from kvtrace.terms import NOT_OBSERVED, PENDING, Grade, Stage
from kvtrace.trace import hooks
from kvtrace.words import count, plural


@dataclass(frozen=True)
class Prompts:
    """Prompt tokens that were computed here and could be saved. What was reused or accepted from the
    connector is none of them."""

    saved: Mapping[Grade, int]
    sent: Mapping[str, int]  # peer -> of the saved ones, those that were only seen leaving for it
    lost: Mapping[Stage, int]
    declared: int  # of the lost ones, those of which the metadata alone says so
    unseen: int  # not observed
    pending: int = 0  # on their way when the trace ended

    @property
    def known(self) -> int:
        return sum(self.saved.values()) + sum(self.lost.values())


def prompt_tokens(case: Case) -> Prompts:
    """What became of the prompt tokens that were computed here."""
    whole = case.whole
    lost = dict.fromkeys(Stage, 0)
    declared = 0
    for ident, assigned in case.assigned.items():
        stage = CATALOGUE[ident].stage
        assert stage is not None, f"tokens lost by {ident}, which has no stage"
        tokens = whole.prompts.get(not_saved(ident), 0)
        lost[stage] += tokens
        # Other stages are facts of the trace, whatever the metadata says.
        if stage == Stage.SCHEDULE and min(assigned.grades, default=Grade.PROVED) <= Grade.DECLARED:
            declared += tokens
    unseen, pending = (whole.prompts.get(name, 0) for name in (NOT_OBSERVED, PENDING))
    return Prompts(whole.saved, whole.sent, lost, declared, unseen, pending)


def stage_rows(case: Case) -> list[StageRow]:
    """A row for each stage, in order."""
    prompts = prompt_tokens(case)
    remaining, notes = prompts.known, _notes(case, prompts)
    found = []
    for stage in Stage:
        after = remaining - prompts.lost[stage]
        found.append(StageRow(stage, remaining, after, notes.get(stage, "")))
        remaining = after
    return found


def _notes(case: Case, prompts: Prompts) -> dict[Stage, str]:
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
        implied = sum(engine.implied_entries for engine in configured)
        unnamed = f" as far as it is understood, and {count(implied)} more seen to be read" if implied else ""
        notes[Stage.SCHEDULE] = (
            f"{plural(stores - implied, 'store')} in the metadata{unnamed}, for {with_store} of "
            f"{plural(len(case.requests), 'request')}"
        )
    elif run.engines:
        notes[Stage.WIRING] = "no connector is configured"
    eligible, bound, _, _ = calls(run, hooks.BIND_METADATA.name)
    if configured and eligible:
        notes[Stage.BIND] = f"metadata bound in {count(bound)}/{count(eligible)} worker-steps"
    ran = bodies(run)
    if ran.eligible:
        notes[Stage.FORWARD] = ran.share
    _, fired, work, _ = calls(run, hooks.SAVE_LAYER.name)
    if configured:
        implied = sum(engine.implied_entries for engine in configured)
        least = "at least " if any(map(unread_steps, configured)) else ""
        what = f"in {least}{count(work)} with work"
        if implied and not work:
            what = "the metadata, as far as it is understood, names nothing for it"
        notes[Stage.HOOK] = f"save_kv_layer called in {count(fired)} layer-steps, {what}"
        parts = (
            measured.by_grade(prompts.saved),
            measured.sent_to(prompts.sent),
            measured.in_calls(run.trust),
        )
        notes[Stage.EFFECT] = "; ".join(filter(None, parts))
    if prompts.unseen:
        first = notes.get(Stage.WIRING)
        unseen = f"{plural(prompts.unseen, 'more prompt token')} not observed"
        notes[Stage.WIRING] = f"{first}; {unseen}" if first else unseen
    return notes
