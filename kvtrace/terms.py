"""The fixed terms that rooms share, each spelt once and in its order: stages, severities, outcomes of tokens.

Standard library only: any piece may import it.
"""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """The places that a token passes on its way into a connector's store, in order.

    A report's ``stage`` is the number; people read the label.
    """

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


class Grade(IntEnum):
    """How well the outcome of a token is seen. A number or a sentence has the least grade of its parts."""

    NOT_OBSERVED = 0
    DECLARED = 1
    """The connector's metadata says so, and nothing else does."""
    READ = 2
    """Seen at the KV cache: the token's slot was read (or, for a load, written), or seen not to be. What
    became of it after that was not seen."""
    WRITTEN = 3
    """As many bytes as were read came to rest in files, and are there when the run is over."""
    PROVED = 4
    """It came back in this run, for the same prefix, with the same content."""

    @property
    def label(self) -> str:
        """``not observed``, ``declared``."""
        return self.name.lower().replace("_", " ")


MEANS: dict[Grade, str] = {
    Grade.PROVED: "came back the same",
    Grade.WRITTEN: "as many bytes came to rest",
    Grade.READ: "read from the KV cache; whether it comes back is not known",
    Grade.DECLARED: "by metadata alone",
    Grade.NOT_OBSERVED: "nothing shows what became of it",
}
"""A grade in words, for the ledger of saves."""
MEANS_OF_LOADS: dict[Grade, str] = {
    **MEANS,
    Grade.PROVED: "what stands in the KV cache after the load is what these tokens compute to",
    Grade.READ: "the scheduler decided it, or the slots were seen to be written",
    Grade.DECLARED: "accepted by the scheduler; what was written was not seen",
}
"""The same for the ledger of loads."""

FAULT = "fault"
LIMIT = "limit"
NOTE = "note"
SEVERITIES = (FAULT, LIMIT, NOTE)
"""Of findings, worst first."""
_READ_AS = {LIMIT: "CHOICE"}
"""What people read in place of the word of the JSON."""

SAVED = "saved"
LOADED = "loaded"
LOCAL_HIT = "local-hit"
PENDING = "pending"
NOT_OBSERVED = "not-observed"
OUTCOMES = (SAVED, LOADED, LOCAL_HIT, PENDING, NOT_OBSERVED)
"""What may become of a token, without the losses; these follow, with their cause's id."""
KEPT = (SAVED, LOADED, LOCAL_HIT)
"""Outcomes of tokens that were not lost here: their KV is in the store, came from it, or was reused. Whether
what was reused was ever stored is another matter."""


def severity_order(severity: str) -> int:
    """0 for the worst."""
    return SEVERITIES.index(severity)


def severity_word(severity: str) -> str:
    """``FAULT``, ``CHOICE``, ``NOTE``."""
    return _READ_AS.get(severity, severity.upper())


def outcome_order(outcome: str) -> int:
    """The place of an outcome in lists: what went well first, every loss behind."""
    return OUTCOMES.index(outcome) if outcome in OUTCOMES else len(OUTCOMES)


def cause_of(outcome: str) -> str | None:
    """``not-saved:hook-raised`` -> ``hook-raised``."""
    return outcome.partition(":")[2] or None
