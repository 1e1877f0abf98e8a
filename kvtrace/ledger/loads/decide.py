"""What became of an accepted token in one pair: the evidence of it, and the one decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from kvtrace.ledger.contents.compare import Returned, Wrong, returned
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import Interval, covers, intersect, union
from kvtrace.ledger.loads.outcome import Arrived, Part, Place
from kvtrace.ledger.run import Engine
from kvtrace.terms import Grade

_MAX_REASONS = 3
_MAX_PLACES = 256

# --- the decision


class By(IntEnum):
    """Whose word a sign is. Where there are several, the first of these counts."""

    REPORT = 0
    """The connector's, or vLLM's, on the whole transfer."""
    CALL = 1
    """Of the calls that were to load it."""
    SLOT = 2
    """Of the writes into its slot."""


class Sign(NamedTuple):
    """What speaks against a token: where its way ended, and why. ``here``: it was seen in this layer."""

    by: By
    end: LoadEnd
    why: tuple[str, ...] = ()
    here: bool = True


class LoadToken(NamedTuple):
    """All the evidence of one accepted token in one pair.

    Attributes:
        signs: what speaks against it, in any order.
        watched: what was written is seen, there and in all other pairs.
        proved: its block holds what its tokens computed to.
        wrong: its block holds something else.
        explained: that a part of this block is lost in another way would explain it.
        others: other blocks of the load are proved there.
        doubted: and one of them although its signs say that nobody wrote it.
        caught: exceptions that may have ended the load.
        broken_off: one of them did, as blocks of the load were not written.
        lacking: other blocks of the load are known not to have come, or other loads of its engine too late.
    """

    signs: tuple[Sign, ...] = ()
    watched: bool = False
    proved: bool = False
    wrong: Wrong | None = None
    explained: bool = False
    others: bool = False
    doubted: bool = False
    caught: tuple[str, ...] = ()
    broken_off: bool = False
    lacking: bool = False


class LoadOutcome(NamedTuple):
    """``proved``: with the KV that its tokens computed to. ``why``, ``here``: as of a Sign."""

    end: LoadEnd
    grade: Grade
    why: tuple[str, ...] = ()
    here: bool = True
    proved: bool = False


_NOTHING_AGAINST = Sign(By.SLOT, LoadEnd.LOADED)
_NOT_THERE = (LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY)
"""Ends that say that nothing was written: it was, where the content is there all the same."""
_NOT_OBSERVED = LoadOutcome(LoadEnd.NOT_OBSERVED, Grade.NOT_OBSERVED, here=False)
_LEFT = (
    "no write was seen, and their blocks hold what the same blocks held before: nothing was written, it came "
    "too late, or the store gave the same"
)
TOO_LATE = "its slots were written after its attention had begun"
STEPS_LATER = "its slots were written in a later step than the one that used them"
WRITTEN_AFTER_USE = (
    "when attention used them their blocks did not hold what was loaded: it was written, or all of it, later"
)


def decide(token: LoadToken) -> LoadOutcome:
    """What became of a token in a pair, once and from all of its evidence."""
    end, why, here = min(token.signs, default=_NOTHING_AGAINST)[1:]
    silent, known = end in _NOT_THERE, Grade.READ if token.watched else Grade.DECLARED
    if token.proved and (silent or end in (LoadEnd.LOADED, LoadEnd.NOT_OBSERVED)):
        return LoadOutcome(LoadEnd.LOADED, known, proved=True)
    if token.wrong and not token.explained and end in (LoadEnd.LOADED, LoadEnd.NOT_OBSERVED):
        return _other_kv(token, token.wrong)
    if end == LoadEnd.NOT_OBSERVED or (silent and token.doubted and not token.wrong):
        return _NOT_OBSERVED
    if end == LoadEnd.LOADED and token.broken_off and not token.watched:
        return _NOT_OBSERVED
    if silent:  # as an exception ended it, it seems
        why = (*(line for line in token.caught if not any(line in one for one in why)), *why)
    return LoadOutcome(end, known if silent or end == LoadEnd.LOADED else Grade.READ, why, here)


def _other_kv(token: LoadToken, wrong: Wrong) -> LoadOutcome:
    """Nothing says that it was lost, and its block does not hold its KV."""
    if wrong.late:
        return LoadOutcome(LoadEnd.USED_BEFORE, Grade.READ, (WRITTEN_AFTER_USE, wrong.why))
    if token.caught:
        return LoadOutcome(LoadEnd.FAILED, Grade.READ, (*token.caught, wrong.why))
    if wrong.unwritten:
        end = LoadEnd.PARTLY if token.others else LoadEnd.NOT_WRITTEN
        return LoadOutcome(end, Grade.PROVED, (_LEFT, wrong.why))
    if _may_be_older_kv(token, wrong):
        return _NOT_OBSERVED
    return LoadOutcome(LoadEnd.ALTERED if wrong.altered else LoadEnd.WRONG, Grade.PROVED, (wrong.why,))


def _may_be_older_kv(token: LoadToken, wrong: Wrong) -> bool:
    """Whether nobody's KV in a block may be from before a load that nobody watched: others did not come."""
    return token.lacking and not token.watched and not wrong.whose


# --- the evidence

Signs = tuple[tuple[int, int, Sign], ...]
"""What speaks against the positions [start, end)."""


def signs(positions: Iterable[Interval], sign: Sign) -> Signs:
    return tuple((start, end, sign) for start, end in positions if start < end)


class InPair(NamedTuple):
    """What hooks, writes and reports say of a load in one pair. ``watched``: what was written there is
    seen."""

    signs: Signs = ()
    watched: bool = False

    def meets(self, wrong: Wrong) -> bool:
        """Whether a part of that block is known to be lost there."""
        return any(
            start < wrong.end and end > wrong.start and sign.end is not LoadEnd.NOT_OBSERVED
            for start, end, sign in self.signs
        )


@dataclass(frozen=True)
class Gathered:
    """All of it, in every pair. ``waited_ns``, ``measured``, ``begun``: as in Arrived."""

    in_pairs: Mapping[InPair, int]  # the pairs of which it is all that is known, a bit each
    waited_ns: int = -1
    begun: bool = False

    @cached_property
    def measured(self) -> bool:
        return all(one.watched for one in self.in_pairs)

    @property
    def came_late(self) -> bool:
        """Whether slots were seen to be written after their use."""
        signs = (sign for one in self.in_pairs for _, _, sign in one.signs)
        return self.measured and any(sign.end == LoadEnd.USED_BEFORE for sign in signs)


@dataclass(frozen=True)
class LoadContents:
    """What the fingerprints of its blocks say of a load, and by which exceptions it may have failed.
    ``lacking``: as of a LoadToken."""

    wrong: Sequence[Wrong] = ()
    proved: Sequence[Returned] = ()
    caught: tuple[str, ...] = ()
    lacking: bool = False


def bits(first: int, count: int = 1) -> int:
    """A set of pairs, a bit each."""
    return ((1 << count) - 1) << first


def judge(accepted: Interval, gathered: Gathered, contents: LoadContents, engine: Engine) -> Arrived:
    """What became of the ``accepted`` positions in each pair."""
    lost: dict[tuple[Part, ...], int] = defaultdict(int)
    reasons: dict[LoadEnd, dict[str, None]] = defaultdict(dict)
    pairs_of: dict[LoadEnd, int] = defaultdict(int)
    grades: dict[LoadEnd, Grade] = {}
    proved = 0
    for one, pairs in _alike(gathered.in_pairs, contents):
        parts: list[Part] = []
        for start, end, token in _tokens(accepted, one, pairs, gathered, contents):
            found = decide(token)
            grades[found.end] = min(found.grade, grades.get(found.end, found.grade))
            proved += (end - start) * pairs.bit_count() if found.proved else 0
            if found.end is not LoadEnd.LOADED:
                reasons[found.end].update(dict.fromkeys(found.why))
                pairs_of[found.end] |= pairs if found.here else 0
                follows = parts and parts[-1][1:] == (start, found.end)
                parts.append((parts.pop()[0] if follows else start, end, found.end))
        if parts:
            lost[tuple(parts)] |= pairs
    every = [(worker.rank, layer) for worker in engine.workers for layer in worker.kv_layers]
    return Arrived(
        gathered.waited_ns, gathered.measured, gathered.begun, dict(lost), proved,
        {end: tuple(why)[:_MAX_REASONS] for end, why in reasons.items() if why},
        {end: _places(every, pairs) for end, pairs in pairs_of.items() if pairs},
        grades,
    )  # fmt: skip


def _places(every: Sequence[Place], pairs: int) -> tuple[Place, ...]:
    """The first few of these pairs."""
    return tuple(place for at, place in enumerate(every) if pairs >> at & 1)[:_MAX_PLACES]


def _alike(in_pairs: Mapping[InPair, int], contents: LoadContents) -> list[tuple[InPair, int]]:
    """The pairs with the same evidence, that of the fingerprints too, in their order."""
    found = [(one, pairs) for one, pairs in in_pairs.items() if pairs]
    for some in {*(one.pairs for one in contents.wrong), *(pairs for pairs, _ in contents.proved)}:
        found = [(one, part) for one, pairs in found for part in (pairs & some, pairs & ~some) if part]
    return sorted(found, key=lambda one: one[1] & -one[1])


def _tokens(
    accepted: Interval, one: InPair, pairs: int, gathered: Gathered, contents: LoadContents
) -> Iterator[tuple[int, int, LoadToken]]:
    """The accepted positions in these pairs, as intervals with the same evidence."""
    wrong = [found for found in contents.wrong if found.pairs & pairs]
    proved = intersect([accepted], returned(contents.proved, pairs))
    explained = [
        found
        for found in wrong
        if any(
            other.meets(found) and of & (found.of or found.pairs if found.unlike else pairs)
            for other, of in gathered.in_pairs.items()
        )
    ]
    silent = union((start, end) for start, end, sign in one.signs if sign.end in _NOT_THERE)
    doubted = bool(intersect(silent, proved))
    broken_off = bool(contents.caught) and any(found.unwritten for found in wrong)
    known = [*((start, end) for start, end, _ in one.signs), *((w.start, w.end) for w in wrong), *proved]
    inside = {mark for interval in known for mark in interval if accepted[0] < mark < accepted[1]}
    for start, end in pairwise(sorted({*accepted, *inside})):
        other = next((found for found in wrong if found.start <= start < found.end), None)
        yield start, end, LoadToken(
            tuple(sign for low, high, sign in one.signs if low <= start < high), gathered.measured,
            covers(proved, start), other, other in explained, bool(proved), doubted, contents.caught,
            broken_off, contents.lacking,
        )  # fmt: skip
