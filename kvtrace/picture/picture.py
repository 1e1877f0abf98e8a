"""The picture of a run: plain values, ready to be JSON.

A *cell* is one layer in one step of one worker, or in a few neighbouring steps where the run is long.
Times are milliseconds since the run's first record of a request or a step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class State(Enum):
    """What happened in one layer in one step; the worst first. Each: letter, label, what it means."""

    RAISED = "E", "raised", "the hook raised, or caught an exception of its own"
    LOST = "L", "asked for, not saved", "the save hook had work, and the tokens are not in the store"
    SKIPPED = "X", "skipped", "attention ran, and the save hook did not run for it"
    REPLAY = "G", "graph replay", "a FULL CUDA graph was replayed: no hook can run"
    UNKNOWN = "?", "not observed", "nothing shows what became of the step's tokens"
    NO_WORK = "W", "called without work", "prompt tokens were computed, and nothing was to be stored"
    PARTLY = "P", "partly saved", "some of the step's prompt tokens were saved, others were not"
    DECLARED = "D", "declared only", "the metadata names the tokens; what was read was not seen"
    READ = "R", "read only", "the KV was read from the cache; its further way was not seen"
    SAVED = "S", "saved", "the KV was seen leaving the process, coming to rest, or coming back"
    LOADED = "I", "loaded", "the connector was seen to write KV into slots of the layer"
    LOAD_DECLARED = (
        "i",
        "load declared",
        "the metadata names slots to load; their writing was not seen",
    )
    LOAD_IDLE = "o", "load without work", "a load hook was called, and there was nothing to load"
    NO_LOAD = "n", "no load hook", "the step ran, and no load hook was called"
    QUIET = (
        "d",
        "nothing to save",
        "decode, or prompt tokens computed again or given up; nothing was to be stored",
    )
    ABSENT = "-", "no record", "the worker left no record of the step"

    def __init__(self, letter: str, label: str, meaning: str) -> None:
        self.letter, self.label, self.meaning = letter, label, meaning


@dataclass(frozen=True)
class CellKind:
    """A state, and why where that is known."""

    state: State
    why: str = ""


@dataclass(frozen=True)
class Map:
    """The cells of workers that look alike: what became of what they computed, or what they loaded.

    ``row_of[layer]`` is the row of a layer; ``rows[row]`` lists (cells, mix) alternately: so many cells side
    by side with this mix; ``mixes[mix]`` lists (kind, steps) alternately. ``first``, ``last``: the numbers of
    a cell's first and last step; ``total``: all steps, ``per`` a cell; ``prompt``, ``decode``: their tokens;
    ``forward_ms``, ``hooks_ms``: the mean time of a step, and in the connector's hooks of it.
    """

    workers: list[str]
    layers: list[str]
    total: int
    per: int
    row_of: list[int]
    rows: list[list[int]]
    mixes: list[list[int]]
    first: list[int]
    last: list[int]
    prompt: list[int]
    decode: list[int]
    forward_ms: list[float]
    hooks_ms: list[float]
    counts: list[list[int]]
    """(kind, layer-steps), the most first: the whole map in numbers."""
    what: str = "saves"
    """Or ``loads``."""


@dataclass(frozen=True)
class Bar:
    """A prefill chunk: when, in which step, positions [start, end), how it fared (an index of kinds)."""

    t0: float
    t1: float
    step: int
    start: int
    end: int
    kind: int
    saved: float  # share


@dataclass(frozen=True)
class Mark:
    """One moment: arrival, grown, lookup, load, save, save-done, load-done, preempted, finish."""

    t: float
    what: str
    text: str


@dataclass(frozen=True)
class Lane:
    """One request; ``end`` is None while it goes on."""

    id: str
    prompt: int
    begin: float
    end: float | None
    bars: list[Bar]
    marks: list[Mark]
    more: int = 0  # chunks and moments that are left out


@dataclass(frozen=True)
class Picture:
    kinds: list[CellKind] = field(default_factory=list)
    """Every kind there is, as maps and bars number them."""
    maps: list[Map] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    requests: int = 0
    """Of the run; lanes are given for so many of them."""
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kinds": [[one.state.letter, one.state.label, one.why] for one in self.kinds],
            "maps": [asdict(one) for one in self.maps],
            "lanes": [asdict(one) for one in self.lanes],
        }
