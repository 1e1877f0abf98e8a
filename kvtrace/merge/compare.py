"""What one engine sent of a prompt, and what the other one did with it: numbers of a joined request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvtrace.merge.merged import LOADED_AND_LOST, NEVER_ASKED, NOT_ACCEPTED, NOT_OFFERED, Joined, Sums
from kvtrace.merge.sides import LOCAL, LOST, PARTLY, RECEIVED, SENT, UNSEEN, EngineSide, Stretch


def numbers(there: EngineSide, here: EngineSide) -> dict[str, Any]:
    """The counts of :class:`~kvtrace.merge.merged.Joined`: positions of the shorter prompt, by number.
    Whether the tokens are the same is not recorded: the engines say that they handed the id over."""
    prompt = min(there.prompt, here.prompt)
    found: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    why: Counter[str] = Counter()
    for start, end, one, two in _both(there.stretches, here.stretches, prompt):
        size = end - start
        if one.word == SENT:
            sent[one.grade.label] += size
        if two.word == RECEIVED:
            received[two.grade.label] += size
        again = one.word == SENT and two.computed
        for name, holds in (
            ("computed", one.computed), ("reused", one.word == LOCAL), ("partly", one.word == PARTLY),
            ("unseen", one.word == UNSEEN), ("lost", two.word == LOST), ("local", two.word == LOCAL),
            ("computed_here", two.computed), ("again", again),
            ("unsent", two.word == RECEIVED and one.word not in (SENT, PARTLY)),
        ):  # fmt: skip
            found[name] += size if holds else 0
        last = int(again and end == here.prompt)
        found["last"] += last
        if again:
            why.update(_why_again(here, start, end - last))
    counts = {"offered": here.offered, "accepted": here.accepted, "prompt": prompt, **found}
    return {**counts, "sent_by": dict(sent), "received_by": dict(received), "again_by": dict(+why)}


def _why_again(here: EngineSide, start: int, end: int) -> dict[str, int]:
    """Why positions that had been sent were computed here: how many were not offered, ..."""
    if here.offered < 0:
        return {NEVER_ASKED: end - start}
    accepted = min(max(start, here.start + here.accepted), end)
    offered = min(max(accepted, here.start + here.offered), end)
    return {LOADED_AND_LOST: accepted - start, NOT_ACCEPTED: offered - accepted, NOT_OFFERED: end - offered}


def _both(
    one: Sequence[Stretch], two: Sequence[Stretch], prompt: int
) -> Iterator[tuple[int, int, Stretch, Stretch]]:
    """Both sides' stretches, which are in order, cut at the edges of either."""
    i = k = 0
    while i < len(one) and k < len(two):
        start, end = max(one[i].start, two[k].start), min(one[i].end, two[k].end, prompt)
        if start < end:
            yield start, end, one[i], two[k]
        if one[i].end <= two[k].end:
            i += 1
        else:
            k += 1


def added(sums: Sums, one: Joined) -> Sums:
    """The sums with one more request."""
    total = {name: value for name, value in vars(sums).items() if isinstance(value, int)}
    for name in total:
        total[name] += 1 if name == "joined" else getattr(one, name)
    return Sums(
        **total,
        sent_by=dict(Counter(sums.sent_by) + Counter(one.sent_by)),
        received_by=dict(Counter(sums.received_by) + Counter(one.received_by)),
        again_by=dict(Counter(sums.again_by) + Counter(one.again_by)),
    )
