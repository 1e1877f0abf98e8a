"""What becomes unknown never makes a fault: healthy runs, of which a part of the evidence is taken away in
the ways in which the agent says that it does not know."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from synth import Chunk, Prompt, Sim, SpoolFile
from test_positions import cache, entry, prefill

from kvtrace import agent
from kvtrace.causes import diagnose
from kvtrace.ledger import read_run
from kvtrace.ledger.ends import SaveEnd
from kvtrace.terms import NOT_OBSERVED, SAVED
from kvtrace.trace import format as fmt
from kvtrace.trace import hooks, rows
from kvtrace.trace.facts import HIDES_NO_COPY, HOOKS, Limit
from kvtrace.trace.format import Fact, Flag, Kind

Words = list[int]
Change = Callable[[Words], Words | None]
Chance = random.Random
FIRST = int(Flag.FIRST)
ONCE_A_STEP = {hooks.START_LOAD.code, hooks.WAIT_SAVE.code, hooks.GET_FINISHED.code}
UNWATCHED = ~(int(Flag.STORE | Flag.LOAD) << 32)
_RECORD = struct.Struct("<8q")


# --- healthy runs -------------------------------------------------------------------------


def reads_in_its_hook(sim: Sim) -> None:
    for name, tokens in (("a", 48), ("b", 64), ("c", 32)):
        prefill(sim, name, 0, tokens, [entry(name, 0, tokens)])
        sim.read(name, 0, tokens)
        sim.step([], tokens=1)
        sim.finish(name, tokens)


def _reads_later(sim: Sim, steps: int) -> None:
    for name, tokens in (("a", 48), ("b", 64), ("c", 32)):
        prefill(sim, name, 0, tokens, [entry(name, 0, tokens)])
        for _ in range(steps):
            sim.step([], tokens=1)
        sim.read(name, 0, tokens, hook="get_finished")
        sim.finish(name, tokens)


def reads_a_step_later(sim: Sim) -> None:
    _reads_later(sim, 1)


def reads_two_steps_later(sim: Sim) -> None:
    _reads_later(sim, 2)


def reads_in_a_thread(sim: Sim) -> None:
    """In two pieces, while the next request is computed."""
    asked: list[tuple[str, int]] = []
    for name in "abcd":
        asked.append((name, prefill(sim, name, 0, 64, [entry(name, 0, 64)])))
        for start in (0, 32) if len(asked) > 1 else ():
            before, step = asked[-2]
            sim.read(before, start, start + 32, hook="", step=step)
        sim.finish(name, 64)
    sim.step([], tokens=1)
    sim.read("d", 0, 64, hook="", step=asked[-1][1])


def reads_a_shared_beginning_again(sim: Sim) -> None:
    """Blocks that the GPU's prefix cache gave to another request are read for both."""
    for name, last in (("a", 6), ("b", 7), ("c", 8)):
        sim.arrive(Prompt(name, 64, digest=last, prefixes=(1, 2, 3, last)))
        sim.give(name, [3, 4, 5, last], flags=FIRST)
        local = 0 if name == "a" else 48
        sim.lookup(name, local, 0, 0)
        chunk = Chunk(name, local, 64 - local, first=True)
        sim.step([chunk], [entry(name, 0, 64)], prompts={name: 64})
        sim.read(name, 0, 64)
    for name in "abc":
        sim.finish(name, 64)
    sim.step([], tokens=1)


def reads_the_whole_prompt_with_each_chunk(sim: Sim) -> None:
    """Blocks go to the next request as soon as one is over."""
    for name in ("a", "b", "c"):
        sim.give(name, [5, 6, 7], flags=FIRST)
        for start in (0, 16, 32):
            prefill(sim, name, start, start + 16, [entry(name, 0, start + 16)], of=48)
            sim.read(name, 0, start + 16)
        sim.finish(name, 48)
        sim.step([], tokens=1)


HEALTHY = [
    reads_in_its_hook, reads_a_step_later, reads_two_steps_later, reads_in_a_thread,
    reads_a_shared_beginning_again, reads_the_whole_prompt_with_each_chunk,
]  # fmt: skip


# --- ways of not knowing ------------------------------------------------------------------


def change(spool: SpoolFile, how: Change) -> None:
    """Change the records of a spool, or leave them out (None); not its texts."""
    at = fmt.RECORD_SIZE + fmt.unpack_header_block(bytes(spool.data[: fmt.RECORD_SIZE]))[2]
    at += -at % fmt.RECORD_SIZE
    kept = bytearray(spool.data[:at])
    texts = {Kind.NAME, Kind.FACT, Kind.BYTES}
    for words in _RECORD.iter_unpack(spool.data[at:]):
        made = list(words) if rows.kind(words[0]) in texts else how(list(words))
        if made is not None:
            kept += _RECORD.pack(*made)
    spool.data = kept


def _is_copy(words: Words) -> bool:
    return rows.kind(words[0]) == Kind.SLOTS and bool(rows.flags(words[0]) & (Flag.STORE | Flag.LOAD))


def _not_known_which(words: Words) -> Words:
    """A copy of slots, and not known which."""
    return [*words[:4], 0, -1, -1, words[7]]


def _some(sim: Sim, chance: Chance) -> set[int]:
    """Running numbers of calls: each with a chance that is drawn as well, at least one."""
    calls = range(1, sim._calls + 1)
    share = chance.choice([0.2, 0.5, 1.0])
    return {call for call in calls if chance.random() < share} or {chance.choice(calls)}


def limit(sim: Sim, kind: Limit, step: int = 0) -> None:
    said = {"connector": sim.tag * 10 + 1, "kind": kind.value, "what": "x", "step": step}
    sim.workers[0].fact(Fact.WATCH_LIMITS, said)


def by_an_unknown_operation(sim: Sim, chance: Chance) -> None:
    calls = _some(sim, chance)
    change(sim.workers[0], lambda w: _not_known_which(w) if _is_copy(w) and w[7] in calls else w)
    limit(sim, Limit.OPERATION)


def by_an_unknown_operation_for_an_unknown_step(sim: Sim, chance: Chance) -> None:
    """As work in the background that was asked for by nobody knows whom."""
    calls = _some(sim, chance)

    def made(words: Words) -> Words:
        if not _is_copy(words) or words[7] not in calls or rows.code(words[0]):
            return words
        return [*words[:3], 0, *_not_known_which(words)[4:]]

    change(sim.workers[0], made)
    limit(sim, Limit.OPERATION)


def in_one_layer(sim: Sim, chance: Chance) -> None:
    layer = sim.workers[0].name(chance.choice(sim.layer_names))
    change(sim.workers[0], lambda w: _not_known_which(w) if _is_copy(w) and w[2] == layer else w)
    limit(sim, Limit.OPERATION)


def in_a_step_that_was_not_watched(sim: Sim, chance: Chance) -> None:
    """After one that was, its hooks that come once a step still are."""
    steps = {sim.tag << fmt.STEP_SHIFT | n for n in range(1, sim.n + 1) if chance.random() < 0.5}

    def made(words: Words) -> Words | None:
        if words[3] not in steps:
            return words
        if rows.kind(words[0]) == Kind.EXEC:
            return [words[0] & UNWATCHED, *words[1:]]
        after = words[3] - 1 not in steps and rows.code(words[0]) in ONCE_A_STEP
        return None if rows.kind(words[0]) == Kind.SLOTS and not after else words

    change(sim.workers[0], made)
    limit(sim, Limit.STEPS, min(steps, default=0))


def in_a_thread_that_is_not_followed(sim: Sim, chance: Chance) -> None:
    calls = _some(sim, chance)
    change(sim.workers[0], lambda w: None if _is_copy(w) and w[7] in calls else w)
    limit(sim, chance.choice([Limit.THREAD, Limit.NATIVE]))


def where_the_agent_failed(sim: Sim, chance: Chance, where: str = "watching wait_for_save") -> None:
    calls = _some(sim, chance)
    change(sim.workers[0], lambda w: None if _is_copy(w) and w[7] in calls else w)
    sim.workers[0].fact(Fact.AGENT_ERROR, {"where": where, "error": "KeyError: 0"})


WAYS = [
    by_an_unknown_operation, by_an_unknown_operation_for_an_unknown_step, in_one_layer,
    in_a_step_that_was_not_watched, in_a_thread_that_is_not_followed,
    where_the_agent_failed,
]  # fmt: skip
SEEDS = range(4)


def faults(sim: Sim) -> Sequence[str]:
    sim.write()
    return [one.id for one in diagnose(read_run(sim.dir)).findings if one.severity == "fault"]


@pytest.mark.parametrize("forget", WAYS)
@pytest.mark.parametrize("healthy", HEALTHY)
def test_what_becomes_unknown_makes_no_fault(
    tmp_path: Path, healthy: Callable[[Sim], None], forget: Callable[[Sim, Chance], None]
) -> None:
    for seed in SEEDS:
        sim = cache(tmp_path / str(seed))
        healthy(sim)
        forget(sim, random.Random(seed))
        assert faults(sim) == [], seed


@pytest.mark.parametrize("healthy", HEALTHY)
def test_a_healthy_run_has_no_fault(tmp_path: Path, healthy: Callable[[Sim], None]) -> None:
    sim = cache(tmp_path)
    healthy(sim)
    assert faults(sim) == []


# --- a thread that copies for nobody knows whom ---------------------------------------------


@pytest.mark.parametrize(
    ("reads", "unread", "former"),
    [(2, True, NOT_OBSERVED), (1, True, SaveEnd.NOT_DECLARED), (2, False, SaveEnd.READ_LATE)],
)
def test_a_copy_of_anothers_blocks_may_be_for_the_former(
    tmp_path: Path, reads: int, unread: bool, former: object
) -> None:
    """More reads than the one of the request that has the blocks by now: it was said that nobody read those
    of the request that had had them, or that the hook read other slots."""
    sim = cache(tmp_path)
    for name, digest in (("a", 1), ("b", 2)):
        sim.arrive(Prompt(name, 48, digest=digest))
        sim.give(name, [5, 6, 7], flags=FIRST)
        named = [] if unread else [entry(name, 0, 48)]
        sim.step([Chunk(name, 0, 48, first=True)], named, prompts={name: 48}, unreadable=unread)
        if name == "a":
            sim.finish(name, 48)
    for _ in range(reads):
        sim.read("b", 0, 48, hook="")
    sim.finish("b", 48)
    change(sim.workers[0], lambda w: [*w[:3], 0, *w[4:]] if _is_copy(w) else w)
    sim.write()
    run = read_run(sim.dir)
    ended = {(one.request, one.outcome) for one in run.base} | {(one.request, one.ended) for one in run.lost}
    assert ended == {(0, former), (1, SAVED)}


def test_a_failure_that_hides_no_copy_hides_no_loss(tmp_path: Path) -> None:
    found = set()
    for seed in SEEDS:
        sim = cache(tmp_path / str(seed))
        reads_in_its_hook(sim)
        where_the_agent_failed(sim, random.Random(seed), "fingerprints")
        found.update(faults(sim))
    assert "stored-nothing" in found


def test_failures_that_hide_no_copy_have_the_agents_names() -> None:
    sources = "".join(path.read_text() for path in Path(agent.__path__[0]).rglob("*.py"))
    assert [name for name in HIDES_NO_COPY - {HOOKS} if f'AGENT.failed("{name}")' not in sources] == []
