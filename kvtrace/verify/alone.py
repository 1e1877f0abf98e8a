"""What did not come back in the midst of a suite may have been dropped to make room for other prompts: asked
alone, with nothing in between, it comes back. That is no broken promise, but a question."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from kvtrace.verify.answers import Answer, Answered, Verdict
from kvtrace.verify.drive import Driver, Job
from kvtrace.verify.evidence import Evidence
from kvtrace.verify.observed import EngineFacts, Observed, Settings
from kvtrace.verify.property import Property
from kvtrace.verify.suite import observed
from kvtrace.verify.workload import parse

_ALONE = "alone"


class AskedAlone:
    """Asks on behind a suite, on an engine that is still up."""

    def __init__(
        self, driver: Driver, look: Callable[[], Evidence], facts: EngineFacts, settings: Settings
    ) -> None:
        self._driver, self._look, self._facts, self._settings = driver, look, facts, settings
        self._asked: dict[str, Observed] = {}

    def failing(self, failed: Iterable[tuple[Property, Verdict]]) -> dict[str, str]:
        """Property -> the first case of its verdict's that fails alone, too; "" none does. Nothing of those
        that could not all be asked."""
        found = {}
        for one, verdict in failed:
            for case in verdict.alone:
                what = self._of(case)
                if self._driver.died:
                    break
                nothing = not any(asked.given for asked in what.asked)
                if nothing or one.judge(list(what.asked), what).answer is Answer.FAILED:
                    found[one.id] = case
                    break
            else:
                found[one.id] = ""
        return found

    def _of(self, case: str) -> Observed:
        if case not in self._asked:
            first = len(self._driver.asked)
            self._driver.run([Job(f"{_ALONE}-{len(self._asked)}", parse(case))])
            what = observed(self._driver, self._look(), self._facts, self._settings)
            self._asked[case] = replace(what, asked=[one for one in what.asked if one.number >= first])
        return self._asked[case]


def judged_alone(one: Answered, case: str) -> Answered:
    """A failure with what came of it alone. ``case``: the one that fails alone, "" where none does."""
    verdict = one.verdict
    if verdict.answer is not Answer.FAILED or case:
        return replace(one, verdict=replace(verdict, case=case)) if case else one
    says = f"{verdict.says}; asked alone it comes back"
    asks = "dropped in between: is that meant? Give the store room for all of verify's prompts"
    return replace(
        one, verdict=replace(verdict, answer=Answer.NOT_OBSERVED, says=says, evidence=[asks], case="")
    )
