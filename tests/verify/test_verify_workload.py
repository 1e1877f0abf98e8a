"""A workload is a line of text: what is written is what is asked."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings

from kvtrace.verify.answers import VerifyError
from kvtrace.verify.drive import Driver, Job
from kvtrace.verify.engine import Reply, RequestToMake
from kvtrace.verify.evidence import Evidence
from kvtrace.verify.observed import EngineFacts
from kvtrace.verify.property import workloads as asked_of
from kvtrace.verify.registry import ORDER, PROPERTIES
from kvtrace.verify.shrink import workloads
from kvtrace.verify.workload import FIRST_TOKEN, LAST_TOKEN, Streams, parse

FACTS = EngineFacts(block=32, budget=512, longest=2048, seqs=16, unit=64)

ROOT = Path(__file__).resolve().parents[2]


def test_a_workload_is_what_its_text_says() -> None:
    workload = parse("a96 b64&c64b3@x*8 ; restart a96! d5^ a96+*2")
    first, second = workload.rounds
    assert [len(batch) for batch in first.batches] == [1, 2] and second.act == "restart"
    together = first.batches[1][1]
    assert (together.length, together.salt, together.generate) == (67, "x", 8)
    assert second.batches[0][0].leaves and second.batches[1][0].preempted
    assert second.batches[2][0].goes_on and not first.batches[0][0].goes_on
    assert parse(workload.text) == workload
    (image,) = parse("a96~2#3@x*8!").prompts
    assert image.asker == ("x", 2, 3) and image.text == "a96~2#3@x*8!"


@given(workloads(FACTS))
@settings(max_examples=50, deadline=None)
def test_what_is_generated_can_be_written_and_read(workload: object) -> None:
    assert parse(workload.text) == workload  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "a96 ;", "96", "a0", "a96&", "a96!!", "A96", "restart a96", "a96*0"])
def test_what_is_no_workload_is_a_usage_error(text: str) -> None:
    with pytest.raises(VerifyError):
        parse(text)


def test_prompts_share_exactly_what_their_pieces_share() -> None:
    streams = Streams(7)
    one, other = (streams.tokens("p", prompt) for prompt in parse("a40b9 a64").prompts)
    assert one[:40] == other[:40] and one[40:] != other[40:49]
    assert all(FIRST_TOKEN <= token <= LAST_TOKEN for token in (*one, *other))


def test_a_prompt_that_goes_on_has_its_answer_behind_it() -> None:
    class Engine:
        made: ClassVar[list[RequestToMake]] = []

        def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
            self.made += requests
            return [Reply(tuple(range(one.generate))) for one in requests]

        def gone(self) -> str:
            return ""

    driver = Driver(Engine(), Streams(7), lambda: Evidence(None, {}))  # type: ignore[arg-type]
    driver.run([Job("one", parse("a9*3 b9*2 a9+*4")), Job("two", parse("a9+"))])
    first, _, on, alone = (one.tokens for one in Engine.made)
    assert on == [*first, 0, 1, 2] and len(alone) == 9


def test_other_names_and_seeds_have_other_tokens() -> None:
    prompt = parse("a64").prompts[0]
    assert Streams(7).tokens("p", prompt) == Streams(7).tokens("p", prompt)
    assert Streams(7).tokens("p", prompt) != Streams(7).tokens("q", prompt)
    assert Streams(7).tokens("p", prompt) != Streams(8).tokens("p", prompt)


@pytest.mark.parametrize(
    "facts",
    [
        FACTS,
        EngineFacts(block=16, budget=8192, longest=32768, seqs=256, unit=256),
        EngineFacts(block=32, budget=512, longest=600, seqs=2, unit=0),
        EngineFacts(block=128, budget=128, longest=1024, seqs=1, unit=512),
    ],
)
def test_every_property_asks_what_can_be_read(facts: EngineFacts) -> None:
    assert len({one.id for one in PROPERTIES}) == len(PROPERTIES)
    for one in PROPERTIES:
        text = one.workload(facts)
        if text:
            assert parse(text).text == " ".join(text.split()), one.id


def test_the_list_names_every_file_of_properties() -> None:
    files = (ROOT / "kvtrace" / "verify" / "properties").glob("[a-z]*.py")
    with_properties = {path.stem for path in files if "PROPERTIES" in path.read_text(encoding="utf-8")}
    assert with_properties == set(ORDER), "each file of kvtrace/verify/properties stands in registry.ORDER"


def test_every_property_is_in_the_docs_and_the_accuracy_table() -> None:
    docs = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    table = runpy.run_path(str(ROOT / "tests" / "accuracy" / "harness" / "verified.py"))["GROUPS"]
    counted = {name for names in table.values() for name in names}
    for one in PROPERTIES:
        assert f"`{one.id}`" in docs or f"`{one.id.removeprefix('store')}`" in docs, one.id
        assert one.id in counted, one.id


def test_prompts_that_do_not_fit_are_left_out_and_no_others() -> None:
    workload = parse("a96&b64 c500 ; restart a96")
    assert workload.fitting(520) == workload
    short = workload.fitting(400)
    assert short is not None and short.text == "a96&b64 ; restart a96"
    assert workload.fitting(80) is None


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (66, "a208 b2011 ; a208"),
        (96, "a208 b1531&c1499 ; a208"),
        (0, ""),
        (7, ""),
        (4096, ""),
    ],  # too few, too many
)
def test_all_blocks_are_taken_by_as_many_prompts_as_it_needs(blocks: int, text: str) -> None:
    """Each ends inside its last block, and none is preempted for another."""
    facts = replace(FACTS, blocks=blocks)
    assert next(one for one in PROPERTIES if one.id == "blocks-reused").workload(facts) == text


def test_large_units_are_asked_within_them_too() -> None:
    facts = EngineFacts(block=64, budget=512, longest=1024, seqs=4, unit=256)
    asked = dict(asked_of(PROPERTIES, facts))["nobody-else"]
    assert {"s64t256", "s64u256"} <= {prompt.text for prompt in asked.prompts}
