"""config-key-unused: keys of kv_connector_extra_config that the connector never read."""

from __future__ import annotations

import difflib

from kvtrace.causes.case import Case
from kvtrace.causes.cause import Cause
from kvtrace.causes.model import Results
from kvtrace.ledger.model import SAVED, ConfigKeys, Engine
from kvtrace.terms import FAULT, NOTE, Stage
from kvtrace.words import listed, plural

CAUSE = Cause(
    id="config-key-unused",
    stage=Stage.WIRING,
    severity=FAULT,
    ledger=None,
    meaning=(
        "Extra configuration keys that the connector never read: misspelt, or of another version. A fault "
        "where nothing was saved, else a note."
    ),
    seen_as=(
        "Keys given in kv_connector_extra_config less keys read, in the scheduler and in the workers "
        "together. A connector that reads none of its keys where that can be seen is not judged."
    ),
    remedy="Compare the keys with the connector's documentation.",
    about_calls=False,
)


def _keys(case: Case, engine: Engine) -> list[ConfigKeys]:
    pids = {engine.pid, *(worker.pid for worker in engine.workers)}
    spools = {worker.spool for worker in engine.workers}
    mine = [keys for keys in case.run.config_keys if keys.pid in pids or keys.spool in spools]
    wanted = set(engine.extra)
    # Several engines in one process: those whose keys these are.
    return [keys for keys in mine if not wanted or set(keys.given) <= wanted]


def rule(case: Case) -> Results:
    unused: dict[str, str] = {}  # key -> the nearest one that was asked for
    given: set[str] = set()
    dark = 0
    saved = False
    for engine in case.run.engines:
        if not engine.configured:
            continue
        keys = _keys(case, engine)
        read = {key for one in keys for key in (*one.read, *one.asked)}
        offered = {key for one in keys for key in one.given}
        if not offered:
            continue
        if not read & offered:
            dark += 1  # read on a way that is not watched, or none of them at all
            continue
        given |= offered
        asked = sorted(read - offered)
        base = case.run.base
        own = base[(base["engine"] == engine.tag) & (base["account"] == SAVED)]
        mine = sorted(offered - read)
        if mine:
            only_reads = engine.role == "kv_consumer"
            saved = saved or only_reads or int(own["amount"].sum()) > 0
        for key in mine:
            near = difflib.get_close_matches(key, asked, n=1, cutoff=0.6)
            unused.setdefault(key, near[0] if near else "")
    if unused:
        hints = [f'"{key}": did you mean "{near}"?' for key, near in unused.items() if near]
        names = listed(f'"{key}"' for key in unused)
        yield case.finding(
            CAUSE,
            f"The connector never read {names} of kv_connector_extra_config in this run.",
            severity=NOTE if saved or not case.requests else FAULT,
            evidence=[
                f"{plural(len(given), 'key')} given, {len(given) - len(unused)} of them read; never read: "
                f"{names}",
                *(["keys that it asked for and that were not given: " + listed(f'"{near}"' for near in
                   dict.fromkeys(unused.values()) if near)] if hints else []),
            ],
            remedy=hints or ["compare these keys with the connector's documentation"],
            headline=f"the connector never read {names} of its configuration",
        )  # fmt: skip
    elif given:
        all_of = f"all {plural(len(given), 'key')}" if len(given) > 1 else "the only key"
        yield CAUSE.ruled_out(
            f"{all_of} of kv_connector_extra_config {'were' if len(given) > 1 else 'was'} read"
        )
    elif dark:
        yield CAUSE.not_observed(
            "the connector reads its configuration on a way that is not watched, or not at all"
        )
