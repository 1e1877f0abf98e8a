"""Tokens as people count them. The KV of a token lies in every layer on every rank: it is saved where all of
it is, and lost where a part of it is. So each token has one outcome too, and they add up to whole numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TypeVar

from kvtrace.ledger.ends import NOT_ARRIVED, NOT_LOADED, NOT_SAVED, LoadEnd, Outcome
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.terms import LOADED, LOCAL_HIT, NOT_OBSERVED, PENDING, SAVED

K = TypeVar("K", bound=Hashable)

_FIRST = (NOT_SAVED, NOT_LOADED, NOT_OBSERVED, PENDING, LOCAL_HIT, LOADED, SAVED)
"""What a token is called whose pairs differ: the first of these that any of them had."""


def swept(parts: Iterable[tuple[int, int, K, int]]) -> Iterator[tuple[int, int, Mapping[K, int]]]:
    """(start, end, what, pairs) in any order -> neighbouring intervals, each with the pairs of all that
    covers it."""
    changes: dict[int, list[tuple[K, int]]] = defaultdict(list)
    for start, end, what, pairs in parts:
        if start < end:
            changes[start].append((what, pairs))
            changes[end].append((what, -pairs))
    here: Counter[K] = Counter()
    for start, end in pairwise(sorted(changes)):
        for what, pairs in changes[start]:
            here[what] += pairs
        covering = {what: pairs for what, pairs in here.items() if pairs > 0}
        if covering:
            yield start, end, covering


def least(outcomes: Iterable[Outcome]) -> Outcome:
    """Of the outcomes that the pairs of a token had, what it is called."""
    return min(outcomes, key=lambda one: (_FIRST.index(one.name), one.grade, one.code, one.sent_to))


_ACCEPTED = frozenset((LoadEnd.LOADED, LoadEnd.PENDING, LoadEnd.NOT_OBSERVED, *NOT_ARRIVED))
"""Ends of tokens that the scheduler accepted: these may differ from layer to layer."""


def of_load(load: LoadOf, pairs: int) -> dict[LoadEnd, int]:
    """A request's prompt tokens by where their way ended: loaded is what came into every pair."""
    pairs = max(1, pairs)
    alike = all(bits.bit_count() == pairs for bits in load.lost.values())
    if not any(amount % pairs for amount in load.ends.values()) and alike:
        return {end: amount // pairs for end, amount in load.ends.items()}
    found: Counter[LoadEnd] = Counter()
    for end, amount in load.ends.items():
        if end not in _ACCEPTED:
            found[end] += amount // pairs
    parts = [(*part, bits.bit_count()) for of_class, bits in load.lost.items() for part in of_class]
    for start, stop, ends in swept(parts):
        found[max(ends, key=lambda one: (ends[one], one))] += stop - start
    found[LoadEnd.LOADED] += load.prompt - sum(found.values())
    return {end: tokens for end, tokens in found.items() if tokens > 0}
