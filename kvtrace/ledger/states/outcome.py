"""The book of states: of layers that keep a state a request (Mamba, linear attention) and no KV of tokens.

A state stands for all tokens up to a position, and the next forward writes over it. So what is counted is one
state: that of a request in a layer on a rank, as it is at the end of the request's prompt. What a connector
was seen to read of it is known by its block; whether it was stored is not followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Taken(str, Enum):
    """What became of the state at the end of a prompt."""

    TAKEN = "taken"
    """All of it was read."""
    ELSEWHERE = "taken-elsewhere"
    """A state of the request was read, at another position or at one that is not known."""
    PARTLY = "partly-taken"
    NOT = "not-taken"
    UNKNOWN = "not-observed"


class Loaded(str, Enum):
    """What became of the state of a request for which the connector announced tokens."""

    GIVEN = "given"
    """All of one was written into its block, before the forward that goes on from it."""
    PARTLY = "partly-given"
    NOT = "not-given"
    UNKNOWN = "not-observed"


@dataclass(frozen=True)
class States:
    """``layers``: that keep a state; ``pairs``: (layer, rank); ``requests``: whose prompt was computed;
    ``saves``, ``loads``: states by what became of them."""

    layers: int
    pairs: int
    requests: int
    saves: Mapping[str, int]
    loads: Mapping[str, int]
