"""Which part of a run is exported: steps, layers, one request.

The events and steps of a long run are many; what is asked for is picked while the spools are read. A
record is kept where all that was asked for holds of what it names: its step, its layer, its request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtrace.errors import KvtraceError
from kvtrace.story.find import layers
from kvtrace.trace import rows
from kvtrace.trace.format import STEP_MASK
from kvtrace.trace.reader import Records
from kvtrace.words import clean

_LAST = STEP_MASK
_MOST_RANGE = 1 << 16
_STEPS = re.compile(r"(\d{0,10}):(\d{0,10})\Z", re.ASCII)
_LAYERS = re.compile(r"(\d{1,6})-(\d{1,6})\Z", re.ASCII)


def _words(name: str) -> dict[int, int]:
    """Of each kind of record that has the field, its word."""
    return {kind: row._fields.index(name) for kind, row in rows.ROWS.items() if name in row._fields}


STEP_WORDS, REQUEST_WORDS, LAYER_WORDS = _words("step"), _words("request"), _words("layer")


@dataclass(frozen=True)
class Wanted:
    """What was asked for. ``steps``: first and last, both included, None for all; ``layers``, ``request``:
    as typed, "" for all."""

    steps: tuple[int, int] | None = None
    layers: str = ""
    request: str = ""


def parse_steps(text: str) -> tuple[int, int] | None:
    """``10:20`` -> (10, 20); ``:20`` and ``10:`` are open; "" is None.

    Raises:
        KvtraceError: no range of steps.
    """
    if not text:
        return None
    match = _STEPS.match(text)
    first, last = (int(match[1] or 1), int(match[2] or _LAST)) if match else (0, 0)
    if not 1 <= first <= last <= _LAST:
        raise KvtraceError(
            f"{clean(text, 60)!r} is no range of steps",
            "write FIRST:LAST, both included and counted from 1; either may be left out",
        )
    return first, last


def parse_layers(text: str, names: Sequence[str]) -> frozenset[str] | None:
    """The layers meant by ``0,3,5-8`` or by parts of names; "" is None, for all.

    Raises:
        KvtraceError: one of them fits no layer of the run.
    """
    if not text:
        return None
    found: set[str] = set()
    for word in text.split(","):
        fits = _fitting(word.strip(), names)
        if not fits:
            known = f"{len(names)} layers own KV" + (f", {names[0]} to {names[-1]}" if names else "")
            raise KvtraceError(f"--layers: no layer {clean(word, 60)!r}", known)
        found.update(fits)
    return frozenset(found)


def _fitting(word: str, names: Sequence[str]) -> list[str]:
    if match := _LAYERS.match(word):
        first, last = int(match[1]), int(match[2])
        numbers = range(first, min(last, first + _MOST_RANGE) + 1)
        return [name for number in numbers for name in layers(str(number), names)]
    return layers(word, names)


@dataclass(frozen=True)
class Selection:
    """What is kept of a run's records.

    Attributes:
        steps: first and last number, both included; None for all.
        layers: names; None for all.
        request: the engine's id; "" for all.
        request_steps: of that request, the steps (engine's tag included) that its records name.
        arrivals: ids of the requests that are in one of the steps; None for all.
    """

    steps: tuple[int, int] | None
    layers: frozenset[str] | None
    request: str
    request_steps: NDArray[np.int64]
    arrivals: frozenset[str] | None

    def of(self, table: Records, names: Mapping[int, str]) -> Records:
        """The records of a table of shape (n, 8) that are wanted."""
        if self.steps is None and self.layers is None and not self.request:
            return table
        keep = np.ones(len(table), dtype=bool)
        kinds = rows.kind(table[:, 0])
        for kind in np.unique(kinds).tolist():
            of_kind = np.flatnonzero(kinds == kind)
            keep[of_kind] = self._kept(kind, table[of_kind], names)
        kept: Records = table[keep]
        return kept

    def _kept(self, kind: int, table: Records, names: Mapping[int, str]) -> NDArray[np.bool_]:
        keep = np.ones(len(table), dtype=bool)
        step = table[:, STEP_WORDS[kind]] if kind in STEP_WORDS else None
        request = table[:, REQUEST_WORDS[kind]] if kind in REQUEST_WORDS else None
        if self.steps is not None:
            if step is not None:
                number = step & STEP_MASK
                keep &= (step > 0) & (number >= self.steps[0]) & (number <= self.steps[1])
            elif request is not None and self.arrivals is not None:
                keep &= _named(request, names, self.arrivals)
        if self.layers is not None and kind in LAYER_WORDS:
            layer = table[:, LAYER_WORDS[kind]]
            keep &= (layer == 0) | _named(layer, names, self.layers)
        if self.request:
            if request is not None:
                keep &= _named(request, names, frozenset((self.request,)))
            elif step is not None:
                keep &= np.isin(step, self.request_steps)
            else:
                keep[:] = False
        return keep


def _named(ids: NDArray[np.int64], names: Mapping[int, str], wanted: frozenset[str]) -> NDArray[np.bool_]:
    """Which of these name ids stand for one of the wanted strings."""
    fitting = [one for one in np.unique(ids).tolist() if names.get(one, "") in wanted]
    result: NDArray[np.bool_] = np.isin(ids, fitting)
    return result


def in_steps(first: int, last: int, steps: tuple[int, int] | None) -> bool:
    """Whether a request that lived from step `first` to step `last` was there in one of the steps."""
    return steps is None or (first <= steps[1] and last >= steps[0])
