"""The smallest workload that shows a failure: Hypothesis (extra ``kvtrace[verify]``) makes workloads and
shrinks those that fail, while the engine stays up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvtrace.verify.answers import Answer
from kvtrace.verify.drive import Driver, Job
from kvtrace.verify.observed import EngineFacts, Settings
from kvtrace.verify.property import Property
from kvtrace.verify.suite import observed
from kvtrace.verify.workload import Piece, Prompt, Round, Workload, parse

_MOST_EXAMPLES = 200
_MOST_PROMPTS = 3


def available() -> bool:
    """Whether Hypothesis is there."""
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        return False
    return True


class Shrinker:
    """Looks for small failing workloads on an engine that is up.

    Args:
        seconds: for each property, about.
    """

    def __init__(self, driver: Driver, facts: EngineFacts, settings: Settings, seconds: float) -> None:
        self._driver, self._facts, self._settings = driver, facts, settings
        self._seconds = seconds
        self._number = 0
        self._deaths = len(driver.deaths)

    def smallest(self, one: Property, known: str) -> tuple[str, str]:
        """The smallest workload found for which the property fails, smaller than ``known``, and what is said
        of it: it may fail for another reason. "" none was found."""
        best = [(parse(known), "")]
        until = time.monotonic() + self._seconds

        def fails(workload: Workload) -> bool:
            if time.monotonic() > until or self._ended:
                return False
            said = self._fails(one, workload)
            if said and size(workload) < size(best[0][0]):
                best[:] = [(workload, said)]
            return bool(said)

        _search(self._facts, fails)
        found, says = best[0]
        return (found.text, says) if says else ("", "")

    @property
    def _ended(self) -> bool:
        """Starting the engine anew for each try would take too long."""
        return bool(self._driver.died) or len(self._driver.deaths) > self._deaths

    def _fails(self, one: Property, workload: Workload) -> str:
        """What is said of a failure; "" it does not fail."""
        self._number += 1
        first = len(self._driver.asked)
        self._driver.run([Job(f"smaller-{self._number}", workload)])
        if self._driver.stopped:
            return ""
        what = observed(self._driver, self._facts, self._settings, first)
        verdict = one.judge(list(what.asked), what)
        return verdict.says if verdict.answer is Answer.FAILED else ""


def size(workload: Workload) -> tuple[int, int]:
    """Prompts, and their tokens."""
    return len(workload.prompts), sum(prompt.length for prompt in workload.prompts)


def _search(facts: EngineFacts, fails: Callable[[Workload], bool]) -> None:
    import hypothesis

    settings = hypothesis.settings(
        max_examples=_MOST_EXAMPLES,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        hypothesis.find(workloads(facts), fails, settings=settings)
    except hypothesis.errors.HypothesisException:
        pass  # none was found in time, or it fails now and then: what was found is known


def workloads(facts: EngineFacts) -> Any:
    """A strategy: prompts that are asked, one by one or together, and asked again."""
    from hypothesis import strategies as st

    longest = max(2, min(facts.longest - 32, 2 * facts.budget + 2 * facts.block))
    edges = {
        length
        for one in (facts.block, facts.unit, facts.budget)
        for length in (one - 1, one, one + 1, one + one // 2, 2 * one + one // 2)
        if 0 < length <= longest
    }
    lengths = st.one_of(st.sampled_from(sorted(edges)), st.integers(1, longest))
    piece = st.builds(Piece, st.sampled_from("abc"), lengths)
    prompt = st.builds(
        lambda pieces, salt: Prompt(tuple(pieces), salt),
        st.lists(piece, min_size=1, max_size=2),
        st.sampled_from(("", "", "x", "y")),
    ).filter(lambda one: one.length <= longest)
    prompts = st.lists(prompt, min_size=1, max_size=_MOST_PROMPTS)

    def made(first: list[Prompt], later: list[Prompt], together: bool, again: bool) -> Workload:
        def batches(some: list[Prompt]) -> tuple[tuple[Prompt, ...], ...]:
            return (tuple(some),) if together else tuple((one,) for one in some)

        second = batches(first if again else later)
        return Workload((Round("", batches(first)), Round("reset", second)))

    return st.builds(made, prompts, prompts, st.booleans(), st.sampled_from((True, True, False)))
