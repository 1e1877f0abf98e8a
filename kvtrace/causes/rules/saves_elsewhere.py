"""saves-elsewhere: a note that save_kv_layer is empty by design."""

from __future__ import annotations

from kvtrace.causes.rule import NOTE, Case, Cause, Results, Stage
from kvtrace.words import listed

CAUSE = Cause(
    id="saves-elsewhere",
    stage=Stage.HOOK,
    severity=NOTE,
    asks=False,
    meaning=(
        "Not a fault: save_kv_layer does nothing in this connector. It saves in wait_for_save or later, if "
        "it saves at all."
    ),
    seen_as="The body of save_kv_layer only returns.",
    remedy="Nothing to do.",
)


def rule(case: Case) -> Results:
    empty = [w.connector for w in case.run.workers() if w.connector and not w.connector.saves_per_layer]
    if not empty or "role-does-not-save" in case.assigned or any(one.without_kv for one in empty):
        return
    also = ["wait_for_save"] if all("wait_for_save" in connector.noop for connector in empty) else []
    place = "neither does wait_for_save" if also else "it saves in wait_for_save or later"
    yield case.finding(
        CAUSE,
        f"save_kv_layer does nothing in {listed(c.cls for c in empty)}: {place}.",
        evidence=[f"empty body in {listed(c.module for c in empty)}: {listed(['save_kv_layer', *also])}"],
    )
