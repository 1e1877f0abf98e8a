"""What did not come back in the midst of a suite may have been dropped to make room for other prompts: asked
alone, with nothing in between, it comes back. That is no broken promise, but a question. A store that drops
may drop even alone what is more than ever came back from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from kvtrace.verify.answers import Answer, Answered, Verdict
from kvtrace.verify.drive import Driver, Job
from kvtrace.verify.observed import EngineFacts, Observed, Settings
from kvtrace.verify.property import Property
from kvtrace.verify.suite import observed
from kvtrace.verify.workload import parse

_ALONE = "alone"


class CasesAlone(NamedTuple):
    """What came of a property's cases, each by itself: the first that fails, too, "" none; and one that may
    be more than the store has room for, "" none."""

    fails: str = ""
    larger: str = ""


class AskedAlone:
    """Asks on behind a suite, on an engine that is still up."""

    def __init__(self, driver: Driver, facts: EngineFacts, settings: Settings) -> None:
        self._driver, self._facts, self._settings = driver, facts, settings
        self._asked: dict[str, Observed] = {}

    def failing(self, failed: Iterable[tuple[Property, Verdict]]) -> dict[str, CasesAlone]:
        """By property. Nothing of those that could not all be asked."""
        found = {}
        room = 0  # tokens of what came back by itself, at most
        for one, verdict in failed:
            alone = CasesAlone()
            for case in verdict.alone:  # the shortest first
                what = self._of(case)
                if self._driver.died:
                    break
                judged, size = one.judge(list(what.asked), what), _size(what)
                gone = not any(asked.given for asked in what.asked) or bool(judged.alone)
                if gone and 0 < room < size:
                    alone = CasesAlone(larger=case)
                elif gone or judged.answer is Answer.FAILED:
                    found[one.id] = CasesAlone(case)
                    break
                else:
                    room = max(room, size)
            else:
                found[one.id] = alone
        return found

    def _of(self, case: str) -> Observed:
        if case not in self._asked:
            first = len(self._driver.asked)
            self._driver.run([Job(f"{_ALONE}-{len(self._asked)}", parse(case))])
            self._asked[case] = observed(self._driver, self._facts, self._settings, first)
        return self._asked[case]


def _size(what: Observed) -> int:
    """Tokens of what was asked, and generated, each prompt once."""
    longest: dict[int, int] = {}
    for one in what.asked:
        first = one.tokens[0]
        longest[first] = max(longest.get(first, 0), len(one.tokens) + len(one.reply.tokens))
    return sum(longest.values())


def judged_alone(one: Answered, alone: CasesAlone) -> Answered:
    """A failure with what came of it alone."""
    verdict = one.verdict
    if verdict.answer is not Answer.FAILED or alone.fails:
        return replace(one, verdict=replace(verdict, case=alone.fails)) if alone.fails else one
    says = f"{verdict.says}; asked alone it comes back"
    if alone.larger:
        says += f", but for what may be more than the store has room for ({alone.larger})"
    asks = "dropped in between: is that meant? Give the store room for all of verify's prompts"
    return replace(
        one, verdict=replace(verdict, answer=Answer.NOT_OBSERVED, says=says, evidence=[asks], case="")
    )
