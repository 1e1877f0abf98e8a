"""config-key-unused: keys of kv_connector_extra_config that the connector never reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.rule import FAULT, NOTE, Case, Cause, Results, Stage
from kvtrace.ledger.run import Engine
from kvtrace.terms import SAVED
from kvtrace.words import listed, plural

CAUSE = Cause(
    id="config-key-unused",
    stage=Stage.WIRING,
    severity=FAULT,
    weighs=True,
    meaning=(
        "Extra configuration keys that the connector never reads: misspelt, or of another version. A fault "
        "where nothing was saved and nothing else explains it, otherwise a note."
    ),
    seen_as=(
        "Keys given in kv_connector_extra_config, minus those that the connector's source asks for, in the "
        "scheduler and in the workers together. A connector whose source does not say which keys it reads "
        "(it goes through all of them, or passes them on), or that asks for none of its keys, is not judged."
    ),
    remedy="Compare the keys with the connector's documentation.",
    about_calls=False,
)

_UNEXPLAINED = ("metadata-has-no-store", "connector-disabled-itself")
"""What an option that never came may be the reason of."""


class Unused(NamedTuple):
    """Keys of a run's connectors.

    Attributes:
        keys: a key that is never read -> the nearest one that is asked for, "" for none.
        given: all keys that were given, of engines whose connector says which it reads.
        asked: keys that are asked for and were not given.
        excused: no token can have been lost by it.
        unseen: engines whose connector does not say which keys it reads.
    """

    keys: dict[str, str]
    given: set[str]
    asked: set[str]
    excused: bool
    unseen: int


def unused(case: Case) -> Unused:
    """The keys that were given and are never read."""
    return case.once("unused keys", lambda: _unused(case))


def _unused(case: Case) -> Unused:
    keys: dict[str, str] = {}
    given, asked = set[str](), set[str]()
    unseen = 0
    excused = not case.requests
    for engine in case.run.engines:
        offered, read = _given_and_read(case, engine)
        if not offered:
            continue
        if read is None or not (read & offered or any(map(partial(_near, read - offered), offered))):
            unseen += 1  # read in a way that the source does not say, or none of them, nor one spelt alike
            continue
        given |= offered
        asked |= read - offered
        never = sorted(offered - read)
        if never:
            excused = excused or engine.role == "kv_consumer" or _saved_something(case, engine)
        for key in never:
            keys.setdefault(key, _near(read - offered, key))
    return Unused(keys, given, asked, excused, unseen)


def rule(case: Case) -> Results:
    found = unused(case)
    if found.keys:
        unexplained = any(ident in case.assigned for ident in _UNEXPLAINED)
        yield _finding(case, found, FAULT if unexplained and not found.excused else NOTE)
    elif found.given:
        number = len(found.given)
        read_all = f"all {plural(number, 'key')}" if number > 1 else "the only key"
        yield CAUSE.ruled_out(f"the connector's source asks for {read_all} of kv_connector_extra_config")
    elif found.unseen:
        yield CAUSE.not_observed(
            "the connector's source does not say which keys it reads, or it asks for none of those given"
        )


def to_set(found: Unused) -> list[str]:
    """What to change in the configuration: a key that is spelt alike, or those that are asked for."""
    hints = [f'"{key}": did you mean "{near}"?' for key, near in found.keys.items() if near]
    asked = _ASKED.format(_named(found.asked)) if found.asked else _COMPARE
    return hints or [f"the connector never reads {_named(found.keys)} of kv_connector_extra_config: {asked}"]


def _named(keys: Iterable[str]) -> str:
    return listed(f'"{key}"' for key in sorted(keys))


_COMPARE = "compare with its documentation"
_ASKED = "its source asks for {}, which was not given"


def _near(asked: set[str], key: str) -> str:
    """The key that is asked for and was not given, and that is spelt most like one that was; "" for none."""
    near = difflib.get_close_matches(key, sorted(asked), n=1, cutoff=0.6)
    return near[0] if near else ""


def _given_and_read(case: Case, engine: Engine) -> tuple[set[str], set[str] | None]:
    """Keys given to the connector, and keys that it asks for, given or not; None where it may ask for any."""
    if not engine.configured:
        return set(), set()
    pids = {engine.pid, *(worker.pid for worker in engine.workers)}
    spools = {worker.spool for worker in engine.workers}
    wanted = set(engine.extra)
    records = [
        record
        for record in case.run.config_keys
        if (record.pid in pids or record.spool in spools)
        # Several engines in one process: those whose keys these are.
        and (not wanted or set(record.given) <= wanted)
    ]
    given = {key for record in records for key in record.given}
    if any(record.hidden for record in records):
        return given, None
    return given, {key for record in records for key in (*record.read, *record.asked)}


def _saved_something(case: Case, engine: Engine) -> bool:
    return any(one.amount for one in case.run.base if one.engine == engine.tag and one.outcome == SAVED)


def _finding(case: Case, found: Unused, severity: str) -> Finding:
    names, given, read = _named(found.keys), len(found.given), len(found.given) - len(found.keys)
    evidence = [f"{plural(given, 'key')} given, its source asks for {read} of them; not for {names}"]
    if found.asked:
        evidence.append(f"keys that it asks for and that were not given: {_named(found.asked)}")
    return case.finding(
        CAUSE,
        f"The connector never reads {names} of kv_connector_extra_config.",
        severity=severity,
        evidence=evidence,
        remedy=to_set(found),
        headline=f"the connector never reads {names} of its configuration",
    )
