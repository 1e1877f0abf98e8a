"""Which steps are timed on the device, or watched, so that this stays within its budget. Pure."""

from __future__ import annotations

_SMOOTH = 0.25
_MOST_SAVED = 2.0
"""Timed steps that can be saved up: an hour of untimed steps must not buy a burst of timed ones."""


class BudgetAccount:
    """An account in nanoseconds: steps pay ``budget`` of their time in, timing pays its cost out.

    A step is timed when the account holds what a timed step costs. So the period adapts by
    itself, and over a run the timing costs at most ``budget`` of the steps' time and one timed step
    more (the first one is taken on credit).

    Args:
        mode: ``sampled``, or ``full`` for every step.
        budget: share of the steps' host time, 0.01 for 1 %.
        credit: ns that the account holds at the beginning, and may save up to again.
        cost: ns that a step is taken to cost before one was seen.

    Attributes:
        busy: ns of host time that steps took since the account was last asked: added to by whoever sees them.
    """

    def __init__(self, mode: str, budget: float, credit: int = 0, cost: int = 0) -> None:
        self._always = mode == "full"
        self._budget = budget
        self._credit = credit
        self._saved = float(credit)
        self._cost = float(cost)
        self.busy = 0

    def take(self) -> bool:
        """Whether the step that begins is to be timed."""
        return self.holds(self._cost)

    def holds(self, cost: float) -> bool:
        """Whether the account holds that many ns."""
        self._pay_in()
        return self._always or self._saved >= cost

    def _pay_in(self) -> None:
        self._saved += self.busy * self._budget
        self.busy = 0
        if self._cost or self._credit:
            self._saved = min(self._saved, max(self._cost * _MOST_SAVED, self._credit))

    def spent(self, cost: int) -> None:
        """Timing took ``cost`` ns."""
        self._pay_in()
        self._saved -= cost

    def settle(self) -> None:
        """What was spent so far is forgiven."""
        self._pay_in()
        self._saved = max(self._saved, float(self._credit))

    def learned(self, cost: int) -> None:
        """A timed step is done with and took ``cost`` ns in all (paid for by :meth:`spent`)."""
        self._pay_in()
        self._cost = cost if not self._cost else self._cost + (cost - self._cost) * _SMOOTH
