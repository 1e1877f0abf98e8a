"""Which state of a cell follows from where a token's way ended, and from what was called."""

from __future__ import annotations

from kvtrace.ledger.ends import NOT_SAVED, Outcome, SaveEnd
from kvtrace.picture.picture import CellKind, State
from kvtrace.terms import PENDING, SAVED, Grade

OF_END: dict[SaveEnd, CellKind] = {
    SaveEnd.NO_CONNECTOR: CellKind(State.SKIPPED, "the worker has no connector"),
    SaveEnd.NOT_BOUND: CellKind(State.SKIPPED, "no metadata was bound"),
    SaveEnd.CLEARED: CellKind(State.SKIPPED, "the metadata was cleared before the layer ran"),
    SaveEnd.CONNECTOR_GONE: CellKind(State.SKIPPED, "the worker has no connector any more"),
    SaveEnd.GRAPH_REPLAY: CellKind(State.REPLAY),
    SaveEnd.ONLY_CAPTURED: CellKind(State.REPLAY, "the layer ran in Python only while graphs were captured"),
    SaveEnd.DIRECT_CALL: CellKind(State.SKIPPED, "the layer calls its backend past the hooked op"),
    SaveEnd.NO_FORWARD: CellKind(State.SKIPPED, "the step had nothing to compute"),
    SaveEnd.NO_HOOK: CellKind(State.SKIPPED, "the layer ran, and its save hook was not called"),
    SaveEnd.RAISED: CellKind(State.RAISED),
    SaveEnd.CAUGHT: CellKind(State.RAISED, "an exception that the connector caught"),
    SaveEnd.NOTHING_READ: CellKind(State.LOST, "the hook read nothing"),
    SaveEnd.PART_READ: CellKind(State.LOST, "the hook read a part"),
    SaveEnd.OVERWRITTEN: CellKind(State.LOST, "overwritten by another prompt's KV"),
    SaveEnd.OVERWRITTEN_BY_RANK: CellKind(State.LOST, "overwritten by another rank's KV"),
    SaveEnd.FAILED: CellKind(State.LOST, "the save was reported as failed"),
    SaveEnd.NOT_FINISHED: CellKind(State.LOST, "the save never came to an end"),
    SaveEnd.NOT_DECLARED: CellKind(State.NO_WORK),
    SaveEnd.STALE: CellKind(State.LOST, "read before the tokens were computed"),
    SaveEnd.MISPLACED: CellKind(State.LOST, "other slots were read"),
    SaveEnd.READ_LATE: CellKind(State.LOST, "read once another request had their blocks"),
    SaveEnd.PUT_FAILED: CellKind(State.LOST, "the store refused it, or an exception ended its way"),
    SaveEnd.NOT_AT_REST: CellKind(State.LOST, "what came to rest is empty, cut or missing"),
    SaveEnd.LOST_LATER: CellKind(State.LOST, "gone or overwritten by the end of the run"),
}
"""Of tokens that were not saved."""
_OF_GRADE = {
    Grade.PROVED: State.SAVED,
    Grade.WRITTEN: State.SAVED,
    Grade.READ: State.READ,
    Grade.DECLARED: State.DECLARED,
    Grade.NOT_OBSERVED: State.UNKNOWN,
}
SAVED_STATES = frozenset({State.SAVED, State.READ, State.DECLARED})
_ORDER = {state: number for number, state in enumerate(State)}

NOTHING = CellKind(State.ABSENT)
QUIET = CellKind(State.QUIET)
IDLE = CellKind(State.QUIET, "nothing to compute")
AGAIN = CellKind(State.QUIET, "prompt tokens that were computed again, or given up")
READ, DECLARED = CellKind(State.READ), CellKind(State.DECLARED)
RAISED, REPLAY = OF_END[SaveEnd.RAISED], OF_END[SaveEnd.GRAPH_REPLAY]
NO_CONNECTOR, NOT_BOUND = OF_END[SaveEnd.NO_CONNECTOR], OF_END[SaveEnd.NOT_BOUND]
NOT_CALLED = OF_END[SaveEnd.NO_HOOK]
NO_CALL = CellKind(State.SKIPPED, "the layer left no call")
NOT_AROUND = CellKind(State.SKIPPED, "vLLM did not call the hooks around its attention")
LOADED, LOAD_DECLARED = CellKind(State.LOADED), CellKind(State.LOAD_DECLARED)
LOAD_IDLE, NO_LOAD = CellKind(State.LOAD_IDLE), CellKind(State.NO_LOAD)
LOAD_RAISED = CellKind(State.RAISED, "a load hook")
IN_PROGRESS = CellKind(State.UNKNOWN, "the save was in progress when the trace ended")


def of_outcome(outcome: Outcome) -> CellKind:
    """How the token of a computed position fared, as the kind of a cell that holds it alone."""
    if outcome.name == SAVED:
        return CellKind(_OF_GRADE[outcome.grade])
    if outcome.name == NOT_SAVED and isinstance(outcome.end, SaveEnd):
        return OF_END.get(outcome.end, CellKind(State.LOST))
    return IN_PROGRESS if outcome.name == PENDING else CellKind(State.UNKNOWN)


def worse(one: CellKind, other: CellKind) -> CellKind:
    """Of two kinds of tokens in one cell the one that the cell has. Saved beside not saved is partly saved,
    where no fault lost the rest."""
    first, second = sorted((one, other), key=lambda kind: _ORDER[kind.state])
    if first.state in _OPEN and (second.state in SAVED_STATES or second.state is State.PARTLY):
        return CellKind(State.PARTLY)
    return first


_OPEN = frozenset({State.NO_WORK, State.UNKNOWN})

KINDS: tuple[CellKind, ...] = tuple(
    dict.fromkeys(
        (
            NOTHING, QUIET, IDLE, AGAIN, READ, DECLARED, CellKind(State.SAVED), CellKind(State.PARTLY),
            LOADED, LOAD_DECLARED, LOAD_IDLE, NO_LOAD, LOAD_RAISED,
            CellKind(State.UNKNOWN), IN_PROGRESS, NO_CALL, NOT_AROUND, CellKind(State.LOST), *OF_END.values(),
        )
    )
)  # fmt: skip
"""Every kind there is; the first one is that of a cell nobody spoke of."""
NUMBER: dict[CellKind, int] = {kind: number for number, kind in enumerate(KINDS)}
