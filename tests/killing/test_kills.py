"""Ten runs of a real vLLM that are cut short: each at a moment that its seed draws, five commands in all.

`scripts/kills.py` makes more of them, also of `vllm serve` and with Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import side_by_side
from side_by_side import Ran, Script
from vllm_env import vllm_env as make_vllm_env

from .engines import Engine, Place
from .judge import problems
from .kinds import FAMILY, SCRIPT, Seen, cut_short
from .twins import Ends

pytestmark = pytest.mark.engine
FORKS = ("kill", "kill", "term", "kill", "kill", "kill")
SINGLE = ("launcher", "all", "term", "deleted")
Answers = dict[int, list[int]]
Runs = Callable[[str], Seen]
ENDS: Ends = {"kill": {-9}, "term": {-15}, "launcher": {137}, "all": {137}, "deleted": {0}}
"""What a process ends with that a signal ends, and one that is let alone."""


def cut(name: str, seed: int) -> Script:
    def run(place: side_by_side.Place) -> Seen:
        setup, kinds = (SCRIPT, (name,)) if name in SINGLE else (replace(FAMILY, forks=len(FORKS)), FORKS)
        return cut_short(setup, kinds, Place(place.folder / name, place.model, make_vllm_env()), seed)

    return run


def untraced(place: side_by_side.Place) -> Answers:
    """What an engine without kvtrace answers, to the end."""
    own = Place(place.folder / "untraced", place.model, make_vllm_env())
    with Engine(SCRIPT, own, 0, traced=False) as engine:
        assert engine.wait() == 0, engine.tail()
        return dict(engine.given())


CUT = {name: cut(name, seed) for seed, name in enumerate(("forks", *SINGLE))}
SCRIPTS = (*CUT.values(), untraced)


@pytest.fixture
def seen(ran: Mapping[Script, Ran]) -> Runs:
    """Of the run of that name."""
    return lambda name: ran[CUT[name]].done


@pytest.fixture
def answers(ran: Mapping[Script, Ran]) -> Answers:
    found: Answers = ran[untraced].done
    return found


def test_engines_killed_one_by_one_lose_one_step_each(seen: Runs, answers: Answers) -> None:
    forks = seen("forks")
    assert problems(forks, answers, ENDS) == []
    assert list(forks.ends) == list(range(len(FORKS)))


def test_a_killed_launcher_leaves_the_command_traced(seen: Runs, answers: Answers) -> None:
    launcher = seen("launcher")
    assert problems(launcher, answers, ENDS) == []
    assert dict(launcher.given) == answers


def test_what_was_recorded_is_explained_when_all_is_killed(seen: Runs, answers: Answers) -> None:
    assert problems(seen("all"), answers, ENDS) == []


def test_a_signal_ends_the_command_as_it_would_without_kvtrace(seen: Runs, answers: Answers) -> None:
    assert problems(seen("term"), answers, {"term": {143}}) == []


def test_the_engine_goes_on_when_its_run_directory_is_deleted(seen: Runs, answers: Answers) -> None:
    deleted = seen("deleted")
    assert problems(deleted, answers, ENDS) == []
    assert dict(deleted.given) == answers
