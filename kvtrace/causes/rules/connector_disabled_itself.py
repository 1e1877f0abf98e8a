"""connector-disabled-itself: no store in the whole run, and the connector says why."""

from __future__ import annotations

import re

from kvtrace.causes.evidence.logs import log_line, of_engine, shortened
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.run import Engine, LogLine
from kvtrace.words import count, plural

CAUSE = Cause(
    id="connector-disabled-itself",
    stage=Stage.WIRING,
    severity=FAULT,
    ledger=SAVES,
    meaning="The connector switched itself off (missing option, prefix caching off, unhealthy backend).",
    seen_as=(
        "No store entry and no lookup hit in the whole run, and a warning logged by the connector that "
        "says so, or, while it was made, that it goes on without what it saves to."
    ),
    remedy="Fix what its log line names.",
    about_calls=False,
)

_OFF = re.compile(
    r"\b(disabl\w*|inactive|deactivat\w*|(turn|switch)(ed|ing) (itself )?off|not (be "
    r")?(enabled|active)|unhealthy"
    r"|will not (be )?(sav|stor|offload)\w*|no-?op)\b",
    re.IGNORECASE,
)
_WHAT = re.compile(
    r"(connector|sav(e|ing)|stor(e|ing|age)|offload|backend|kv cache|kv transfer)", re.IGNORECASE
)
_LACKS = re.compile(
    r"\b(fall(s|ing)? back to (recomput\w+|no\b|none\b|local)|without (a |an |any |the )?(external |remote )?"
    r"(connector|stor(e|age)|backend|offload\w*|sav(e|ing)|kv cache|kv transfer|persist\w*)"
    r"|(stor(e|age)|backend|server|device|pool) (is |was )?(not (found|available|reachable|configured|given)"
    r"|unavailable|unreachable|missing))",
    re.IGNORECASE,
)
"""What a connector says while it is made, where it goes on without what it saves to."""
_AT_START = ("create_connector", "__init__")
"""Where what is off is the connector itself."""


def reasons(case: Case, engine: Engine) -> list[LogLine]:
    """What the connector logged, where it saved nothing in the whole run; [] elsewhere."""
    if engine.connector is None or not engine.configured or not engine.requests:
        return []
    if engine.store_entries or engine.unreadable_steps:
        return []
    if any(request.offered > 0 for request in case.of_engine(engine.tag)):
        return []
    found = [line for line in of_engine(engine, case.run.logs) if _says_off(line)]
    return list({log_line(line): line for line in found}.values())


def _says_off(line: LogLine) -> bool:
    start = line.hook in _AT_START
    if _OFF.search(line.message):
        return start or bool(_WHAT.search(line.message))
    return start and bool(_LACKS.search(line.message))


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    return unclaimed if reasons(case, case.engines[span.engine]) else []


CLAIMS = {Turn.ENGINE: claim}


def rule(case: Case) -> Results:
    for engine in case.run.engines:
        why = reasons(case, engine)
        if not why or not case.tokens(CAUSE):
            continue
        name = engine.connector_name
        yield case.finding(
            CAUSE,
            f"{name} switched itself off: it put no store into the metadata of "
            f"{plural(engine.steps, 'step')}.",
            evidence=[
                *map(log_line, why[:3]),
                f"0 store entries and 0 lookup hits for {plural(engine.requests, 'request')} in "
                f"{count(engine.steps)} steps",
            ],
            headline=f"{name} switched itself off",
            remedy=[f'fix what it logged: "{shortened(why[0].message).rstrip(".")}"'],
        )
        return
