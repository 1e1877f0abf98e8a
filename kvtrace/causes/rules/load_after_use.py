"""load-after-use: the attention of a layer ran before its load was waited for."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS, Cause
from kvtrace.causes.evidence import loads
from kvtrace.causes.model import Results
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.terms import FAULT
from kvtrace.words import of_all, plural

CAUSE = Cause(
    id="load-after-use",
    stage=None,
    severity=FAULT,
    ledger=LOADS,
    meaning="The attention of a layer ran before its load was waited for.",
    seen_as=(
        "Host times in the step of the load: the attention body began before start_load_kv returned or "
        "before wait_for_layer_load of its layer was called; the layer was not waited for, as others of "
        "the step were; or it ran in a FULL graph, which waits for nothing, under a connector that loads "
        "layer by layer (this last one is not yet seen live)."
    ),
    remedy=(
        "A layer past vLLM's attention op needs a connector that loads all layers in start_load_kv. With "
        "graphs: cudagraph_mode PIECEWISE, and requires_piecewise_for_cudagraph overridden in a connector "
        "that loads layer by layer (from 0.17.1)."
    ),
    load_ends=(LoadEnd.USED_BEFORE,),
)


def rule(case: Case) -> Results:
    sync = [row for row in loads.accepted(case) if not row.asynchronous]
    mine = loads.not_loaded(case, CAUSE.id)
    if mine:
        tokens = sum(loads.tokens_of(case, row, NOT_LOADED + CAUSE.id) for row in mine)
        yield loads.finding(
            case, CAUSE, NOT_LOADED + CAUSE.id,
            f"Attention ran over {plural(tokens, 'token')} before their KV was waited for "
            f"({of_all(len(mine), len(sync), 'load')}).",
            evidence=loads.seen(mine, CAUSE.id),
            headline="attention ran before the loaded KV was there",
        )  # fmt: skip
    elif sync:
        yield CAUSE.ruled_out(
            f"in the steps of {plural(len(sync), 'load')} no attention body began before its load hook",
        )
