"""How well the numbers of a ledger are seen, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvtrace.ledger.run import Trust
from kvtrace.terms import MEANS, MEANS_OF_LOADS, Grade
from kvtrace.words import count, listed, peer, plural

Grades = Mapping[Grade, float]
"""Amounts (token-layers or tokens) by how well they are seen."""


def weakest(grades: Grades) -> Grade | None:
    """The least grade of what there is, None where there is nothing."""
    return min((grade for grade, amount in grades.items() if amount), default=None)


def added(parts: Iterable[Grades]) -> Grades:
    """The amounts of several outcomes in one; what is not observed has no grade to speak of."""
    found: Counter[Grade] = Counter()
    for part in parts:
        for grade, amount in part.items():
            if grade != Grade.NOT_OBSERVED:
                found[grade] += amount  # type: ignore[assignment]
    return found


def shown(parts: Iterable[Grades]) -> Grades:
    """The grades that stand beside several outcomes: of each its weakest."""
    least = (weakest(part) for part in parts)
    return Counter(grade for grade in least if grade not in (None, Grade.NOT_OBSERVED))


def level(grades: Grades, trust: Trust | None = None) -> str:
    """The older word for it: ``measured`` where everything was seen at the KV cache or beyond, ``mixed``
    where a part of it was, else ``declared``."""
    least = weakest(grades)
    if least is not None and least >= Grade.READ:
        return "measured"
    if trust is not None and trust.measured:
        return "measured" if trust.measured >= trust.calls else "mixed"
    return "mixed" if any(n for grade, n in grades.items() if grade >= Grade.READ) else "declared"


def note(grades: Grades, loads: bool = False) -> str:
    """What the grades of a ledger mean, those that it has."""
    means = MEANS_OF_LOADS if loads else MEANS
    there = sorted((grade for grade, amount in grades.items() if amount), reverse=True)
    return "; ".join(f"{grade.label}: {means[grade]}" for grade in there)


def by_grade(grades: Grades) -> str:
    """``512 written, 128 declared``, the best first."""
    there = sorted((grade for grade, amount in grades.items() if amount >= 0.05), reverse=True)
    return ", ".join(f"{count(grades[grade])} {grade.label}" for grade in there)


def sent_to(sent: Mapping[str, float]) -> str:
    """``512 of the read ones were sent to 10.0.0.2:6379, and what it keeps was not seen``; "" of none.

    Args:
        sent: peer -> amount.
    """
    amount = sum(sent.values())
    if amount < 0.05:
        return ""
    return f"{count(amount)} of the read ones were sent to {peers(sent)}, {kept_unseen(sent)}"


def peers(sent: Mapping[str, float]) -> str:
    """``10.0.0.2:6379``: the peers, those that got most first."""
    return listed(map(peer, sorted(sent, key=lambda name: (-sent[name], name))))


def kept_unseen(sent: Mapping[str, float]) -> str:
    return f"and what {'it keeps' if len(sent) == 1 else 'they keep'} was not seen"


def in_calls(trust: Trust) -> str:
    """In how many store calls it was seen which slots were read."""
    if not trust.measured:
        return ""
    return f"the slots read were seen in {count(trust.measured)} of {plural(trust.calls, 'store call')}"


def unseen(trust: Trust) -> str:
    """Why nothing but the metadata tells of saves."""
    return (
        f"in none of {plural(trust.calls, 'store call')} it was seen which slots were read "
        f"({count(trust.blind)} were watched)"
    )
