"""On a real engine: what a connector reads in its threads, executors and event loops is known slot by slot,
and for the step whose tokens they are, also where the copy is made while the next step runs."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from side_by_side import Done, Place, Ran, Script

from kvtrace.trace import rows
from kvtrace.trace.format import Fact, Flag, Kind
from kvtrace.trace.reader import Spool, spool_paths

pytestmark = pytest.mark.engine
BLOCK = 32
SCRIPT = Path(__file__).with_name("background.py")


def runs_of(blocks: list[int]) -> str:
    """The slots of whole blocks as in SLOTS records."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and sum(runs[-1]) == block * BLOCK:
            runs[-1][1] += BLOCK
        else:
            runs.append([block * BLOCK, BLOCK])
    return ",".join(f"{first}+{count}" for first, count in runs)


def background(place: Place) -> Done:
    return place.start(sys.executable, SCRIPT, place.model, place.folder / "answers.json")


SCRIPTS = (background,)


def test_background_copies_name_exactly_their_slots_and_step(ran: Mapping[Script, Ran]) -> None:
    run = ran[background]
    assert run.done.returncode == 0, run.done.stderr[-3000:]
    copied = json.loads((run.place.folder / "answers.json").read_text())

    (path,) = spool_paths(run.place.run)
    spool = Spool(path)
    prompts: dict[int, list[int]] = defaultdict(list)  # engine -> its steps with a prompt
    watched: set[int] = set()
    seen: dict[int, dict[int, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for chunk in spool.chunks():
        for words in chunk.tolist():
            row = rows.decode(words)
            if isinstance(row, rows.Chunk) and row.start < row.prompt:
                prompts[row.step >> 32].append(row.step)
            elif isinstance(row, rows.Execution) and rows.flags(row.head) & Flag.STORE:
                watched.add(row.step)
            elif rows.kind(row.head) == Kind.SLOTS:
                assert isinstance(row, rows.SlotsTouched)
                assert rows.code(row.head) == 0, "no hook did it itself"
                assert rows.flags(row.head) & (Flag.STORE | Flag.LOAD) == Flag.STORE
                layer, slots = spool.names[row.layer], spool.names[row.slot_set]
                seen[row.step >> 32][row.step].add((layer, slots))
    assert not [value for fact, _, value in spool.facts if fact in (Fact.AGENT_ERROR, Fact.WATCH_LIMITS)]
    assert len(prompts) == len(copied) == 3 and list(seen) == list(prompts)
    for (name, saves), (engine, steps) in zip(copied.items(), prompts.items(), strict=True):
        assert len(saves) == len(steps) == 3 and watched.issuperset(steps)
        found = {step: {slots for _, slots in touched} for step, touched in seen[engine].items()}
        expected = {step: {runs_of(blocks)} for step, blocks in zip(steps, saves, strict=True)}
        assert found == expected, name
        assert all(len(touched) == 4 for touched in seen[engine].values()), "each layer, and once"
