"""engine-did-not-start: vLLM ended before an engine could take a request."""

from __future__ import annotations

from kvtrace.causes.rule import FAULT, Case, Cause, Results, Stage
from kvtrace.ledger.run import StartFailure
from kvtrace.mend import in_short, remedy

CAUSE = Cause(
    id="engine-did-not-start",
    stage=Stage.WIRING,
    severity=FAULT,
    weighs=True,
    meaning=(
        "vLLM ended before an engine could take a request: it refused the command line or its "
        "configuration, or its engine core or a worker raised. vLLM's last words are often only that the "
        "engine core did not start."
    ),
    seen_as=(
        "The exception with which vLLM's configuration, its engine core or a worker ended, or what its "
        "parser said, in a run in which no engine made a step. Not where the connector itself raised as it "
        "was made: that is connector-failed-to-start."
    ),
    remedy=(
        "Mend what the message names. kvtrace doctor -- COMMAND looks at the command line and at the "
        "connector's class without starting the engine."
    ),
    about_calls=False,
)
_WHERE = {
    "command line": "vLLM refused the command line",
    "configuration": "vLLM refused its configuration",
    "engine core": "the engine core raised",
    "LLM": "LLM() raised",
}
_DOCTOR = "look at the command and the connector without starting an engine: kvtrace doctor -- COMMAND"


def rule(case: Case) -> Results:
    ran = any(engine.real_steps for engine in case.run.engines)
    failures = case.run.start_failures
    if ran or not failures or any(not one.ok for one in case.run.connectors):
        return
    first = failures[0]
    said = what(first)
    mend = remedy(first.message)
    yield case.finding(
        CAUSE,
        f"The engine did not start: {said}.",
        evidence=[evidence(case, one) for one in failures[:3]],
        remedy=[
            mend or "mend what the message names" + (f" ({first.where})" if first.where else ""),
            _DOCTOR,
        ],
        headline=f"the engine did not start: {said}",
    )


def what(failure: StartFailure) -> str:
    """``vLLM refused the command line: KVTransferConfig has no key 'kv_rolle'``."""
    where = _WHERE.get(failure.stage, f"{failure.stage} of a worker raised")
    kind = f" {failure.type}" if failure.type and where.endswith("raised") else ""
    return f"{where}{kind}: {in_short(failure.message)}".rstrip(" .:")


def evidence(case: Case, failure: StartFailure) -> str:
    names = {process.pid: process.name for process in case.run.processes}
    at = f" (at {failure.where})" if failure.where else ""
    error = ": ".join(filter(None, (failure.type, failure.message)))
    return f"{names.get(failure.pid, 'process')}, pid {failure.pid}: {error}{at}"
