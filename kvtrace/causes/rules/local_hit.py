"""local-hit: never a cause of lost tokens, and suspected of it all the same."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import RuledOut
from kvtrace.causes.tables import rows
from kvtrace.ledger.model import LOCAL_HIT
from kvtrace.words import count, percent

ID = "local-hit"


def rule(case: Case) -> Iterator[RuledOut]:
    known = [engine for engine in case.run.engines if engine.facts.prefix_caching is not None]
    if not known or not case.requests:
        return
    base = case.run.base
    mine = base[base["account"] == LOCAL_HIT]
    reused = sum(row.amount / max(1, case.engines[row.engine].pairs) for row in rows(mine))
    if any(engine.facts.prefix_caching for engine in known):
        share = percent(reused, case.total_tokens)
        yield RuledOut(
            ID,
            f"{count(reused)} tokens ({share}) were reused from the GPU's prefix cache: none of them is lost",
        )
    else:
        yield RuledOut(
            ID,
            f"prefix caching is off; {count(reused)} tokens reused. With it on, fewer tokens would be "
            "offered, not more",
        )
