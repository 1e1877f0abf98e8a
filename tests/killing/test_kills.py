"""Ten runs of a real vLLM that are cut short: each at a moment that its seed draws, five commands in all.

`scripts/kills.py` makes more of them, also of `vllm serve` and with Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_env import vllm_env as make_vllm_env

from .engines import Engine, Place
from .judge import problems
from .kinds import FAMILY, SCRIPT, Seen, cut_short
from .twins import Ends

pytestmark = pytest.mark.engine
FORKS = ("kill", "kill", "term", "kill", "kill", "kill")
SINGLE = ("launcher", "all", "term", "deleted")
Runs = dict[str, Future[Seen]]
Answers = dict[int, list[int]]
ENDS: Ends = {"kill": {-9}, "term": {-15}, "launcher": {137}, "all": {137}, "deleted": {0}}
"""What a process ends with that a signal ends, and one that is let alone."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Runs]:
    """All of them, side by side: two cores start two engines in the time of one."""
    out = tmp_path_factory.mktemp("kills")

    def make(name: str, seed: int) -> Seen:
        setup, kinds = (SCRIPT, (name,)) if name in SINGLE else (replace(FAMILY, forks=len(FORKS)), FORKS)
        return cut_short(setup, kinds, Place(out / name, tiny_model, make_vllm_env()), seed)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(make, name, seed) for seed, name in enumerate(("forks", *SINGLE))}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Answers:
    """What an engine without kvtrace answers, to the end."""
    place = Place(tmp_path_factory.mktemp("kills") / "untraced", tiny_model, make_vllm_env())
    with Engine(SCRIPT, place, 0, traced=False) as engine:
        assert engine.wait() == 0, engine.tail()
        return dict(engine.given())


def test_engines_killed_one_by_one_lose_one_step_each(runs: Runs, answers: Answers) -> None:
    seen = runs["forks"].result()
    assert problems(seen, answers, ENDS) == []
    assert list(seen.ends) == list(range(len(FORKS)))


def test_a_killed_launcher_leaves_the_command_traced(runs: Runs, answers: Answers) -> None:
    seen = runs["launcher"].result()
    assert problems(seen, answers, ENDS) == []
    assert dict(seen.given) == answers


def test_what_was_recorded_is_explained_when_all_is_killed(runs: Runs, answers: Answers) -> None:
    assert problems(runs["all"].result(), answers, ENDS) == []


def test_a_signal_ends_the_command_as_it_would_without_kvtrace(runs: Runs, answers: Answers) -> None:
    assert problems(runs["term"].result(), answers, {"term": {143}}) == []


def test_the_engine_goes_on_when_its_run_directory_is_deleted(runs: Runs, answers: Answers) -> None:
    seen = runs["deleted"].result()
    assert problems(seen, answers, ENDS) == []
    assert dict(seen.given) == answers
