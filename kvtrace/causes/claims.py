"""Claims: how a cause takes the lost positions that it explains."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvtrace.causes.case import Case
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.run import LostSpan

Claim = Callable[[Case, LostSpan, list[Interval]], list[Interval]]
"""Takes a span and what of its positions is left; returns those that the cause explains."""


class Turn(Enum):
    """When a claim is asked, in this order: the first one to explain a position gets it.

    Not the stages' order: what is known of the engine goes before what is known of a position, that
    before a step, that before a request. Within a turn the order is that of the registry.
    """

    ENGINE = "engine"
    """On every lost position: nothing of this engine can be saved."""
    UNREAD = "unread"
    """On positions whose store entry the save hook did not read, or not as a whole."""
    READ = "read"
    """On positions that were read, and are not in the store. Then comes what the ledger says of their end."""
    POSITION = "position"
    """On positions that no metadata held, like all that follow: such positions are never stored."""
    STEP = "step"
    """Something went wrong while the metadata of their step was built."""
    REQUEST = "request"
    """What became of their request explains them."""
    WORKER = "worker"
    """The worker decides what is stored, and was seen to take nothing."""
    LAST = "last"
    """What no other claim took, whatever it is."""


NOT_OFFERED = (Turn.POSITION, Turn.STEP, Turn.REQUEST, Turn.WORKER, Turn.LAST)
