"""engine-ended: vLLM's own code raised out of a step, and the engine ended."""

from __future__ import annotations

from kvtrace.causes.rule import FAULT, Case, Cause, Results, Stage
from kvtrace.causes.rules.engine_did_not_start import evidence
from kvtrace.ledger.reported import START_HOOKS
from kvtrace.mend import in_short

CAUSE = Cause(
    id="engine-ended",
    stage=Stage.WIRING,
    severity=FAULT,
    weighs=True,
    meaning=(
        "vLLM raised out of a step, and the engine ended: as an answer of the connector's is not what vLLM "
        "asserts, or for a reason of its own (memory). What was under way then is neither stored nor loaded."
    ),
    seen_as=(
        "An exception that left a step of the engine core, where no hook of a connector's raised. A worker's "
        "own process says there that it failed, and why in its log."
    ),
    remedy=(
        "Read the line of vLLM that the evidence names: an assertion says what it asks of the connector; "
        "another error may follow from an earlier one in the engine's log."
    ),
    about_calls=False,
    live=False,
)
_ASKED = {
    "num_new_tokens > 0": (
        "get_num_new_matched_tokens must leave one token of a prompt to compute, num_tokens - 1 - "
        "num_computed_tokens at most, unless the load is asynchronous"
    ),
    "num_external_computed_tokens > 0": (
        "get_num_new_matched_tokens must answer (0, False) where it finds nothing: no load of 0 tokens is "
        "asynchronous"
    ),
    "req_id in self.requests": (
        "get_finished must name only requests that vLLM still has: those that load, and those for which "
        "request_finished returned True, once each"
    ),
    "request.is_finished()": (
        "get_finished must return (ids whose save is done, ids whose load is done), in this order, and name "
        "as saved only requests that have ended"
    ),
    "kv_connector_metadata is not None": (
        "build_connector_meta must return a KVConnectorMetadata in each step, an empty one too"
    ),
}
"""What vLLM asserts of a connector (``v1/core/sched/scheduler.py``, ``v1/worker/gpu_model_runner.py``,
0.32.0)."""


def rule(case: Case) -> Results:
    ended = case.run.ended_in_steps
    if not ended or any(one.hook not in START_HOOKS for one in case.run.exceptions):
        return  # hook-raised says it
    first = ended[0]
    message = f": {in_short(first.message)}" if first.message else ""
    function = first.where.rpartition(" in ")[2]
    asked = [does for line, does in _ASKED.items() if line in first.message]
    yield case.finding(
        CAUSE,
        f"The engine ended in a step: vLLM raised {first.type}{message}.",
        evidence=[evidence(case, one) for one in ended[:3]],
        remedy=[*asked, CAUSE.remedy],
        headline=f"the engine ended, as vLLM raised {first.type} in {function or 'a step'}",
    )
