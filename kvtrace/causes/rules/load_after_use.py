"""load-after-use: the attention of a layer ran before its KV was loaded."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import FAULT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.ledger.loads.decide import STEPS_LATER, TOO_LATE, WRITTEN_AFTER_USE
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.words import of_all, plural

CAUSE = Cause(
    id="load-after-use",
    severity=FAULT,
    ledger=LOADS,
    wrong_data=True,
    meaning="The attention of a layer ran before its KV was loaded.",
    seen_as=(
        "Host times in the step of the load: the attention body began before start_load_kv returned or "
        "before wait_for_layer_load of its layer was called; the layer was not waited for, as others of "
        "the step were; its slots were written only after that, by work that was asked for in that step, or "
        "by a load in the background that was reported as finished; or "
        "it ran in a FULL graph, which waits for nothing, under a connector that loads layer by layer (this "
        "last one is not yet seen live). Or, by the fingerprints, whoever was to write: when attention used "
        "the blocks they held what they had held before, and some steps later, while they were given to "
        "nobody else, other KV; or they held what is not theirs, and later what their tokens compute to."
    ),
    remedy=(
        "Load all layers in start_load_kv where a layer does not pass vLLM's attention op. With graphs, "
        "override requires_piecewise_for_cudagraph in a connector that loads layer by layer (from vLLM "
        "0.17.1); or set cudagraph_mode to PIECEWISE for the whole engine, which makes decode steps slower."
    ),
    load_ends=(LoadEnd.USED_BEFORE,),
)


_WRITTEN_LATE = frozenset({TOO_LATE, WRITTEN_AFTER_USE})
_WAITED_TOO_SHORT = (
    "Let wait_for_layer_load return only once its own layer is written (or start_load_kv, once all are): "
    "attention was told to wait, and what it waited for was written later."
)
_A_STEP_TOO_LATE = (
    "Put each load into the metadata of the step that schedules its request, and load it in that step's "
    "start_load_kv: it was written in a later step than the one that used it."
)


def rule(case: Case) -> Results:
    accepted = loads.accepted(case)
    sync = [row for row in accepted if not row.asynchronous]
    early = loads.affected(case, CAUSE)
    if early:
        yield loads.finding(
            case,
            CAUSE,
            f"Attention ran over {plural(loads.tokens(case, early, CAUSE), 'token')} before their KV was "
            f"there ({of_all(len(early), len(accepted), 'load')}).",
            evidence=loads.reasons_and_places(case, early, CAUSE),
            headline="attention ran before the loaded KV was there",
            remedy=_remedy(early),
        )
    elif sync and all(row.measured and row.begun and loads.came(case, row) for row in sync):
        yield CAUSE.ruled_out(
            f"in the steps of {plural(len(sync), 'load')} no attention body began before its load hook, and "
            "the slots were written there"
        )
    elif unseen := [row for row in sync if not (row.measured and row.begun)]:
        yield CAUSE.not_observed(
            "when the loaded KV was written, or attention began, was not seen for "
            f"{of_all(len(unseen), len(sync), 'load')}"
        )


def _remedy(early: list[LoadOf]) -> list[str]:
    if told := loads.told_early(early):
        return told
    reasons = [frozenset(row.reasons.get(LoadEnd.USED_BEFORE, ())) for row in early]
    return [
        *([_A_STEP_TOO_LATE] if any(STEPS_LATER in said for said in reasons) else []),
        *([_WAITED_TOO_SHORT] if any(_WRITTEN_LATE & said for said in reasons) else []),
        *([] if all((_WRITTEN_LATE | {STEPS_LATER}) & said for said in reasons) else [CAUSE.remedy]),
    ]
