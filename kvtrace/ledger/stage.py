"""The seven stages of a token's way into the connector's store, in order (see ``docs/concepts.md``)."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """A report holds the number; people read the label."""

    WIRING = 0
    """Is the connector live in every process, with the right class and role?"""
    SCHEDULE = 1
    """Did the connector put the token into a step's metadata?"""
    BIND = 2
    """Was that metadata bound on the worker when the forward ran?"""
    FORWARD = 3
    """Did the layer's attention run its Python body?"""
    HOOK = 4
    """Was the layer's save hook called, and does this connector work in it?"""
    EFFECT = 5
    """Were the token's slots read?"""
    COMPLETION = 6
    """Did the save finish, and did the scheduler get to know?"""

    @property
    def label(self) -> str:
        """``wiring``."""
        return self.name.lower()
