"""What tells requests from others is said where it can hardly be chance, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diagnosed import analyse, served, the
from synth import Sim
from test_load_rules import again

from kvtrace.causes.case import Case, make_case
from kvtrace.causes.evidence import unlike
from kvtrace.causes.evidence.part import LOADS, PROMPTS, part_of_each
from kvtrace.ledger import read_run
from kvtrace.ledger.intervals import Interval


def case_of(tmp_path: Path, lengths: list[int]) -> Case:
    served(tmp_path, lengths, batched=512).write()
    return make_case(read_run(tmp_path))


HIT = "begun behind a hit in the GPU's own prefix cache"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chunks": 2, "first_end": 32}, "computed in several prefill chunks"),
        ({"local": 32}, HIT),
        ({"external": 32}, "begun with tokens that the connector was to load"),
        ({"preemptions": 1}, "preempted"),
        ({"status": "FINISHED_ABORTED"}, "aborted"),
        ({"chunk_step": 1}, "begun in one step with others"),
        ({"digest": 7}, "prompts that came before"),
    ],
)
def test_a_property_is_told_and_few_by_their_lack(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    case = case_of(tmp_path, [70] * 6)
    some, others = [1, 2, 3], [0, 4, 5]
    for row in [0, *some] if "digest" in fields else some:  # the first of a prompt repeats none
        for name, value in fields.items():
            setattr(case.requests[row], name, value)
    assert unlike.told_apart(case, some, others, unlike.SAVED) == {
        (words, True): f"{words}: all 3 of these, none of the 3 others of which some was saved"
    }
    lack = f"{words}: none of these 3, all of the 3 others of which some was saved"
    found = unlike.told_apart(case, some, others, unlike.FOUND)
    assert bool(found) == (words not in unlike._AFTER_LOOKUP)  # what comes later explains no answer
    by_lack = {(words, False): lack} if "digest" in fields else {}
    assert unlike.told_apart(case, others, some, unlike.SAVED) == by_lack


def test_what_comes_behind_another_in_a_step_is_told(tmp_path: Path) -> None:
    """A generator that the first one exhausts; a name that two equal prompts share."""
    case = case_of(tmp_path, [70] * 6)
    for row, request in enumerate(case.requests):
        request.chunk_step, request.external = 1 + row // 2, 32
    told = unlike.told_apart(case, [1, 3, 5], [0, 2, 4], unlike.CAME)
    assert unlike.words_of(told) == ["not the first that loads in its step"]
    for request in case.requests:
        request.external = 0
    told = unlike.told_apart(case, [1, 3, 5], [0, 2, 4], unlike.CAME)
    assert unlike.words_of(told) == ["not the first that began in its step"]
    for request in case.requests[:4]:
        request.digest = 7 + request.chunk_step
    told = unlike.told_apart(case, [0, 1, 2, 3], [4, 5], unlike.CAME)
    assert unlike.words_of(told)[0] == "begun in one step with the same prompt"


def test_loads_tell_by_their_size_where_prompts_do_not(tmp_path: Path) -> None:
    case = case_of(tmp_path, [200, 210, 205, 200, 220, 215])
    for request, loaded in zip(case.requests, [160, 192, 32, 64, 96, 224], strict=True):
        request.external = loaded
    told = unlike.told_apart(case, [0, 1, 5], [2, 3, 4], unlike.CAME)
    assert unlike.words_of(told) == ["loads of 160 tokens or more"]
    assert not unlike.told_apart(case, [0, 1], [2, 3, 4], unlike.CAME)  # of five that is so by chance


@pytest.mark.parametrize(
    ("lost", "of", "said"),
    [
        ([(64, 96), (32, 64), (96, 128)], LOADS, "of each of these loads the last 32 tokens alone"),
        ([(32, 96), (32, 64), (96, 128)], LOADS, "of each of these loads the last tokens alone"),
        ([(0, 32), (0, 32), (0, 32)], PROMPTS, "of each of these prompts the first 32 tokens alone"),
        ([(0, 32), (0, 32), (0, 64)], PROMPTS, ""),
        ([(64, 96), (32, 64), (96, 128)], PROMPTS, ""),
        ([(0, 96), (0, 64), (0, 128)], LOADS, ""),
        ([(0, 32), (0, 32)], LOADS, ""),
        ([(0, 32), (32, 64), (0, 32)], LOADS, ""),
    ],
)
def test_the_same_part_of_each_is_told(lost: list[Interval], of: str, said: str) -> None:
    whole = [(0, 96), (0, 64), (0, 128)]
    found = part_of_each([([one], of_it) for one, of_it in zip(lost, whole, strict=False)], of)
    assert found == ([said] if said else [])


def test_lengths_tell_by_the_longest_and_the_shortest(tmp_path: Path) -> None:
    case = case_of(tmp_path, [70, 75, 200, 210, 220, 72])
    assert [*unlike.told_apart(case, [0, 1, 5], [2, 3, 4], unlike.CAME).values()] == [
        "prompts of 75 tokens at most: all 3 of these; of the 3 others that came whole the shortest has 200"
    ]
    assert [*unlike.told_apart(case, [2, 3, 4], [0, 1, 5], unlike.CAME).values()] == [
        "prompts of 200 tokens or more: all 3 of these; of the 3 others that came whole the longest has 75"
    ]
    assert not unlike.told_apart(case, [0, 2, 5], [1, 3, 4], unlike.CAME)
    assert not unlike.told_apart(case, [0, 1], [2, 3, 4], unlike.CAME)  # of five that is so by chance


@pytest.mark.parametrize(
    ("mine", "others", "told"), [(2, 2, False), (2, 3, True), (3, 2, True), (1, 8, False), (1, 9, True)]
)
def test_of_a_few_requests_nothing_is_told(tmp_path: Path, mine: int, others: int, told: bool) -> None:
    """Of four requests two alike are so by chance once in six."""
    case = case_of(tmp_path, [70] * (mine + others))
    for request in case.requests[:mine]:
        request.preemptions = 1
    found = unlike.told_apart(case, range(mine), range(mine, mine + others), unlike.SAVED)
    who = "this one" if mine == 1 else f"all {mine} of these"
    assert [*found.values()] == (
        [f"preempted: {who}, none of the {others} others of which some was saved"] if told else []
    )


def test_one_exception_to_it_and_it_is_not_told(tmp_path: Path) -> None:
    case = case_of(tmp_path, [70] * 8)
    for request in case.requests[:5]:
        request.preemptions = 1
    assert not unlike.told_apart(case, range(4), range(4, 8), unlike.SAVED)
    assert not unlike.told_apart(case, [], range(8), unlike.SAVED)


def test_requests_that_load_and_are_not_offered_are_told(tmp_path: Path) -> None:
    """The connector passes over whatever it loads for: "by a rule that is not known"."""
    sim = Sim(tmp_path, ints={"unit": 32})
    again(sim, [64, 96, 128, 300, 310, 320], [64, 96, 128, 0, 0, 0], [0, 0, 0, 32, 32, 32])
    found = the(analyse(sim), "metadata-has-no-store")
    assert "of 3 of 6 prompts for storing, those that it loads for." in found.title
    assert found.remedy[0].startswith("See whether build_connector_meta passes over requests that load")


def test_lookups_that_miss_are_told_from_those_that_find(tmp_path: Path) -> None:
    """Prompts that are too long to be found, by whatever rule of the connector's."""
    sim = Sim(tmp_path, ints={"unit": 32})
    short, long = [70, 80, 90], [200, 210, 220]
    saved = [64, 64, 64, 192, 192, 192]
    again(sim, [*short, *long] * 2, saved + [0] * 6, [0] * 6 + [64, 64, 64, 0, 0, 0])
    diagnosis = analyse(sim)
    for ident in ("lookup-miss", "key-mismatch"):  # one lookup each, of one cause
        assert the(diagnosis, ident).evidence[0] == (
            "prompts of 200 tokens or more: all 3 of these; of the 3 others that found something the longest "
            "has 90"
        )
