"""Second reading of the spools: which hook and op ran, in which steps, for which layers.

Everything is counted in distinct (step, layer) pairs of real forward steps, so that a layer
that runs twice in a step (draft passes, micro-batches) counts once.

Comes in: spools, the layers that own KV.
Goes out: calls and due steps by hook, layer and rank.
May not: count warm-up and dummy runs.
"""

from kvtrace.ledger.coverage.joined import CoverageTables, cover
from kvtrace.ledger.coverage.spool import WorkerCoverage
from kvtrace.ledger.coverage.store_steps import Bit, StoreStepBit, StoreSteps

__all__ = ["Bit", "CoverageTables", "StoreStepBit", "StoreSteps", "WorkerCoverage", "cover"]
