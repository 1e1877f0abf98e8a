"""metadata-not-bound: the forward of a real step ran without connector metadata."""

from __future__ import annotations

from kvtrace.causes.evidence.steps import calls, skipped
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Interval, LostSpan, Results, SaveEnd, Stage, Turn
from kvtrace.causes.rules.stored_nothing import idle_steps
from kvtrace.versions import since
from kvtrace.words import count, plural

CAUSE = Cause(
    id="metadata-not-bound",
    stage=Stage.BIND,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The forward ran while the connector had no metadata bound: vLLM then skips the layer hooks "
        "silently. Dummy, profile and warm-up runs do not count."
    ),
    seen_as=(
        "has_connector_metadata() is false at the attention op in a real step. Where it is in every one, "
        "also what no readable metadata names: nothing was read in its steps."
    ),
    remedy=(
        "If the connector overrides bind_connector_metadata, clear_connector_metadata or "
        "has_connector_metadata, call super() there."
    ),
    versions=since("0.11.1"),
    save_ends=(SaveEnd.NOT_BOUND,),
)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Positions of a step whose metadata says nothing readable, of an engine that never had any bound."""
    never = case.once(("never bound", span.engine), lambda: _never_bound(case, span.engine))
    return unclaimed if never and idle_steps(case, span) else []


def _never_bound(case: Case, tag: int) -> bool:
    seen = {one.skip for one in case.run.skips if one.engine == tag and one.layer_steps}
    return "NO_CONNECTOR_METADATA" in seen and "HOOKED" not in seen


CLAIMS = {Turn.WORKER: claim}


def rule(case: Case) -> Results:
    run = case.run
    unbound = skipped(run, "NO_CONNECTOR_METADATA")
    hooked = skipped(run, "HOOKED")
    steps, bound, _, _ = calls(run, "bind_connector_metadata")
    # The same calls show metadata that was bound and then cleared too early, which is another cause.
    if case.affected(CAUSE) or (unbound and SaveEnd.CLEARED not in case.ends):
        overriding = sorted(
            {
                f"{c.cls}.{name}"
                for c in run.connectors
                for name in c.overrides
                if name in ("bind_connector_metadata", "clear_connector_metadata") and c.role == "worker"
            }
        )
        evidence = [
            f"{count(unbound)} attention calls in real steps ran while has_connector_metadata() was false, "
            f"{count(hooked)} with metadata; bind_connector_metadata was called in {bound}/{steps} steps"
        ]
        if overriding:
            evidence.append(
                f"overridden by the connector: {', '.join(overriding)} (is super() called there?)"
            )
        lost = len(case.affected(CAUSE))
        yield case.finding(
            CAUSE,
            "The forward ran without the connector's metadata, so vLLM skipped its layer hooks silently"
            + (f": {plural(lost, 'request')} with KV to store lost it." if lost else "."),
            evidence=evidence,
            headline="the connector's metadata was not bound when the forward ran",
        )
    elif hooked and not unbound:
        yield CAUSE.ruled_out(
            f"metadata was bound at {count(hooked)}/{count(hooked)} attention calls of real steps"
        )
