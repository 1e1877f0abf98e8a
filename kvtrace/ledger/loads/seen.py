"""What both kinds of loads are looked for in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import intersect, union
from kvtrace.ledger.loads.accepted import Accepted
from kvtrace.ledger.loads.decide import By, Sign, Signs, signs
from kvtrace.ledger.loads.steps_seen import LoadEvidence
from kvtrace.ledger.loads.written import Written
from kvtrace.ledger.run import Worker
from kvtrace.ledger.steps import NEVER_RAN, Executed

READ_ONLY = "the load read them there: what it filled may be a copy of them"


@dataclass(frozen=True)
class LoadsSeen:
    """What the workers' spools say, and what each step was to load. Workers by Worker.key."""

    found: LoadEvidence
    executed: Mapping[tuple[int, str], Executed]
    loads: Mapping[int, int]  # step -> synchronous loads
    written: Written

    def ran(self, worker: Worker) -> Executed:
        return self.executed.get(worker.key, NEVER_RAN)


@dataclass(frozen=True)
class Failed:
    """Accepted tokens that were reported as failed. ``here``: as of a Sign."""

    tokens: int = 0
    why: str = ""
    here: bool = True

    def signs(self, accepted: Accepted, slots: Signs = ()) -> Signs:
        """Which ones is recorded as a number alone: taken to be the last, or of what ``slots`` speak against
        the last."""
        end = accepted.asked.positions[1]
        last = [(end - self.tokens, end)]
        if slots:
            last = intersect(last, union((start, stop) for start, stop, _ in slots))
        return signs(last, Sign(By.REPORT, LoadEnd.FAILED, (self.why,), self.here))
