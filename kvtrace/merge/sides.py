"""Where the prompt's tokens of a joined request ended up in one engine: intervals of positions.

Each interval has one word: ``sent`` (in every layer on every rank), ``partly``, ``unseen``, ``received``,
``lost`` (accepted and not loaded), ``local``, and "" for none of these; and whether it was computed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtrace.ledger.ends import NOT_LOADED
from kvtrace.ledger.run import Run, Span
from kvtrace.terms import LOADED, LOCAL_HIT, NOT_OBSERVED, SAVED, Grade

SENT, PARTLY, UNSEEN, RECEIVED, LOST, LOCAL = "sent", "partly", "unseen", "received", "lost", "local"


@dataclass(frozen=True)
class Stretch:
    """Positions [start, end). ``grade``: of ``sent`` and ``received``, the least of all pairs."""

    start: int
    end: int
    word: str
    grade: Grade
    computed: bool


@dataclass(frozen=True)
class EngineSide:
    """One request in one engine. ``start``: positions in its prefix cache when the connector was asked;
    ``offered`` (-1: never asked), ``accepted``: how many more the connector offered, and were taken."""

    prompt: int
    stretches: tuple[Stretch, ...]
    offered: int = -1
    accepted: int = 0
    start: int = 0


def sides(run: Run) -> dict[int, EngineSide]:
    """Row of each watched request in ``Run.requests`` -> its side."""
    spans: dict[int, list[Span]] = {}
    for span in run.spans:
        spans.setdefault(span.request, []).append(span)
    loads = {load.request: load for load in run.load_rows}
    pairs = {engine.tag: engine.pairs for engine in run.engines}
    found = {}
    for row, of_request in spans.items():
        load, request = loads.get(row), run.requests[row]
        stretches = tuple(_stretches(of_request, request.prompt, pairs.get(request.engine, 0)))
        answer = -1 if load is None or load.answer is None else load.answer
        taken = (load.accepted, load.local) if load else (0, 0)
        found[row] = EngineSide(request.prompt, stretches, answer, *taken)
    return found


def _stretches(spans: Sequence[Span], prompt: int, pairs: int) -> list[Stretch]:
    edges = sorted({0, prompt, *(min(edge, prompt) for span in spans for edge in (span.start, span.end))})
    found: list[Stretch] = []
    for start, end in itertools.pairwise(edges):
        here = [span for span in spans if span.start <= start < span.end]
        word, grade = _word(here, pairs)
        computed = any(span.step > 0 for span in here)
        last = found[-1] if found else None
        if last and (last.word, last.grade, last.computed, last.end) == (word, grade, computed, start):
            found[-1] = Stretch(last.start, end, word, grade, computed)
        else:
            found.append(Stretch(start, end, word, grade, computed))
    return found


_WORDS: Mapping[str, str] = {SAVED: SENT, LOADED: RECEIVED, NOT_LOADED: LOST, LOCAL_HIT: LOCAL}


def _word(spans: Sequence[Span], pairs: int) -> tuple[str, Grade]:
    """The word for a position by what became of it in each pair, and its grade."""
    sizes: dict[str, int] = {}
    for span in spans:
        sizes[span.outcome.name] = sizes.get(span.outcome.name, 0) + len(span.pairs)
    grade = min((span.outcome.grade for span in spans), default=Grade.NOT_OBSERVED)
    if len(sizes) == 1 and (name := next(iter(sizes))) in _WORDS:
        return (_WORDS[name] if sizes[name] >= pairs else PARTLY), grade
    if NOT_LOADED in sizes or LOADED in sizes:  # of what is loaded: in some pairs it never came
        return LOST, grade
    if SAVED in sizes:
        return PARTLY, grade
    if NOT_OBSERVED in sizes or not sizes:
        return UNSEEN, Grade.NOT_OBSERVED
    return "", grade
