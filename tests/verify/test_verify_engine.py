"""``kvtrace verify`` on a real vLLM: a server of its own, with vLLM's ExampleConnector and a small model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from side_by_side import Place, Ran, Script

from kvtrace.verify.answers import Answer, Result, VerifyError
from kvtrace.verify.property import FULL
from kvtrace.verify.session import Options, Small, verify

pytestmark = pytest.mark.engine
START = 600.0


def verified(place: Place, model: Path | None = None, **more: Any) -> Result:
    """vLLM's ExampleConnector, on a server of its own."""
    small = Small("ExampleConnector", f'{{"shared_storage_path": "{place.store}"}}', model)
    return verify(Options((), output=place.run, small=small, start_timeout=START, reference=False, **more))


def quick_suite(place: Place) -> Result:
    """One server for all tests here."""
    return verified(place)


def no_such_connector(place: Place) -> Result:
    small = Small("NoSuchConnector", model=place.model)
    return verify(Options((), output=place.run, small=small, start_timeout=START))


def slow_store(place: Place) -> Result:
    """With the model whose blocks vLLM's CPU backend makes smaller than it is asked."""
    case = "store-slow: a160 b160 ; slow a160 c160"
    return verified(place, Path("mla"), suite=FULL, case=case, store=place.store)


SCRIPTS = (quick_suite, no_such_connector, slow_store)


@pytest.fixture
def example(ran: Mapping[Script, Ran]) -> Result:
    found: Result = ran[quick_suite].done
    return found


def answer(result: Result, ident: str) -> Answer:
    return next(one.verdict.answer for one in result.answers if one.id == ident)


def test_what_comes_back_is_what_was_computed_bit_by_bit(example: Result) -> None:
    found = next(one.verdict for one in example.answers if one.id == "comes-back-equal")
    assert found.answer is Answer.PROVED
    assert answer(example, "transfers") is answer(example, "lookups-agree") is Answer.PROVED
    assert answer(example, "outputs") is Answer.PROVED


def test_a_prompt_of_several_steps_ends_the_engine(example: Result) -> None:
    """ExampleConnector stores what the first step computes, and loads the whole prompt."""
    found = next(one.verdict for one in example.answers if one.id == "chunked")
    assert found.answer is Answer.FAILED
    assert any("shape mismatch" in line for line in found.evidence), found
    assert any("example_connector.py" in line for line in found.evidence), found


def test_its_keys_leave_the_salt_out(example: Result) -> None:
    assert answer(example, "other-salt") is Answer.FAILED
    assert answer(example, "nobody-else") is Answer.PROVED
    assert answer(example, "other-image") is Answer.NOT_APPLICABLE  # its model takes text alone


def test_other_shapes_go_on_after_the_engine_was_started_anew(example: Result) -> None:
    assert answer(example, "concurrent") is answer(example, "extended") is Answer.PROVED


def test_a_store_is_slow_where_its_server_opens_a_file(ran: Mapping[Script, Ran]) -> None:
    found: Result = ran[slow_store].done
    slow = next(one.verdict for one in found.answers if one.id == "store-slow")
    assert slow.answer is Answer.PROVED and "each is right all the same, the slowest in" in slow.says


def test_the_engines_own_words_where_it_does_not_start(ran: Mapping[Script, Ran]) -> None:
    with pytest.raises(VerifyError, match="NoSuchConnector"):
        _ = ran[no_such_connector].done
    assert os.listdir(ran[no_such_connector].place.run)
