"""What both kinds of loads are looked for in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import Interval, union
from kvtrace.ledger.loads.accepted import Accepted
from kvtrace.ledger.loads.decide import By, Sign, Signs, signs
from kvtrace.ledger.loads.steps_seen import LoadEvidence
from kvtrace.ledger.loads.written import Written
from kvtrace.words import plural

READ_ONLY = "the load read them there: what it filled may be a copy of them"
ELSEWHERE = "which load nothing in the step"
"""Words of what is said of other requests whose slots a load wrote."""
OF_HIT = "which the GPU's own prefix cache had"
"""... and of tokens of the same request that lie before the load."""
OTHERS_REPORTED = "blocks behind them were reported as failed, these were not"
OF_NOBODY = "are of none of its requests"
REPORTED = "reported by get_block_ids_with_load_errors"
ANEW = f"computed anew, from the first block on that was {REPORTED}"
"""Words of what is said of blocks that did not load."""
ENDED_BY_FAILURE = "FINISHED_ERROR"
"""What vLLM makes of a request whose load failed, unless kv_load_failure_policy is "recompute"
(``v1/core/sched/scheduler.py``, 0.32.0)."""


def reported(blocks: int) -> str:
    return f"{plural(blocks, 'block')} {REPORTED}"


@dataclass(frozen=True)
class LoadsSeen:
    """What the workers' spools say, and what each step was to load. Workers by Worker.key.

    Attributes:
        loads: step -> the requests (rows) that load in it, synchronously, and where their loads begin.
        alone: nobody loads in any other way.
    """

    found: LoadEvidence
    loads: Mapping[int, Mapping[int, int]]
    alone: bool
    written: Written


@dataclass(frozen=True)
class Failed:
    """Accepted tokens that were reported as failed. ``here``: as of a Sign; ``heard``: vLLM did something
    about it, as far as that is seen; ``anew``: it computed just these, whatever was loaded of them."""

    tokens: int = 0
    why: str = ""
    here: bool = True
    heard: bool = True
    anew: bool = False

    def signs(self, accepted: Accepted, slots: Signs = ()) -> Signs:
        """Which ones is recorded as a number alone: taken to be the last, or the last of what ``slots`` speak
        against."""
        end = accepted.asked.positions[1]
        last = [(end - self.tokens, end)]
        if slots and not self.anew:
            last = _last_of(union((start, stop) for start, stop, _ in slots), self.tokens)
        return signs(last, Sign(By.REPORT, LoadEnd.FAILED, (self.why,), self.here))


def _last_of(parts: Sequence[Interval], tokens: int) -> list[Interval]:
    """The last so many positions of these."""
    found: list[Interval] = []
    for start, end in reversed(parts):
        if tokens > 0:
            found.append((max(start, end - tokens), end))
            tokens -= end - start
    return found[::-1]
