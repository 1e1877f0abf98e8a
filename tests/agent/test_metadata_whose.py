"""Whose a list of numbers is: found by the tokens that it begins and ends with."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace.agent.metadata import read
from kvtrace.agent.metadata.step_requests import StepRequests

from .holding import BLOCK, Meta, Req, slots, step

_NUMBERS = st.integers(0, 3)
"""Few token ids: prompts begin alike, and parts of one stand in another."""


@st.composite
def _scheduled(draw: st.DrawFn) -> dict[str, Req]:
    found = {}
    for number in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(8, 40))
        before = draw(st.integers(0, prompt - 1))
        blocks = list(range(100 * number + 11, 100 * number + 11 + -(-prompt // BLOCK)))
        tokens = [7 + draw(_NUMBERS) for _ in range(prompt)]
        found[f"req-{number}"] = Req(
            (blocks,), prompt, before, draw(st.integers(1, prompt - before)), tokens=tokens
        )
    return found


@given(_scheduled(), st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_read_is_what_asking_every_request_gives(
    requests: dict[str, Req], data: st.DataObject
) -> None:
    jobs = []
    for req in requests.values():
        start = data.draw(st.integers(0, req.prompt - 8))
        end = data.draw(st.integers(start + 8, req.prompt))
        job = SimpleNamespace(token_ids=req.tokens[start:end], is_store=data.draw(st.booleans()))
        if data.draw(st.booleans()):
            job.slot_mapping = slots(req.tables[0], start, end)
        if data.draw(st.booleans()):
            job.token_ids = [0, *job.token_ids]
        jobs.append(job)

    class AskingAll(StepRequests):
        def with_tokens(self, first: list[int], last: list[int]) -> list[str]:
            return list(self.scheduled)

    some, every = step(requests), step(requests)
    every.__class__ = AskingAll
    assert read(Meta(jobs=jobs), some) == read(Meta(jobs=jobs), every)


def test_the_requests_of_a_step_are_not_asked_one_by_one() -> None:
    asked = []

    class Counting(StepRequests):
        def tables(self, req_id: str) -> list[list[int]]:
            asked.append(req_id)
            return super().tables(req_id)

    requests = {f"req-{n}": Req(([n + 1],), BLOCK, now=BLOCK) for n in range(64)}
    jobs = [
        SimpleNamespace(token_ids=req.tokens, slot_mapping=slots(req.tables[0]), is_store=True)
        for req in requests.values()
    ]
    counting = step(requests)
    counting.__class__ = Counting
    assert read(Meta(jobs=jobs), counting).store_entries == 64
    assert len(asked) < 64 * 16
