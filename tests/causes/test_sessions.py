"""Streaming input: a request whose prompt comes in parts, with answers in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from synth import Chunk, Entry, Prompt, Sim

from kvtrace.causes import Diagnosis, diagnose
from kvtrace.ledger import read_run
from kvtrace.ledger.run import Run


def session(
    sim: Sim, name: str, offers: list[Entry], *, first: int = 64, prefixes: tuple[int, ...] = ()
) -> None:
    """64 tokens (or ``first``), 2 generated ones, 62 more tokens, and 2 generated ones. ``offers``: the store
    entry of each part's step, as far as there are."""
    left = list(offers)
    sim.arrive(Prompt(name, first, digest=sum(map(ord, name)), prefixes=prefixes))
    for start, end in ((0, first), (first + 2, first + 64)):
        if start:
            sim.part(name, start, end)
        chunk = Chunk(name, start, end - start, first=not start)
        sim.step([chunk], left[:1], prompts={name: end})
        for entry in left[:1]:
            if entry.slots:
                sim.read(name, entry.start, entry.start + entry.slots)
        left = left[1:]
        for at in (0, 1):
            sim.grow(name, end + at + 1)
            sim.step([], [], tokens=1)
    sim.finish(name, first + 66, 2)


def analyse(sim: Sim) -> tuple[Run, Diagnosis]:
    sim.write()
    run = read_run(sim.dir)
    return run, diagnose(run)


def new_sim(path: Path) -> Sim:
    return Sim(path, ints={"unit": 32}, kv_blocks=64)


def test_all_parts_of_a_prompt_count_as_prompt(tmp_path: Path) -> None:
    sim = new_sim(tmp_path)
    session(sim, "a", [Entry("a", 64, start=0), Entry("a", 64, start=64)])
    run, found = analyse(sim)
    (request,) = run.requests
    assert (request.prompt, request.arrived, request.computed) == (128, 64, 130)
    pairs = sim.layers
    assert found.saves.accounts == {"saved": 128 * pairs, "not-saved:decode-not-offered": 2 * pairs}
    assert [one.id for one in found.findings] == ["decode-not-offered"]
    (ruled_out,) = [one for one in found.ruled_out if one.id == "later-parts-not-offered"]
    assert "streaming session" in ruled_out.evidence
    # The first part alone was looked up.
    assert found.loads.total == 64 * pairs == sum(found.loads.accounts.values())


@pytest.mark.parametrize("second", [[], [Entry("a", 0, start=64)]])
def test_later_parts_that_are_not_offered_are_a_limit(tmp_path: Path, second: list[Entry]) -> None:
    sim = new_sim(tmp_path)
    session(sim, "a", [Entry("a", 64, start=0), *second])
    _, found = analyse(sim)
    first = found.findings[0]
    assert (first.id, first.severity, first.requests) == ("later-parts-not-offered", "limit", 1)
    assert first.tokens == 64
    assert found.saves.accounts["saved"] == 64 * sim.layers
    assert {one.severity for one in found.findings} == {"limit"}


def test_what_an_earlier_session_stored_is_not_missing_later(tmp_path: Path) -> None:
    """Its lookup misses, which is another matter; nothing of it is offered again."""
    sim = new_sim(tmp_path)
    session(sim, "a", [Entry("a", 64, start=0), Entry("a", 64, start=64)], prefixes=(11, 12))
    sim.prefix("a", 96, 13)
    sim.prefix("a", 128, 14)
    session(sim, "b", [], prefixes=(11, 12))
    sim.prefix("b", 96, 13)
    sim.prefix("b", 128, 14)
    _, found = analyse(sim)
    assert {one.id for one in found.findings} == {"already-stored", "decode-not-offered", "lookup-miss"}
    assert found.saves.accounts["not-saved:already-stored"] == 128 * sim.layers


def test_a_first_part_read_in_whole_blocks_is_not_early(tmp_path: Path) -> None:
    """40 tokens in blocks of 32: with the first part go the slots that its answer and the next part fill."""
    sim = new_sim(tmp_path)
    session(sim, "a", [Entry("a", 64, start=0)], first=40)
    _, found = analyse(sim)
    assert "kv-stale" not in {one.id for one in found.findings}
    assert {one.severity for one in found.findings} == {"limit"}


def test_generated_tokens_between_parts_may_be_stored_before(tmp_path: Path) -> None:
    """In the step that computes the second of them; the block that they fill has more to come."""
    sim = new_sim(tmp_path)
    sim.one_step("a", 62, digest=1, ends=False)
    sim.grow("a", 63)
    sim.step([], [], tokens=1)
    sim.step([], [Entry("a", 64, start=0)], tokens=1)
    sim.read("a", 0, 64)
    sim.part("a", 64, 96)
    sim.step([Chunk("a", 64, 32)], [Entry("a", 32, start=64)], prompts={"a": 96})
    sim.read("a", 64, 96)
    sim.finish("a", 96, 1)
    _, found = analyse(sim)
    assert found.saves.accounts == {"saved": 96 * sim.layers}
    assert not [one for one in found.findings if one.severity == "fault"]
