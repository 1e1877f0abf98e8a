"""A connector's answers to all probes, on a real engine, traced and untraced."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import probes
import pytest
from side_by_side import Place, Ran, Script

pytestmark = pytest.mark.engine
PROBED = Path(__file__).with_name("probed.py")
SIDES = ("worker", "scheduler")
RAISES: set[str] = set()
"""Probes that end in an exception untraced, too."""
Answers = dict[str, dict[str, Any]]


def probed(place: Place, traced: bool) -> dict[str, Any]:
    answers = place.folder / "answers"
    done = place.start(sys.executable, PROBED, place.model, answers, traced=traced)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {name: json.loads((answers / f"{name}.json").read_text()) for name in (*SIDES, "held", "after")}


def probed_plain(place: Place) -> dict[str, Any]:
    return probed(place, traced=False)


def probed_traced(place: Place) -> dict[str, Any]:
    return probed(place, traced=True)


SCRIPTS = (probed_plain, probed_traced)


@pytest.fixture
def answers(ran: Mapping[Script, Ran]) -> Answers:
    return {"plain": ran[probed_plain].done, "traced": ran[probed_traced].done}


def test_every_probe_was_answered(answers: Answers) -> None:
    assert len(probes.PROBES) >= 100
    for way in answers.values():
        for side in SIDES:
            assert way[side].keys() == probes.PROBES.keys()
    for side in SIDES:
        asked = {name: answer for name, answer in answers["plain"][side].items() if name not in RAISES}
        assert [name for name, answer in asked.items() if re.match(r"\w*(Error|Exception): ", answer)] == []
        locked = [name for name in asked if "another process" in name]
        assert {asked[name] for name in locked} == {repr(["locked"] * 2)}, "a lock that holds nobody off"
        databases = [name for name in asked if name.startswith("SQLite")]
        assert {asked[name] for name in databases} == {repr(("database is locked", [(1,)]))}


def test_only_what_the_page_lists_can_be_noticed(answers: Answers) -> None:
    plain, traced = answers["plain"], answers["traced"]
    differing = {
        (name, side): (plain[side][name], traced[side][name])
        for side in SIDES
        for name in probes.PROBES
        if plain[side][name] != traced[side][name]
    }
    listed = probes.noticed()
    assert listed <= probes.PROBES.keys()
    assert {key: value for key, value in differing.items() if key[0] not in listed} == {}
    if sys.version_info < (3, 12):  # later ones notice less
        assert listed - {name for name, _ in differing} == set(), "the page lists what nobody can notice"


def test_locks_are_held_from_one_step_to_the_next(answers: Answers) -> None:
    assert set(answers["plain"]["held"].values()) == {"locked", repr(("database is locked", [(1,)]))}
    assert answers["traced"]["held"] == answers["plain"]["held"]


def test_nothing_of_the_engine_is_left_when_it_is_let_go(answers: Answers) -> None:
    assert answers["traced"]["after"] == answers["plain"]["after"]
