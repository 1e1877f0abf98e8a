"""Whose tokens the slots were that a worker touched: requests and positions.

A slot that was read counts for a token only once the token was computed: what was read before that is
*stale*. Each read of one set of slots is held once, with the layers in which it happened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from kvtrace.ledger.intervals import Interval, union
from kvtrace.ledger.slots.accounts import Account


@dataclass(frozen=True)
class Touch:
    """Positions of one request that were touched alike in some layers of one worker.

    Attributes:
        step: the last step that had begun by then.
        t: of the first of them.
        columns: the worker's KV layers, a bit each.
        positions: of tokens that had been computed by then.
        stale: of tokens that had not.
        late: of a write: the layer's attention of that step had begun.
        account: what became of what was read.
        sent_to: the peer of what was sent.
        over: the step in which it was written over.
        late_for: of a read: the requests (rows) for which it came too late: these tokens are in their blocks.
        given_out: of a write: the memory was given out by address, and may have been read instead.
        overdue: work in the background that a step before this one asked for.
    """

    step: int
    t: int
    columns: int
    positions: tuple[Interval, ...]
    stale: tuple[Interval, ...] = ()
    background: bool = False
    late: bool = False
    account: Account = Account.OPEN
    given_out: bool = False
    late_for: tuple[int, ...] = ()
    sent_to: str = ""
    over: int = 0
    overdue: bool = False


class Amounts(NamedTuple):
    """How many slots were read in a step in a layer.

    Attributes:
        read: each as often as it was.
        useless: of these, slots that held no token, or none yet, and slots that had been read in that step
            already.
        blank: of these, slots of blocks that no request holds, the null block left out (it pads); nothing of
            a layer that shares its bytes with another one.
        repeated: slots that had been read in that step already.
    """

    read: int = 0
    useless: int = 0
    blank: int = 0
    repeated: int = 0

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True)
class Slots:
    """What one worker was seen to touch.

    Attributes:
        reads, writes: by the request's row, in the order of time.
        aimed: of the same: what a load read of the slots that it is to fill, before they were used. It is no
            read for a store, and where nothing is written there, what was filled is a copy.
        late: row of a request -> (step, columns, positions) that were read after their blocks went to
            another one. perhaps_late: the same, where it is not known that they were read for that request.
        amounts: (step, column) -> how many slots were read.
        off: layers in which all that was read are whole numbers of blocks, several of them, and none begins
            with a block: whatever is meant, it is not these tokens.
        tables: row of a request -> positions for which it is known which blocks it held.
        outside: (row of a request, column) -> positions [0, end) that the layer's window had left when the
            request got its blocks: it got none for them, the null block stands there.
        unknown: (step, column) of which it is known that slots were read, and not which.
        blind: the last steps that had begun when slots were read of which it is not known which.
        unplaced: the last step in which work in the background read, for a step that is not known, slots that
            are not known either: they may be of that step and of any before it.
        partly: (step, column) in which parts of known slots were read (some heads, K alone), and none whole.
        none: (step, column) in which slots were picked to be read, and these were none.
        blind_writes: column -> the last step in which slots were written there, and not known which.
        last_background: the last step for which something in the background worked, 0 where it is not known
            for which; -1: nothing did.
    """

    reads: Mapping[int, Sequence[Touch]] = field(default_factory=dict)
    writes: Mapping[int, Sequence[Touch]] = field(default_factory=dict)
    aimed: Mapping[int, Sequence[Touch]] = field(default_factory=dict)
    late: Mapping[int, Sequence[tuple[int, int, tuple[Interval, ...]]]] = field(default_factory=dict)
    perhaps_late: Mapping[int, Sequence[tuple[int, int, tuple[Interval, ...]]]] = field(default_factory=dict)
    amounts: Mapping[tuple[int, int], Amounts] = field(default_factory=dict)
    off: frozenset[int] = frozenset()
    tables: Mapping[int, int] = field(default_factory=dict)
    outside: Mapping[tuple[int, int], int] = field(default_factory=dict)
    unknown: frozenset[tuple[int, int]] = frozenset()
    blind: frozenset[int] = frozenset()
    unplaced: int = 0
    partly: frozenset[tuple[int, int]] = frozenset()
    none: frozenset[tuple[int, int]] = frozenset()
    blind_writes: Mapping[int, int] = field(default_factory=dict)
    last_background: int = -1

    def amount(self, step: int, column: int) -> Amounts:
        """How many slots were read in a step in a layer."""
        return self.amounts.get((step, column), NONE)

    def read_of(self, row: int, column: int, step: int | None = None) -> list[Interval]:
        """Positions of a request that were read in a layer; of one step, or of all."""
        touches = in_layer(self.reads.get(row, ()), column)
        return covered(touch for touch in touches if step is None or touch.step == step)

    @property
    def visible(self) -> bool:
        """Whether any read of known slots was seen: this connector copies where the watch can see it."""
        return bool(self.amounts)

    @cached_property
    def read_in(self) -> Mapping[int, Set[int]]:
        """Step -> rows of the requests that were read in it."""
        return _by_step(self.reads)

    @cached_property
    def written_in(self) -> Mapping[int, Set[int]]:
        """... that were written in it."""
        return _by_step(self.writes)


def _by_step(touched: Mapping[int, Sequence[Touch]]) -> Mapping[int, Set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for row, touches in touched.items():
        for touch in touches:
            found[touch.step].add(row)
    return found


NOTHING = Slots()
NONE = Amounts()


def in_layer(touches: Iterable[Touch], column: int) -> list[Touch]:
    """Those of the touches that were in one layer."""
    return [touch for touch in touches if touch.columns >> column & 1]


def covered(touches: Iterable[Touch]) -> list[Interval]:
    """Positions that were touched."""
    return union(part for touch in touches for part in touch.positions)
