"""Which state of a cell follows from where a token's way ended, and from what was called."""

from __future__ import annotations

from kvtrace.ledger.ends import NOT_SAVED, Outcome, SaveEnd
from kvtrace.picture.model import Kind, State
from kvtrace.terms import PENDING, SAVED, Grade

OF_END: dict[SaveEnd, Kind] = {
    SaveEnd.NO_CONNECTOR: Kind(State.SKIPPED, "the worker has no connector"),
    SaveEnd.NOT_BOUND: Kind(State.SKIPPED, "no metadata was bound"),
    SaveEnd.CLEARED: Kind(State.SKIPPED, "the metadata was cleared before the layer ran"),
    SaveEnd.CONNECTOR_GONE: Kind(State.SKIPPED, "the worker has no connector any more"),
    SaveEnd.GRAPH_REPLAY: Kind(State.REPLAY),
    SaveEnd.ONLY_CAPTURED: Kind(State.REPLAY, "the layer ran in Python only while graphs were captured"),
    SaveEnd.DIRECT_CALL: Kind(State.SKIPPED, "the layer calls its backend past the hooked op"),
    SaveEnd.NO_FORWARD: Kind(State.SKIPPED, "the step had nothing to compute"),
    SaveEnd.NO_HOOK: Kind(State.SKIPPED, "the layer ran, and its save hook was not called"),
    SaveEnd.RAISED: Kind(State.RAISED),
    SaveEnd.CAUGHT: Kind(State.RAISED, "an exception that the connector caught"),
    SaveEnd.NOTHING_READ: Kind(State.LOST, "the hook read nothing"),
    SaveEnd.PART_READ: Kind(State.LOST, "the hook read a part"),
    SaveEnd.OVERWRITTEN: Kind(State.LOST, "overwritten by another prompt's KV"),
    SaveEnd.OVERWRITTEN_BY_RANK: Kind(State.LOST, "overwritten by another rank's KV"),
    SaveEnd.FAILED: Kind(State.LOST, "the save was reported as failed"),
    SaveEnd.NOT_FINISHED: Kind(State.LOST, "the save never came to an end"),
    SaveEnd.NOT_DECLARED: Kind(State.NO_WORK),
    SaveEnd.STALE: Kind(State.LOST, "read before the tokens were computed"),
    SaveEnd.MISPLACED: Kind(State.LOST, "other slots were read"),
    SaveEnd.PUT_FAILED: Kind(State.LOST, "the store refused it, or an exception ended its way"),
    SaveEnd.NOT_AT_REST: Kind(State.LOST, "what came to rest is empty, cut or missing"),
    SaveEnd.LOST_LATER: Kind(State.LOST, "gone or overwritten by the end of the run"),
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

NOTHING = Kind(State.ABSENT)
DUMMY = Kind(State.DUMMY)
QUIET = Kind(State.QUIET)
IDLE = Kind(State.QUIET, "nothing to compute")
AGAIN = Kind(State.QUIET, "prompt tokens that were computed again, or given up")
READ, DECLARED = Kind(State.READ), Kind(State.DECLARED)
RAISED, REPLAY = OF_END[SaveEnd.RAISED], OF_END[SaveEnd.GRAPH_REPLAY]
NO_CONNECTOR, NOT_BOUND = OF_END[SaveEnd.NO_CONNECTOR], OF_END[SaveEnd.NOT_BOUND]
NOT_CALLED = OF_END[SaveEnd.NO_HOOK]
NO_CALL = Kind(State.SKIPPED, "the layer left no call")
NOT_AROUND = Kind(State.SKIPPED, "vLLM did not call the hooks around its attention")
LOADED, LOAD_DECLARED = Kind(State.LOADED), Kind(State.LOAD_DECLARED)
LOAD_IDLE, NO_LOAD = Kind(State.LOAD_IDLE), Kind(State.NO_LOAD)
LOAD_RAISED = Kind(State.RAISED, "a load hook")
IN_PROGRESS = Kind(State.UNKNOWN, "the save was in progress when the trace ended")


def of_outcome(outcome: Outcome) -> Kind:
    """How the token of a computed position fared, as the kind of a cell that holds it alone."""
    if outcome.name == SAVED:
        return Kind(_OF_GRADE[outcome.grade])
    if outcome.name == NOT_SAVED and isinstance(outcome.end, SaveEnd):
        return OF_END.get(outcome.end, Kind(State.LOST))
    return IN_PROGRESS if outcome.name == PENDING else Kind(State.UNKNOWN)


def worse(one: Kind, other: Kind) -> Kind:
    """Of two kinds of tokens in one cell the one that the cell has. Saved beside not saved is partly saved,
    where no fault lost the rest."""
    first, second = sorted((one, other), key=lambda kind: _ORDER[kind.state])
    if first.state in _OPEN and (second.state in SAVED_STATES or second.state is State.PARTLY):
        return Kind(State.PARTLY)
    return first


_OPEN = frozenset({State.NO_WORK, State.UNKNOWN})

KINDS: tuple[Kind, ...] = tuple(
    dict.fromkeys(
        (
            NOTHING, DUMMY, QUIET, IDLE, AGAIN, READ, DECLARED, Kind(State.SAVED), Kind(State.PARTLY),
            LOADED, LOAD_DECLARED, LOAD_IDLE, NO_LOAD, LOAD_RAISED,
            Kind(State.UNKNOWN), IN_PROGRESS, NO_CALL, NOT_AROUND, Kind(State.LOST), *OF_END.values(),
        )
    )
)  # fmt: skip
"""Every kind there is; the first one is that of a cell nobody spoke of."""
NUMBER: dict[Kind, int] = {kind: number for number, kind in enumerate(KINDS)}
