"""What was measured against what was declared, and the causes that only this shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from diagnosed import (
    analyse,
    graded,
    ids,
    not_observed,
    prompts,
    ruled_out,
    said,
    served,
    the,
    tokens,
    words,
)
from synth import WATCHED, Chunk, Entry, Fate, Policy, Prompt, Rounding, Sim, nothing

from kvtrace.causes import Diagnosis, diagnose
from kvtrace.causes.case import Case, LostSpan, kept_before, make_case
from kvtrace.causes.evidence.prompts import ABORTED
from kvtrace.causes.rules.stored_nothing import idle_steps
from kvtrace.ledger import read_run
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.asynchronous import ASKED
from kvtrace.terms import FAULT, LIMIT, Grade
from kvtrace.trace.format import Fact


def all_of(n: int, rank: int, layer: int, slots: int) -> int:
    return slots


def sim_of(tmp_path: Path, name: str = "run", **more: object) -> Sim:
    """No step of it is watched but those that a test says are."""
    settings: dict[str, object] = {
        "ints": {"unit": 32}, "noop": ("wait_for_save",), "kv_blocks": 256, **more
    }  # fmt: skip
    sim = Sim(tmp_path / name, **settings)  # type: ignore[arg-type]
    sim.watching = 0
    return sim


Measure = Callable[[int, int, int, int], int | None]


def watched(
    tmp_path: Path, lengths: list[int], *, policy: Policy | None = None, measure: Measure | None = None,
    name: str = "run", **more: Any,
) -> Sim:  # fmt: skip
    """Prompts of these lengths, one after the other, stored in whole units of 32 tokens unless there is
    another ``policy``; ``measure``: what was seen to be read of them, as of Sim.serve."""
    sim = sim_of(tmp_path, name, **more)
    sim.serve(prompts(lengths), policy or Rounding(32).policy(), measure=measure)
    return sim


def test_measured_and_agreeing(tmp_path: Path) -> None:
    diagnosis = analyse(watched(tmp_path, [64, 128, 192], measure=all_of, tp=2))
    assert ids(diagnosis) == []
    assert tokens(diagnosis) == {"saved": 384}
    assert diagnosis.saves.trust == "measured"
    assert {"stored-nothing", "slots-short"} <= set(ruled_out(diagnosis))
    assert "12 of 12 store calls" in diagnosis.stages[5].note


def test_partly_measured_is_mixed(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64, 128, 192], measure=lambda n, r, layer, s: s if n == 1 else None)
    diagnosis = analyse(sim)
    assert diagnosis.saves.trust == "mixed" and tokens(diagnosis) == {"saved": 384}
    assert "2 of 6 store calls" in diagnosis.stages[5].note
    assert not {"stored-nothing", "slots-short"} & set(ruled_out(diagnosis))
    unseen = not_observed(diagnosis)
    assert "4 of 6 store calls" in unseen["stored-nothing"]
    assert "2 of 6 store calls were watched" in unseen["exception-swallowed"]


def test_not_measured_is_declared(tmp_path: Path) -> None:
    diagnosis = analyse(watched(tmp_path, [64], measure=lambda *_: -1))
    assert diagnosis.saves.trust == "declared" and tokens(diagnosis) == {"saved": 64}


def test_stored_nothing(tmp_path: Path) -> None:
    diagnosis = analyse(watched(tmp_path, [64, 128, 192], measure=lambda n, r, layer, s: 0 if n == 2 else s))
    assert ids(diagnosis) == ["stored-nothing"]
    assert tokens(diagnosis) == {"saved": 256, "not-saved:stored-nothing": 128}
    text = said(diagnosis, "stored-nothing")
    assert "2 of 6 measured store calls" in text
    # A thread that copies after the blocks went to others may not find them: it is passed something.
    assert "keep the blocks until it is done" in text and "another thread" not in text
    assert [row.out for row in diagnosis.stages] == [384] * 5 + [256] * 2


def test_empty_files_prove_that_nothing_was_stored(tmp_path: Path) -> None:
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    step = sim.one_step("a", 128, [Entry("a", 128, 128, 0)], digest=1)
    for layer in range(2):
        sim.effect(0, step, layer, 0, size=80, files=1, target=5 + layer)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["stored-nothing"]
    assert "wrote almost nothing" in said(diagnosis, "stored-nothing")


def test_a_consumer_may_leave_what_its_metadata_names(tmp_path: Path) -> None:
    """LMCache#1779: the scheduler's side names stores for any role; a consumer's workers return at once."""
    diagnosis = analyse(watched(tmp_path, [64, 128], measure=lambda *_: 0, role="kv_consumer"))
    assert ids(diagnosis) == ["role-does-not-save"]
    assert tokens(diagnosis) == {"not-saved:role-does-not-save": 192}
    assert "no save was seen" in said(diagnosis, "role-does-not-save")
    some = watched(
        tmp_path, [64, 128], measure=lambda n, *_: 0 if n == 2 else 64, role="kv_consumer", name="b"
    )
    assert ids(analyse(some)) == ["stored-nothing"]


def test_what_the_hook_logged_is_the_first_remedy(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64], measure=lambda *_: 0)
    log = {"hook": "save_kv_layer", "step": sim.step_id, "logger": "pool", "level": "WARNING",
           "message": "no memory: KV will not be stored", "count": 2}  # fmt: skip
    sim.workers[0].fact(Fact.LOG, log)
    found = the(analyse(sim), "stored-nothing")
    assert found.remedy[0].startswith('See why save_kv_layer logged "no memory: KV will not be stored"')


def test_silence_in_every_watched_call_is_nothing_stored(tmp_path: Path) -> None:
    diagnosis = analyse(watched(tmp_path, [64, 128], measure=lambda *_: 0))
    assert ids(diagnosis) == ["stored-nothing"]
    assert tokens(diagnosis) == {"not-saved:stored-nothing": 192}


def test_silence_says_nothing_where_the_address_was_given_out(tmp_path: Path) -> None:
    """No metadata names a store; whoever has the memory may send it all the same (NIXL's producer)."""
    sim = watched(tmp_path, [64, 128], policy=Policy(store=nothing))
    assert set(tokens(analyse(sim))) == {"not-saved:metadata-has-no-store"}
    sim = watched(tmp_path, [64, 128], policy=Policy(store=nothing), name="given")
    sim.workers[0].fact(Fact.WATCH_LIMITS, {"connector": 1, "kind": "address", "what": "data_ptr"})
    assert tokens(analyse(sim)) == {"not-observed": 192}


def test_saves_in_wait_for_save_are_measured_there(tmp_path: Path) -> None:
    sim = sim_of(tmp_path, noop=("save_kv_layer",))
    sim.watching = WATCHED
    sim.serve(prompts([64, 128]), Rounding(32).policy())
    for name, length, step, layers in (("req-1", 64, 1, (0, 1)), ("req-2", 128, 2, (0,))):
        for layer in layers:
            sim.stored(name, 0, length, layer, step=sim.tag << 32 | step, hook="wait_for_save")
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved": 128, "not-saved:stored-nothing": 64}


def test_slots_short(tmp_path: Path) -> None:
    diagnosis = analyse(watched(tmp_path, [128, 256], measure=lambda n, r, layer, s: s // 2 if layer else s))
    assert ids(diagnosis) == ["slots-short"]
    assert tokens(diagnosis) == {"saved": 192 + 96, "not-saved:slots-short": 96}
    assert "read 50.0 % of the slots" in said(diagnosis, "slots-short")


def test_a_part_of_each_slot_is_less_than_the_slot(tmp_path: Path) -> None:
    """Reads of one head of two were "read none of it"."""
    sim = watched(tmp_path, [64, 128])
    for name, length, number in (("req-1", 64, 1), ("req-2", 128, 2)):
        step, partly = sim.tag << 32 | number, name == "req-2"
        for layer in range(sim.layers):
            sim.effect(0, step, layer, length // 2 if partly else length)
            sim.read(name, 0, length, layers=[layer], step=step, partly=partly)
    diagnosis = analyse(sim)
    assert ids(diagnosis)[0] == "slots-short"
    assert tokens(diagnosis) == {"saved": 64, "not-saved:slots-short": 128}
    text = said(diagnosis, "slots-short")
    assert "read a part of each of the slots" in text and "some heads, or K or V alone" in text


def test_what_is_read_in_part_for_nobody_known_is_open(tmp_path: Path) -> None:
    """A worker that decides, and takes a part of each slot: "stored-nothing" would be wrong."""
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    for n, name in enumerate("ab"):
        step = sim.one_step(name, 64, digest=n + 1, unreadable=True)
        for layer in range(sim.layers):
            sim.effect(0, step, layer, 0)
            sim.read(name, 0, 64, layers=[layer], step=step, partly=True)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"not-observed": 128} and ids(diagnosis) == []
    run = read_run(tmp_path / "run")
    assert run.read_in_part == 2 * sim.layers
    rows = [replace(one, lost={((0, 64, LoadEnd.ALTERED),): 1}) for one in run.load_rows]
    rows = [replace(one, ends={LoadEnd.ALTERED: one.prompt * sim.layers}) for one in rows]
    finding = the(diagnose(replace(run, load_rows=rows)), "kv-altered")
    assert finding.remedy[0].startswith("Save and load all of a slot") and finding.severity == LIMIT


def test_what_no_metadata_ever_named_was_taken_not_offered(tmp_path: Path) -> None:
    """The metadata names requests alone, and what to do lies elsewhere: nothing was "offered"."""
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    for n, name in enumerate("abc"):
        step = sim.one_step(name, 64, digest=n + 1)
        for layer in range(sim.layers):
            if name == "a":
                sim.stored(name, 0, 64, layer, step=step)
            else:
                sim.effect(0, step, layer, 0)
    found = the(analyse(sim), "metadata-has-no-store")
    assert found.headline == "the connector took nothing of 2 of 3 prompts for storing"
    assert "at the save hooks for what they pass over" in found.remedy[0]
    run = read_run(tmp_path / "run")
    rows = [replace(one, ends={LoadEnd.WRONG: 1}) for one in run.load_rows]
    odd = the(diagnose(replace(run, load_rows=rows)), "metadata-has-no-store")
    assert "or as other slots were read in the place of theirs" in odd.title
    assert odd.remedy[0].startswith("First see which slots the save hooks read")


@pytest.mark.parametrize(("ranks", "diverge"), [({0, 1}, False), ({1}, True)])
def test_ranks_diverge_where_a_layer_fares_differently_on_them(
    tmp_path: Path, ranks: set[int], diverge: bool
) -> None:
    """A layer that loses tokens on every rank is no divergence."""
    sim = watched(
        tmp_path, [128, 256], measure=lambda n, r, layer, s: s // 2 if layer and r in ranks else s, tp=2
    )
    diagnosis = analyse(sim)
    assert ids(diagnosis)[0] == "slots-short"
    apart = [one.severity for one in diagnosis.findings if one.id == "ranks-diverge"]
    assert apart == (["note"] if diverge else [])  # slots-short says it: one bug is one fault
    assert ("ranks-diverge" in ruled_out(diagnosis)) is not diverge


@pytest.mark.parametrize(("grade", "out"), [(Grade.READ, True), (Grade.DECLARED, False)])
def test_ranks_are_said_to_agree_only_where_each_was_seen(tmp_path: Path, grade: Grade, out: bool) -> None:
    """What metadata says, it says for all ranks: one of them had stored nothing."""
    sim = watched(tmp_path, [128, 256], tp=2)
    sim.write()
    run = read_run(sim.dir)
    run = replace(run, base=graded(run.base, grade))
    assert ("ranks-diverge" in ruled_out(diagnose(run))) == out


@pytest.mark.parametrize(("count", "severity"), [(2, "fault"), (1, "note")])
def test_exceptions_in_a_thread_that_works_out_of_sight(tmp_path: Path, count: int, severity: str) -> None:
    """About as many as there were requests are a reason to look; one in a long run is none."""
    sim = watched(tmp_path, [64, 128, 192], measure=lambda *_: 0)
    sim.workers[0].fact(Fact.WATCH_LIMITS, {"connector": 71, "kind": "thread", "what": "x"})
    caught = {**SWALLOWED, "hook": "thread", "layer": None, "step": 0, "count": count, "observed_calls": 0,
              "logged": True}  # fmt: skip
    sim.workers[0].fact(Fact.SWALLOWED, caught)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"not-observed": 384}
    assert said(diagnosis, "exception-swallowed").startswith(severity)
    assert "in its threads" in said(diagnosis, "exception-swallowed")


@pytest.mark.parametrize(
    ("count", "went_on", "severity"), [(2, False, "fault"), (1, False, "note"), (2, True, "note")]
)
def test_exceptions_that_end_work_of_which_nothing_was_saved(
    tmp_path: Path, count: int, went_on: bool, severity: str
) -> None:
    """Nobody logged them: they count where they came about as often as requests and ended their work."""
    sim = watched(tmp_path, [64, 128, 192], measure=lambda *_: 0)
    sim.workers[0].fact(Fact.WATCH_LIMITS, {"connector": 71, "kind": "thread", "what": "x"})
    caught = {**SWALLOWED, "hook": "thread", "layer": None, "step": 0, "count": count, "observed_calls": 0,
              "logged": False, "asked_by": "wait_for_save", "went_on": went_on}  # fmt: skip
    sim.workers[0].fact(Fact.SWALLOWED, caught)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved" if went_on else "not-observed": 384}
    assert said(diagnosis, "exception-swallowed").startswith(severity)


SWALLOWED = {"hook": "save_kv_layer", "connector": 71, "type": "OSError", "message": "[Errno 28] full",
             "where": "store.py:12 in write"}  # fmt: skip


def swallow(sim: Sim, steps: list[int], **more: object) -> None:
    count = 0
    for n in steps:
        for layer in sim.layer_names:
            count += 1
            sim.workers[0].fact(
                Fact.SWALLOWED,
                {**SWALLOWED, "layer": layer, "step": sim.tag << 32 | n, "count": count,
                 "observed_calls": count, "logged": False, **more},
            )  # fmt: skip


def test_exception_swallowed(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64, 128], measure=lambda *_: 0)
    swallow(sim, [1, 2])
    log = {"hook": "save_kv_layer", "layer": "", "step": sim.step_id, "connector": 71, "logger": "my.store",
           "level": "ERROR", "message": "could not write", "shown": False, "count": 4}  # fmt: skip
    sim.workers[0].fact(Fact.LOG, log)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["exception-swallowed"]
    assert tokens(diagnosis) == {"not-saved:exception-swallowed": 192}
    text = said(diagnosis, "exception-swallowed")
    assert text.startswith("fault")
    assert "OSError: [Errno 28] full (at store.py:12 in write), caught 4 times in 4 watched calls" in text
    assert 'logged "could not write" (error, my.store, 4 times; no handler shows it)' in text
    assert "store.py:12" in diagnosis.findings[0].remedy[0]


def test_more_exceptions_than_calls_are_told_as_times(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64], measure=lambda *_: 0)
    swallow(sim, [1], count=6, observed_calls=2)
    assert "caught 6 times in 2 watched calls of" in said(analyse(sim), "exception-swallowed")


def test_exceptions_are_at_least_those_told_one_by_one(tmp_path: Path) -> None:
    """Behind the 16th of a kind the next one that is told is the 32nd."""
    sim = watched(tmp_path, [64], measure=lambda *_: 0)
    swallow(sim, [1], count=16, observed_calls=5)
    assert ", caught at least 16 times in 5 watched calls of" in said(analyse(sim), "exception-swallowed")


@pytest.mark.parametrize(("steps", "found"), [([1, 2], ["exception-swallowed"]), ([1], ["stored-nothing"])])
def test_an_ordinary_exception_as_frequent_as_losses_explains(
    tmp_path: Path, steps: list[int], found: list[str]
) -> None:
    """Once, while other calls read nothing either without it, it may be a look for something optional."""
    sim = watched(tmp_path, [64, 128], measure=lambda *_: 0)
    swallow(sim, steps, type="AttributeError", broad=True)
    assert ids(analyse(sim)) == found


@pytest.mark.parametrize(("far", "found"), [(True, "exception-swallowed"), (None, "stored-nothing")])
def test_what_code_finds_out_by_explains_where_nobody_meant_it(
    tmp_path: Path, far: bool | None, found: str
) -> None:
    """A decorator around the hook takes whatever it raises, that a file is there among it."""
    sim = watched(tmp_path, [64, 128], measure=lambda *_: 0)
    swallow(sim, [1, 2], type="FileExistsError", message="[Errno 17] File exists", far=far)
    assert ids(analyse(sim)) == [found]


def test_the_first_known_exceptions_explain_all_empty_calls(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64] * 10, measure=lambda *_: 0)
    swallow(
        sim, list(range(1, 9)), type="AttributeError", broad=True
    )  # 16 of 20: the next one said is the 32nd
    assert ids(analyse(sim)) == ["exception-swallowed"]


def test_an_ordinary_exception_that_took_nothing_is_not_told(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64, 128], measure=all_of)
    swallow(sim, [1, 2], type="AttributeError", broad=True)
    assert ids(analyse(sim)) == []


def test_unwatched_steps_of_an_idle_rank_are_not_declared(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64, 128], measure=lambda n, r, layer, s: 0 if n == 1 else None)
    swallow(sim, [1])
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"not-saved:exception-swallowed": 64, "not-observed": 128}


def test_a_logged_exception_of_an_unmeasured_save_is_a_fault(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64], measure=lambda *_: -1)
    swallow(sim, [1], logged=True)
    assert said(analyse(sim), "exception-swallowed").startswith("fault")


def test_an_exception_in_build_connector_meta(tmp_path: Path) -> None:
    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [] if prompt.id == "req-2" else [Entry(prompt.id, end - start, -1, start)]

    sim = watched(tmp_path, [64, 128, 192], policy=Policy(store))
    fact = {**SWALLOWED, "hook": "build_connector_meta", "layer": None, "step": sim.tag << 32 | 2,
            "count": 1, "observed_calls": 3}  # fmt: skip
    sim.scheduler.fact(Fact.SWALLOWED, fact)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["exception-swallowed"]
    assert tokens(diagnosis) == {"saved": 256, "not-saved:exception-swallowed": 128}


def test_ranks_share_store(tmp_path: Path) -> None:
    def run(name: str, shared: bool, kind: str = "FullAttentionSpec") -> Diagnosis:
        sim = sim_of(tmp_path, name, tp=2)
        sim.watching = WATCHED
        if kind != "FullAttentionSpec":
            sim.scheduler.fact(Fact.ENGINE, {"tag": sim.tag, "kv_groups": [{"kind": kind, "layers": []}]})
        sim.serve(prompts([64, 128]), Rounding(32).policy())
        for n, slots in ((1, 64), (2, 128)):
            for layer in range(2):
                for rank in range(2):
                    target = 1000 + 10 * n + layer + (0 if shared else 100 * rank)
                    step = sim.tag << 32 | n
                    sim.stored(f"req-{n}", 0, slots, layer, rank, step, size=9999, files=1, target=target)
        return analyse(sim)

    diagnosis = run("shared", shared=True)
    assert ids(diagnosis)[0] == "ranks-share-store"
    assert tokens(diagnosis) == {"saved": 96, "not-saved:ranks-share-store": 96}
    text = said(diagnosis, "ranks-share-store")
    assert text.startswith("fault") and "both ranks" in text and "4 times" in text
    diagnosis = run("apart", shared=False)
    assert ids(diagnosis) == [] and "ranks-share-store" in ruled_out(diagnosis)
    assert ids(run("mla", shared=True, kind="MLAAttentionSpec")) == []


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_file_that_ranks_share_was_read_by_both(tmp_path: Path, unreadable: bool) -> None:
    """Where no metadata names it, the rank whose file did not stay was said to have read nothing."""
    sim = sim_of(tmp_path, tp=2)
    sim.watching = WATCHED
    entries = [] if unreadable else [Entry("a", 64, 64, 0)]
    step = sim.one_step("a", 64, entries, digest=1, unreadable=unreadable)
    for layer, rank in product(range(2), range(2)):
        sim.stored("a", 0, 64, layer, rank, step, size=9999, files=1, target=1000 + layer)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved": 32, "not-saved:ranks-share-store": 32}
    assert "stored-nothing" not in ids(diagnosis)


@pytest.mark.parametrize(("index", "lost"), [(False, True), (True, False)])
def test_ranks_that_share_a_file_of_all_layers(tmp_path: Path, index: bool, lost: bool) -> None:
    """Of one that a step's last hook writes, the first layer alone was said to be overwritten. ``index``:
    each step writes the same one."""
    sim = sim_of(tmp_path, "run", tp=2, noop=("save_kv_layer",))
    sim.watching = WATCHED
    sim.serve(prompts([64, 128]), Rounding(32).policy())
    for n, slots in ((1, 64), (2, 128)):
        for rank in range(2):
            for layer in range(2):
                target = 0 if layer else 1000 + (0 if index else n)
                step = sim.tag << 32 | n
                sim.stored(
                    f"req-{n}", 0, slots, layer, rank, step, size=9999, files=int(not layer), target=target,
                    hook="wait_for_save",
                )  # fmt: skip
    diagnosis = analyse(sim)
    want = {"saved": 96, "not-saved:ranks-share-store": 96} if lost else {"saved": 192}
    assert tokens(diagnosis) == want


def test_unread_entries_that_an_earlier_request_had_saved(tmp_path: Path) -> None:
    """The worker looks whether a key is there: no fault."""
    sim = sim_of(tmp_path)
    same = [Prompt(f"r{i}", 128, digest=4) for i in range(2)]
    sim.serve(same, Rounding(32).policy(), measure=lambda n, r, layer, s: s if n == 1 else 0)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["already-stored"]
    assert tokens(diagnosis) == {"saved": 128, "not-saved:already-stored": 128}


def test_unread_entries_that_several_requests_had_saved(tmp_path: Path) -> None:
    """One saved the beginning, the next one the rest: its own beginning it left out, as it was there."""
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    given = [("a", 64, (7, 8), 0, 64), ("b", 128, (7, 8, 9, 10), 64, 64), ("c", 128, (7, 8, 9, 10), 0, 0)]
    for name, length, prefixes, start, read in given:
        sim.one_step(name, length, [Entry(name, length)], digest=length, prefixes=prefixes)
        for layer in range(sim.layers):
            sim.stored(name, start, read, layer)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["already-stored"]
    assert tokens(diagnosis) == {"saved": 128, "not-saved:already-stored": 64 + 128}


def test_what_two_of_the_same_prompt_leave_out_is_held_by_none(tmp_path: Path) -> None:
    """Two answers to one prompt: each half is short, and the other is no earlier store of the rest."""
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    for name in ("r0", "r1"):
        sim.arrive(Prompt(name, 128, digest=4))
        sim.lookup(name, 0, 0, 0)
    chunks = [Chunk(name, 0, 128, first=True) for name in ("r0", "r1")]
    sim.step(chunks, [Entry("r0", 128), Entry("r1", 128)], prompts={"r0": 128, "r1": 128})
    for layer in range(sim.layers):
        sim.effect(0, sim.step_id, layer, 128)
    for name in ("r0", "r1"):
        sim.read(name, 0, 64)
        sim.finish(name, 128)
    sim.write()
    case = make_case(read_run(sim.dir))
    assert [kept_before(case, request) for request in case.requests] == [0, 0]


def test_replicated_kv_is_saved_by_one_rank(tmp_path: Path) -> None:
    sim = sim_of(tmp_path, tp=2)
    sim.scheduler.fact(
        Fact.ENGINE, {"tag": sim.tag, "kv_groups": [{"kind": "MLAAttentionSpec", "layers": []}]}
    )
    sim.serve(prompts([64, 128]), Rounding(32).policy(), measure=lambda n, r, layer, s: 0 if r else s)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == [] and tokens(diagnosis) == {"saved": 192}


def test_stores_that_no_metadata_names(tmp_path: Path) -> None:
    """The connector decides on the worker: whole blocks of what was computed."""
    sim = sim_of(tmp_path, ints={"_block_size": 32}, tp=2)
    sim.watching = WATCHED
    for i, length in enumerate((100, 70, 128)):
        name = f"r{i}"
        step = sim.one_step(name, length, digest=i + 1, ends=False)
        for rank in range(2):
            for layer in range(2):
                sim.stored(name, 0, length // 32 * 32, layer, rank, step)
        sim.step([], tokens=1)
        sim.finish(name, length + 1, 2)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {
        "saved": 96 + 64 + 128,
        "not-saved:below-save-granularity": 4 + 6,
        "not-saved:decode-not-offered": 3,
    }
    assert ids(diagnosis) == ["below-save-granularity", "decode-not-offered"]


def test_a_worker_that_decides_and_takes_nothing(tmp_path: Path) -> None:
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    for n, name in enumerate("ab"):
        step = sim.one_step(name, 50, digest=n + 1, unreadable=True)
        for layer in range(2):
            sim.effect(0, step, layer, 0)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["stored-nothing"]
    assert tokens(diagnosis) == {"not-saved:stored-nothing": 100}
    assert "decided on the worker" in said(diagnosis, "stored-nothing")
    assert the(diagnosis, "stored-nothing").remedy[0].startswith("Look at what save_kv_layer")
    run = read_run(tmp_path / "run")
    rows = [replace(one, ends={LoadEnd.LOADED: 1}) for one in run.load_rows]
    came = the(diagnose(replace(run, load_rows=rows)), "stored-nothing")
    assert came.remedy[0].startswith("Where the hook keeps a view of the KV cache")


def test_metadata_never_bound_explains_what_none_names(tmp_path: Path) -> None:
    """One step's metadata names a request, the others' can't be read; in none of them were the hooks run."""
    sim, unbound = sim_of(tmp_path), Fate(unbound_ranks=frozenset({0}))
    sim.watching = WATCHED
    for n, name in enumerate("abc"):
        entries = [] if n else [Entry(name, 64, 64, 0)]
        step = sim.one_step(name, 64, entries, digest=n + 1, unreadable=n > 0, fate=unbound)
        for layer in range(2):
            sim.effect(0, step, layer, 0)
    assert tokens(analyse(sim)) == {"not-saved:metadata-not-bound": 3 * 64}


@pytest.mark.parametrize(
    ("read", "saved", "idle"), [(set(), 0, [3]), ({9}, 0, [3]), ({9}, 32, []), ({4}, 32, [3]), ({3}, 0, [])]
)
def test_a_worker_that_reads_after_the_last_step_took_something(
    read: set[int], saved: int, idle: list[int]
) -> None:
    """A whole prompt is stored when its request is over: that its own steps read nothing says nothing."""
    request = SimpleNamespace(saved=saved, last_step=5)
    engine = SimpleNamespace(watched_steps={3})
    case = SimpleNamespace(engines={"e": engine}, requests={0: request}, read_steps=frozenset(read))
    assert (
        idle_steps(cast(Case, case), cast(LostSpan, SimpleNamespace(engine="e", request=0, step=3))) == idle
    )


def test_a_worker_that_decides_has_a_unit_too(tmp_path: Path) -> None:
    """Nothing in the metadata; blocks of 32 are what the measured stores add up to."""
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    for n, size in enumerate((20, 80, 150)):
        step = sim.one_step(f"r{n}", size, digest=n + 1, unreadable=True)
        for layer in range(2):
            sim.stored(f"r{n}", 0, size // 32 * 32, layer, step=step)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["below-save-granularity"]
    assert tokens(diagnosis) == {"saved": 64 + 128, "not-saved:below-save-granularity": 20 + 16 + 22}


def test_what_metadata_leaves_out_is_said_as_far_as_understood(tmp_path: Path) -> None:
    """It named every block, in a shape that nobody knew: "the metadata names nothing for it"."""
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    step = sim.one_step("a", 80, digest=1, unreadable=True)
    for layer in range(2):
        sim.stored("a", 0, 64, layer, step=step, hook="wait_for_save")
    notes = [analyse(sim).stages[at].note for at in (1, 4)]
    assert all("as far as it is understood" in note for note in notes), notes


def test_unreadable_metadata_rests_on_what_was_measured(tmp_path: Path) -> None:
    sim = sim_of(tmp_path)
    sim.watching = WATCHED
    step = sim.one_step("a", 100, digest=1, ends=False, unreadable=True)
    for layer in range(2):
        sim.stored("a", 0, 96, layer, step=step)
    sim.watching = 0
    sim.one_step("b", 50, digest=2, ends=False, unreadable=True)
    sim.finish("a", 100)
    sim.finish("b", 50)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved": 96, "not-observed": 54}
    assert ids(diagnosis) == []


def saving(tmp_path: Path, name: str, n: int = 6, tp: int = 2, **facts: object) -> Sim:
    """Requests whose asynchronous save begins as they finish."""
    noop = ("save_kv_layer", "wait_for_save")
    sim = Sim(tmp_path / name, tp=tp, ints={"unit": 32}, noop=noop, connector_facts=facts)
    for prompt in prompts([64] * n):
        sim.serve([prompt], Rounding(32).policy())
        sim.open_save(prompt.id)
    return sim


@pytest.mark.parametrize(
    ("ranks", "failed", "ident", "lost", "says"),
    [
        ((), 0, "save-never-finished", 64, "of 6 asynchronous saves that"),
        ((0,), 0, "save-never-finished", 32, "(rank 1)"),
        ((0, 1), 1, "save-lost", 64, ""),
    ],
    ids=["on no rank", "on one rank", "it failed"],
)
def test_an_asynchronous_save_that_did_not_come_to_its_end(
    tmp_path: Path, ranks: tuple[int, ...], failed: int, ident: str, lost: int, says: str
) -> None:
    """The second request's finishes on ``ranks``; all others do on both."""
    sim = saving(tmp_path, "run")
    for i in range(1, 7):
        done = ranks if i == 2 else (0, 1)
        for rank in done:
            sim.done(f"req-{i}", rank)
        if done == (0, 1):
            sim.done(f"req-{i}", failed=failed if i == 2 else 0)
    diagnosis = analyse(sim)
    assert ids(diagnosis)[0] == ident
    assert tokens(diagnosis) == {"saved": 384 - lost, f"not-saved:{ident}": lost}
    text = said(diagnosis, ident)
    assert text.startswith("fault") and says in text


def test_saves_in_flight_are_pending_and_finished_ones_saved(tmp_path: Path) -> None:
    sim = saving(tmp_path, "pending", n=2)
    sim.done("req-1", 0)
    sim.done("req-1", 1)
    sim.done("req-1")
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved": 64, "pending": 64}
    assert any(item.id == "save-never-finished" for item in diagnosis.not_observed)
    sim = saving(tmp_path, "done", n=2)
    for i in (1, 2):
        sim.done(f"req-{i}")
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved": 128} and "save-never-finished" in ruled_out(diagnosis)


@pytest.mark.parametrize("tells", [False, True])
def test_saves_never_finish_where_no_hook_tells_of_it(tmp_path: Path, tells: bool) -> None:
    """request_finished answers True, and get_finished is left to vLLM's base class, which tells of none."""
    diagnosis = analyse(
        saving(tmp_path, "run", 2, overrides=["get_finished"] if tells else ["wait_for_save"])
    )
    if tells:
        assert "in flight" in not_observed(diagnosis)["save-never-finished"]
        return
    finding = the(diagnosis, "save-never-finished")
    assert (finding.severity, finding.requests) == ("fault", 2)
    assert "the connector defines no get_finished, by which vLLM hears of an end" in finding.evidence


@pytest.mark.parametrize(
    ("named", "seconds", "asked"), [(False, 1, True), (False, 0, False), (True, 1, False)]
)
def test_blocks_that_are_kept_for_nothing_are_asked_about(
    tmp_path: Path, named: bool, seconds: int, asked: bool
) -> None:
    """request_finished answered True for what it had no save for, and these blocks were never free."""
    sim = saving(tmp_path, "run", n=1, tp=1)
    sim.done("req-1", 0)
    sim.done("req-1")
    sim.serve([Prompt("b", 20, digest=9)], Rounding(20 if named else 32).policy())
    sim.open_save("b")
    sim.clock(seconds * 10**9)
    for _ in range(ASKED):
        sim.step([], tokens=0)
    diagnosis = analyse(sim)
    if not asked:
        assert "in flight" in not_observed(diagnosis)["save-never-finished"]
        return
    finding = the(diagnosis, "save-never-finished")
    assert (finding.severity, finding.requests) == (LIMIT, 1)
    assert "no metadata names a save of these" in words(finding)
    assert finding.remedy == ["Where nothing is on its way, request_finished must return False"]


@pytest.mark.parametrize(
    ("role", "grade", "later", "severity"),
    [
        ("kv_both", Grade.READ, True, FAULT),
        ("kv_both", Grade.READ, False, LIMIT),
        ("kv_both", Grade.DECLARED, True, LIMIT),
        ("kv_producer", Grade.READ, True, LIMIT),
    ],
    ids=["overtaken", "in a row", "others were fetched unseen", "another engine may come"],
)
def test_blocks_that_nobody_comes_for_are_a_fault(
    tmp_path: Path, role: str, grade: Grade, later: bool, severity: str
) -> None:
    """Those of aborted requests were kept for a save that nobody began, and never given back."""
    sim = Sim(tmp_path, ints={"unit": 32}, noop=("save_kv_layer", "wait_for_save"), role=role)
    lost = [f"{n}" for n in range(3)]
    saved = [f"{n}" for n in range(3, 7)]
    for name in saved[:2] + lost + saved[2:] if later else saved + lost:
        policy = Rounding(64 if name in lost else 32).policy()
        sim.serve([Prompt(name, 33, digest=9 + int(name))], policy)
        sim.open_save(name)
        if name in saved:
            sim.done(name)
    sim.clock(10**9)
    for _ in range(ASKED):
        sim.step([], tokens=0)
    sim.write()
    run = read_run(tmp_path)
    aborted = [one._replace(status=ABORTED if one.id in lost else one.status) for one in run.requests]
    run = replace(run, requests=aborted, base=graded(run.base, grade))
    finding = the(diagnose(run), "save-never-finished")
    assert (finding.severity, finding.requests) == (severity, 3)
    assert finding.evidence[0] == "aborted: all 3 of these, none of the 4 others whose save came back"


def log(sim: Sim, message: str, **more: object) -> None:
    sim.workers[0].fact(
        Fact.LOG,
        {"hook": "", "layer": None, "step": 0, "connector": 71, "logger": "my.store", "level": "WARNING",
         "message": message, "shown": True, "count": 1, **more},
    )  # fmt: skip


def test_connector_disabled_itself(tmp_path: Path) -> None:
    sim = watched(tmp_path, [64, 128], policy=Policy(nothing))
    log(sim, "no backend at localhost:9: saving is disabled")
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["connector-disabled-itself"]
    assert tokens(diagnosis) == {"not-saved:connector-disabled-itself": 192}
    assert "saving is disabled" in said(diagnosis, "connector-disabled-itself")
    sim = watched(tmp_path, [64, 128], name="healthy")
    log(sim, "compression of the store is disabled")
    assert ids(analyse(sim)) == []
    sim = watched(tmp_path, [64, 128], policy=Policy(nothing), name="other")
    log(sim, "took 3 s to connect")
    assert ids(analyse(sim)) == ["metadata-has-no-store"]


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("no endpoint given: running without a store", "connector-disabled-itself"),
        ("no device found, falling back to recompute", "connector-disabled-itself"),
        ("backend is not reachable", "connector-disabled-itself"),
        ("falling back to the default page size", "metadata-has-no-store"),
        ("running without TLS", "metadata-has-no-store"),
        ("the storage key was not found in the configuration, using defaults", "metadata-has-no-store"),
    ],
)
def test_what_a_connector_says_it_lacks_as_it_is_made_explains(
    tmp_path: Path, message: str, found: str
) -> None:
    sim = watched(tmp_path, [64, 128], policy=Policy(nothing))
    log(sim, message, hook="create_connector")
    assert ids(analyse(sim)) == [found]
    later = watched(tmp_path, [64, 128], policy=Policy(nothing), name="later")
    log(later, message, hook="get_finished")
    assert ids(analyse(later)) == ["metadata-has-no-store"]


def keys(sim: Sim, given: list[str], read: list[str]) -> None:
    for spool in (sim.scheduler, sim.workers[0]):
        spool.fact(Fact.CONFIG_KEYS, {"connector": 70, "given": given, "read": read})


def test_config_key_unused(tmp_path: Path) -> None:
    def run(name: str, given: list[str], read: list[str], policy: Policy) -> Diagnosis:
        sim = watched(tmp_path, [64, 128], policy=policy, name=name)
        keys(sim, given, read)
        return analyse(sim)

    diagnosis = run("note", ["path", "chunk_sise"], ["path", "chunk_size"], Rounding(32).policy())
    assert ids(diagnosis) == ["config-key-unused"]
    text = said(diagnosis, "config-key-unused")
    assert text.startswith("note") and '"chunk_sise": did you mean "chunk_size"?' in text
    diagnosis = run("fault", ["path", "chunk_sise"], ["path", "chunk_size"], Policy(nothing))
    assert said(diagnosis, "config-key-unused").startswith("fault")
    # What nothing explains comes after what may be its reason.
    assert ids(diagnosis) == ["config-key-unused", "metadata-has-no-store"]
    diagnosis = run("far", ["path", "options"], ["path", "least"], Policy(nothing))
    assert '"options"' in the(diagnosis, "metadata-has-no-store").remedy[0]
    assert 'its source asks for "least", which was not given' in said(diagnosis, "config-key-unused")
    diagnosis = run("read", ["path", "unit"], ["path", "unit", "other"], Rounding(32).policy())
    assert ids(diagnosis) == [] and "all 2 keys" in ruled_out(diagnosis)["config-key-unused"]
    diagnosis = run("dark", ["path", "unit"], [], Rounding(32).policy())
    assert ids(diagnosis) == [] and "config-key-unused" not in ruled_out(diagnosis)
    sim = watched(tmp_path, [64, 128], name="hidden")
    keys(sim, ["path", "chunk_sise"], ["path"])
    hidden = {"connector": 71, "given": ["path", "chunk_sise"], "hidden": True}
    sim.workers[0].fact(Fact.CONFIG_KEYS, hidden)  # one of its processes may read any key
    diagnosis = analyse(sim)
    assert ids(diagnosis) == [] and "config-key-unused" not in ruled_out(diagnosis)


def whole(sim: Sim, name: str, length: int, **more: object) -> None:
    """Offered when the prompt is complete."""
    sim.arrive(Prompt(name, length, digest=length))
    done = 0
    while done < length:
        size = min(128, length - done)
        last = done + size == length
        sim.step([Chunk(name, done, size, first=not done)], [Entry(name, length, -1, 0)] if last else [],
                 prompts={name: length})  # fmt: skip
        done += size
    sim.finish(name, length)


def test_preempted_before_save(tmp_path: Path) -> None:
    def run(name: str, offered: bool) -> Diagnosis:
        sim = sim_of(tmp_path, name, batched=128)
        whole(sim, "a", 256)
        whole(sim, "b", 384)
        sim.arrive(Prompt("c", 320, digest=3))
        sim.step([Chunk("c", 0, 128, first=True)], prompts={"c": 320})
        sim.preempt("c", 128)
        for at in (0, 128, 256):
            entries = [Entry("c", 320, -1, 0)] if offered and at == 256 else []
            sim.step([Chunk("c", at, min(128, 320 - at), resumed=at == 0)], entries, prompts={"c": 320})
        sim.finish("c", 320)
        return analyse(sim)

    diagnosis = run("lost", offered=False)
    assert ids(diagnosis) == ["preempted-before-save"]
    assert tokens(diagnosis) == {"saved": 640, "not-saved:preempted-before-save": 320}
    assert diagnosis.findings[0].severity == "limit"
    diagnosis = run("kept", offered=True)
    assert ids(diagnosis) == [] and "preempted-before-save" in ruled_out(diagnosis)


def test_aborted_before_save(tmp_path: Path) -> None:
    def run(name: str, status: str) -> Diagnosis:
        sim = sim_of(tmp_path, name, batched=128)
        whole(sim, "a", 256)
        sim.arrive(Prompt("c", 512, digest=3))
        for at in (0, 128):
            sim.step([Chunk("c", at, 128, first=at == 0)], prompts={"c": 512})
        sim.finish("c", 256, 0, status)
        return analyse(sim)

    diagnosis = run("aborted", "FINISHED_ABORTED")
    assert ids(diagnosis) == ["aborted-before-save"]
    assert tokens(diagnosis) == {"saved": 256, "not-saved:aborted-before-save": 256}
    assert ids(run("stopped", "FINISHED_STOPPED")) == ["metadata-has-no-store"]


@pytest.mark.parametrize("in_part", [False, True])
def test_an_abort_explains_nothing_where_nobody_was_offered(tmp_path: Path, in_part: bool) -> None:
    """... or of another prompt, which ran to its end, a part alone."""
    sim = sim_of(tmp_path)
    if in_part:
        sim.one_step("a", 128, [Entry("a", 32, -1, 0)], digest=1)
    sim.one_step("c", 64, digest=3, ends=False)
    sim.finish("c", 64, 0, "FINISHED_ABORTED")
    (found,) = analyse(sim).findings
    assert found.id == "metadata-has-no-store"


def test_metadata_cleared_early(tmp_path: Path) -> None:
    def run(name: str, bound: bool) -> Diagnosis:
        sim = Sim(tmp_path / name, layers=3, ints={"unit": 32}, noop=("wait_for_save",))
        fate = Fate(after_clear=frozenset({2}), unbound_ranks=frozenset() if bound else frozenset({0}))
        sim.serve(prompts([64, 128]), Rounding(32).policy(), fate=lambda n: fate)
        return analyse(sim)

    diagnosis = run("draft", bound=True)
    assert ids(diagnosis) == ["metadata-cleared-early"]
    assert tokens(diagnosis) == {"saved": 128, "not-saved:metadata-cleared-early": 64}
    assert ids(run("unbound", bound=False))[0] == "metadata-not-bound"


def test_captured_not_run(tmp_path: Path) -> None:
    def run(name: str, captured: bool) -> Diagnosis:
        sim = sim_of(tmp_path, name)
        every = frozenset({(0, 0), (0, 1)})
        if captured:
            for layer in sim.layer_names:
                sim.body(0, 0, layer)
        sim.serve(prompts([64, 128]), Rounding(32).policy(), fate=lambda n: Fate(dead_pairs=every, mode=1))
        return analyse(sim)

    diagnosis = run("captured", captured=True)
    assert ids(diagnosis)[0] == "captured-not-run"
    assert tokens(diagnosis) == {"not-saved:captured-not-run": 192}
    assert ids(run("never", captured=False))[0] == "layer-not-hooked"


@pytest.mark.parametrize(
    ("hook", "found"), [("wait_for_save", "save-blocks-step"), ("save_kv_layer", "hook-slow")]
)
def test_slow_hooks_are_notes(tmp_path: Path, hook: str, found: str) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.slow = {hook: 300_000_000}
    sim.serve(prompts([64] * 5), Rounding(32).policy())
    diagnosis = analyse(sim)
    assert ids(diagnosis) == [found]
    text = said(diagnosis, found)
    assert text.startswith("note") and "instead of" in text
    assert tokens(diagnosis) == {"saved": 320}


def test_quick_hooks_are_ruled_out(tmp_path: Path) -> None:
    diagnosis = analyse(served(tmp_path, [64] * 5))
    assert {"save-blocks-step", "hook-slow"} <= set(ruled_out(diagnosis))
    assert {"tracer-cost", "sync-in-hook"} <= {item.id for item in diagnosis.not_observed}


def test_a_large_share_of_a_short_run_is_not_slow_nor_ruled_out(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.slow = {"wait_for_save": 50_000_000, "save_kv_layer": 20_000_000}
    sim.serve(prompts([64] * 5), Rounding(32).policy())
    diagnosis = analyse(sim)
    assert ids(diagnosis) == []
    unseen = not_observed(diagnosis)
    assert "too short a run" in unseen["save-blocks-step"] and "save_kv_layer" in unseen["hook-slow"]
    assert not {"save-blocks-step", "hook-slow"} & set(ruled_out(diagnosis))


def test_most_of_every_step_is_slow_in_a_short_run_too(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.slow = {"wait_for_save": 150_000_000}
    sim.serve(prompts([64] * 5), Rounding(32).policy())
    assert ids(analyse(sim)) == ["save-blocks-step"]


def test_a_hook_that_waits_without_a_forward_is_not_slow(tmp_path: Path) -> None:
    sim = served(tmp_path, [64] * 2)
    sim.slow = {"get_finished": 100_000_000}
    for _ in range(20):
        sim.step()
    diagnosis = analyse(sim)
    assert ids(diagnosis) == []
    unseen = not_observed(diagnosis)
    assert "in steps without a forward" in unseen["hook-slow"]


def test_a_file_of_all_ranks_and_layers_is_no_layers_own(tmp_path: Path) -> None:
    """An index beside the data: shared on purpose."""
    sim = served(tmp_path, [64], tp=2, noop=("wait_for_save",))
    for rank in range(2):
        for layer in range(2):
            sim.effect(rank, sim.tag << 32 | 1, layer, 64, size=9999, files=2, target=77)
    assert ids(analyse(sim)) == []


def test_less_than_a_block_that_nobody_read(tmp_path: Path) -> None:
    sim = sim_of(tmp_path, ints={})
    policy = Policy(lambda p, i, start, end, last: [Entry(p.id, end - start, -1, start)])
    sim.serve(prompts([20, 64, 40]), policy, measure=lambda n, r, layer, s: s // 32 * 32)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["below-save-granularity"]
    assert tokens(diagnosis) == {"saved": 96, "not-saved:below-save-granularity": 28}
