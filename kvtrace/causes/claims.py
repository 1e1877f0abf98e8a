"""Claims: how a cause takes the lost positions that it explains."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from kvtrace.causes.case import Case
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.run import LostSpan

Claim = Callable[[Case, LostSpan, list[Interval]], list[Interval]]
"""Takes a span and what of its positions is left; returns those that the cause explains."""


class Turn(IntEnum):
    """When a claim is asked: the first one to explain a position gets it.

    Not the stages' order: what is known of the engine goes before what is known of a position, that
    before a step, that before a request. Within a turn the order is that of the registry.
    """

    ENGINE = 0
    """On every lost position: nothing of this engine can be saved."""
    UNREAD = 1
    """On positions whose store entry the save hook did not read, or not as a whole."""
    POSITION = 2
    """On positions that no metadata held, like all that follow: such positions are never stored."""
    STEP = 3
    """Something went wrong while the metadata of their step was built."""
    REQUEST = 4
    """What became of their request explains them."""
    WORKER = 5
    """The worker decides what is stored, and was seen to take nothing."""
    LAST = 6
    """What is left, whatever it is."""
    READ = 7
    """On positions that were read, and are not in the store: behind what the ledger says of their end."""


NOT_OFFERED = tuple(turn for turn in Turn if Turn.POSITION <= turn <= Turn.LAST)
