"""Slots that were read instead of those that the metadata names."""

from __future__ import annotations

from kvtrace.ledger.intervals import intersect, length, subtract, union
from kvtrace.ledger.saves.stores import Stores
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.slots.reads import Slots, covered, in_layer


def read_elsewhere(watched: Watched, stores: Stores, row: int, missing: int) -> bool:
    """Whether a step's calls read other slots instead of those that are missing, in all layers together:
    slots that hold no token, or none yet, slots that they had read already, in layers that lack some, slots
    of requests that the step does not name, or of its own where nothing that it names was read, unless these
    were due since an earlier step. The very slots that it names, read before they were computed, are no
    others.

    Args:
        row: of the step.
        missing: token-layers that the step's metadata names and that were not read.
    """
    step, slots, named = int(stores.steps[row]), watched.slots, stores.named[row]
    other = 0
    for column in range(len(watched.worker.kv_layers)):
        amount = slots.amount(step, column)
        own = {one: slots.read_of(one, column, step) for one in named}
        if not any(intersect(own[one], parts) for one, parts in named.items()):
            own.clear()  # nothing that it names: of the same requests these are other slots, too
        lacks = any(subtract(parts, own.get(one, [])) for one, parts in named.items())
        # Where a layer has all that is named, others' slots of it stand for none of another layer.
        foreign = amount.read - amount.useless - sum(map(length, own.values())) if lacks else 0
        if foreign > 0:
            read = slots.read_in.get(step, frozenset()) - own.keys()
            foreign -= sum(_due_of(slots, stores, row, column, one) for one in read)
        early = _read_early(slots, stores, row, column)
        other += amount.useless + max(0, foreign) + watched.read_repeatedly(step, column) - early
        missing -= early
    return other >= missing > 0


def _read_early(slots: Slots, stores: Stores, row: int, column: int) -> int:
    """Slots that a step names and that its calls read in a layer before they were computed, and no more."""
    found, step = 0, int(stores.steps[row])
    for request, parts in stores.named[row].items():
        touches = in_layer(slots.reads.get(request, ()), column)
        early = union(part for one in touches if one.step == step for part in one.stale)
        found += length(subtract(intersect(early, parts), covered(touches)))
    return found


def _due_of(slots: Slots, stores: Stores, row: int, column: int, request: int) -> int:
    """Tokens of a request, read in a step in a layer for the first time since an earlier step named them: the
    work of a thread, or of a hook that copies a step later."""
    step = int(stores.steps[row])
    named = [part for at in stores.rows_of.get(request, ()) if at < row for part in stores.named[at][request]]
    if not named:
        return 0
    before = covered(one for one in in_layer(slots.reads[request], column) if one.step < step)
    return length(intersect(slots.read_of(request, column, step), subtract(union(named), before)))


def strangers(slots: Slots, stores: Stores, row: int, column: int) -> list[int]:
    """Requests that a step does not name and whose slots it read in a layer, none of which was due."""
    unnamed = slots.read_in.get(int(stores.steps[row]), frozenset()) - stores.named[row].keys()
    return [request for request in unnamed if not _due_of(slots, stores, row, column, request)]
