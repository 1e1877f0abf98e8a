"""Findings that follow from what was read, and from exceptions of work that saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnosed import analyse, graded, ids, ruled_out, served, the
from synth import Chunk, Entry, Policy, Prompt, Rounding, Sim, nothing
from test_load_rules import again

from kvtrace.causes import diagnose
from kvtrace.causes.case import kept_before, make_case
from kvtrace.causes.evidence.taken import _kept
from kvtrace.causes.evidence.unit import Sample, StoredUnits, infer_unit
from kvtrace.ledger import read_run
from kvtrace.ledger.ends import LoadEnd, SaveEnd
from kvtrace.ledger.reported import Caught
from kvtrace.ledger.run import (
    AsyncSave,
    HookException,
    LostSpan,
    OutcomeAmount,
    OutsideBytes,
    Run,
    Swallowed,
)
from kvtrace.ledger.saves.pairs import reads_of
from kvtrace.ledger.slots.accounts import Account
from kvtrace.ledger.slots.reads import Touch
from kvtrace.terms import LIMIT, NOT_OBSERVED, Grade


def sample(prompt: int, taken: int) -> Sample:
    return Sample(prompt, (), explained=False, after_empty=False, first_chunk=None, taken=taken)


def run_of(tmp_path: Path, lengths: Sequence[int] = (64, 128), **ints: int) -> Run:
    sim = served(tmp_path, [*lengths], Rounding(32).policy(), ints=ints)
    sim.write()
    return read_run(tmp_path)


def run_again(tmp_path: Path) -> Run:
    """A prompt comes twice, and the lookup finds nothing."""
    sim = Sim(tmp_path, ints={"unit": 32})
    again(sim, [129, 129], [128, 128], [0, 0])
    sim.write()
    return read_run(tmp_path)


@pytest.mark.parametrize(
    ("ints", "kept", "unit", "kind"),
    [
        ({"fan": 4}, [(200, 128), (300, 256)], 128, "blocks"),  # so many blocks of 32
        ({"_left": 4}, [(128, 128), (200, 0), (300, 0)], 32, "block_size"),  # what is left is no unit
        ({"span": 96}, [(100, 96), (200, 192), (50, 0)], 96, "attribute"),
        ({}, [(100, 96), (50, 0)], 32, "block_size"),  # one kept, one left out: that names no unit
        ({}, [(100, 96), (200, 192), (120, 0)], 32, "block_size"),  # one that fills 96 was left out
        ({}, [(120, 96), (310, 192)], None, None),
    ],
)
def test_the_unit_follows_from_what_was_seen_to_be_kept(
    tmp_path: Path, ints: dict[str, int], kept: list[tuple[int, int]], unit: int | None, kind: str | None
) -> None:
    engine = run_of(tmp_path, **ints).engines[0]
    found = infer_unit(engine, [sample(*one) for one in kept], [])
    assert (found and found.value, found and found.kind) == (unit, kind)


@pytest.mark.parametrize(
    ("end", "unit"), [(384, 128), (383, None)], ids=["filled by a generated token", "not"]
)
def test_a_prompt_that_was_kept_as_a_whole_is_no_unit(tmp_path: Path, end: int, unit: int | None) -> None:
    whole = replace(sample(383, 383), stores=(StoredUnits(1, end, -1, 0, end),))
    kept = (StoredUnits(1, 256, -1, 0, 256),)
    named = [Sample(n, kept, explained=False, after_empty=False, first_chunk=None) for n in (371, 376)]
    found = infer_unit(run_of(tmp_path, span=128).engines[0], [whole, *named], [])
    assert (found.value if found else None) == unit


@pytest.mark.parametrize("there", [70, 96], ids=["nothing but the prompt", "generated tokens"])
def test_a_prompt_kept_in_a_block_it_does_not_fill_has_no_unit(tmp_path: Path, there: int) -> None:
    """Whole blocks are named, and the last one is stored as far as it goes: nothing is left out by a unit."""
    whole = replace(sample(70, 70), stores=(StoredUnits(1, 96, -1, 0, there),))
    found = infer_unit(run_of(tmp_path).engines[0], [whole, sample(128, 128)], [])
    assert (found.value if found else None) == (None if there == 70 else 32)


def test_a_chunk_is_no_unit(tmp_path: Path) -> None:
    """Of each prompt the first 128 tokens were kept: all that was there when it was offered, once. That is
    seen; that what a step computes is a unit takes a prompt that fills two of them, or one that is offered
    again."""
    engine = run_of(tmp_path).engines[0]
    engine = replace(engine, facts=replace(engine.facts, max_num_batched_tokens=128))
    once = [
        replace(sample(prompt, 128), first_chunk=chunk, stores=(StoredUnits(step, 128, -1, 0, available),))
        for prompt, chunk, step, available in ((243, 1, 1, 128), (226, 2, 3, 135), (262, 4, 4, 128))
    ]
    found = infer_unit(engine, once, [])
    assert found is not None and found.kind == "block_size"
    found = infer_unit(engine, once[:2], [])
    assert found is not None and found.kind == "block_size"
    # Offered with each chunk, and no further than that: then it is one.
    later = [replace(one, stores=(*one.stores, StoredUnits(9, 0, -1, 128, one.prompt))) for one in once[:2]]
    found = infer_unit(engine, later, [])
    assert found is not None and (found.value, found.kind) == (128, "max_num_batched_tokens")


@pytest.mark.parametrize(
    ("kept", "values"), [(448, "64"), (128, "32 or 64"), (480, "32")], ids=["64", "one chunk", "32"]
)
def test_so_many_blocks_as_give_every_store_are_the_unit(tmp_path: Path, kept: int, values: str) -> None:
    """128 of 188 tokens, whose second chunk fills a block and no 64 tokens: a block is the unit only if later
    chunks are left out. A constant of the code has no name. Of prompts of which as
    much was kept a chunk may be all that was."""
    once = replace(sample(188, 128), first_chunk=1, stores=(StoredUnits(1, 128, -1, 0, 128),))
    samples = [once, sample(150, 128), sample(kept + 2, kept), sample(20, 0)]
    found = infer_unit(run_of(tmp_path).engines[0], samples, [])
    assert found is not None and found.values == values


def test_what_was_kept_over_several_chunks_is_all_there_was(tmp_path: Path) -> None:
    """192 of 210 tokens, in two steps: no unit of 8, whatever the connector calls that number."""
    engine = run_of(tmp_path, segment_pages=8).engines[0]
    stores = (StoredUnits(1, 160, -1, 0, 160), StoredUnits(2, 32, -1, 160, 210))
    chunked = replace(sample(210, 192), first_chunk=1, stores=stores)
    found = infer_unit(engine, [chunked, sample(128, 128), sample(40, 0)], [])
    assert found is not None and found.kind == "block_size"


def test_incomplete_stores_give_a_unit_only_by_different_tails(tmp_path: Path) -> None:
    engine = run_of(tmp_path, span=96).engines[0]
    unsure = [
        Sample(prompt, (StoredUnits(1, named, -1, 0, prompt),), False, False, None, heard=False)
        for prompt, named in ((382, 288), (259, 192))
    ]
    found = infer_unit(engine, unsure, [])
    assert found is not None and (found.value, found.kind) == (96, "attribute")
    assert infer_unit(engine, unsure[:1], []) is None
    # What is known of another request goes before it.
    found = infer_unit(engine, [*unsure, sample(128, 128)], [])
    assert found is not None and found.kind == "block_size"


def test_what_was_kept_of_a_prompt() -> None:
    assert _kept([], 128, 2) == 128
    assert _kept([(96, 128, 2)], 128, 2) == 96
    assert _kept([(0, 128, 2)], 128, 2) == 0
    assert _kept([(96, 128, 1)], 128, 2) is None  # in one pair of two
    assert _kept([(32, 64, 2), (96, 128, 2)], 128, 2) is None  # in pieces
    assert _kept([(0, 32, 2)], 128, 2) is None


def swallowed(**more: object) -> Swallowed:
    fact = Swallowed(
        hook="thread", type="OSError", message="[Errno 122] quota", where="store.py:1 in put", count=2,
        asked_by="wait_for_save",
    )  # fmt: skip
    return replace(fact, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "severity"),
    [
        ({}, "fault"),
        ({"went_on": True}, "note"),  # a lookup that missed
        ({"type": "FileExistsError"}, None),
        ({"type": "FileExistsError", "ended": True}, "fault"),  # into a future that nobody asks
        ({"type": "FileNotFoundError", "ended": True}, "fault"),
        ({"type": "FileNotFoundError", "went_on": False}, None),  # by which code finds out what is there
        ({"type": "FileNotFoundError", "went_on": False, "in_vain": "/mnt/1/a"}, "fault"),
        ({"type": "KeyError", "message": "'x'"}, "note"),  # by which code may find out
        ({"type": "KeyError", "message": "'x'", "ended": True}, "fault"),
        ({"type": "Empty", "ended": True, "message": ""}, "note"),
        ({"asked_by": "start_load_kv"}, "note"),
        ({"hook": "wait_for_save", "asked_by": "", "type": "TimeoutError", "went_on": False}, "fault"),
        ({"hook": "wait_for_save", "asked_by": ""}, "fault"),  # no KV was touched in the call that puts
    ],
)  # fmt: skip
def test_an_exception_where_saves_are_not_seen_to_come_to_rest(
    tmp_path: Path, more: dict[str, object], severity: str | None
) -> None:
    run = run_of(tmp_path)
    base = graded(run.base, Grade.READ)
    step = run.entries[0].step
    fact = swallowed(places=((step, ""),), **more)
    diagnosis = diagnose(replace(run, base=base, swallowed=(fact,)))
    found = {one.id: one.severity for one in diagnosis.findings}
    assert found.get("exception-swallowed") == severity
    if severity == "fault":
        first = diagnosis.findings[0]
        assert (first.id, first.tokens, first.requests) == ("exception-swallowed", 64, 1)
        assert first.headline[1:] in diagnosis.verdict
        assert any("to write was made: in /mnt/1, for one" in one for one in first.evidence) == bool(
            fact.in_vain
        )
    # What was seen to come to rest is not lost, whatever was caught.
    rest = diagnose(replace(run, base=graded(base, Grade.WRITTEN), swallowed=(fact,)))
    assert "fault" not in {one.severity for one in rest.findings}


@pytest.mark.parametrize(
    ("account", "end", "grade"),
    [
        (Account.OPEN, SaveEnd.CAUGHT, Grade.READ),
        (Account.PARTLY, SaveEnd.CAUGHT, Grade.NOT_OBSERVED),
        (Account.WRITTEN, SaveEnd.SAVED, Grade.WRITTEN),
    ],
)
def test_a_read_with_a_caught_exception_is_lost_if_none_is_put(
    tmp_path: Path, account: Account, end: SaveEnd, grade: Grade
) -> None:
    """One of several puts of a call may have been refused, or an index alone was not written."""
    run = run_of(tmp_path)
    step, worker = run.entries[0].step, run.engines[0].workers[0]
    caught = Caught((swallowed(places=((step, ""),)),))
    touch = Touch(step, 0, 0b11, ((0, 64),), account=account)
    (read,) = reads_of(touch, worker, caught)
    assert read.result[:2] == (end, grade)
    # It may have been put once more, in halves: a batch that was refused, and landed.
    (read,) = reads_of(touch, worker, Caught((swallowed(places=((step, ""),), message="503 slow down"),)))
    assert read.result[:2] == (end, grade if end == SaveEnd.SAVED else Grade.NOT_OBSERVED)


@pytest.mark.parametrize(
    ("kind", "message", "severity"),
    [("OSError", "[Errno 122] quota", "fault"), ("RuntimeError", "[Errno 122] quota", "fault"),
     ("ConnectionError", "503 slow down", "limit")],
)  # fmt: skip
def test_what_is_not_observed_for_an_exception_is_a_fault(
    tmp_path: Path, kind: str, message: str, severity: str
) -> None:
    run = run_of(tmp_path)
    step = run.entries[0].step

    def unknown(table: Sequence[OutcomeAmount]) -> list[OutcomeAmount]:
        return [
            one if one.request else one._replace(outcome=NOT_OBSERVED, ended=int(SaveEnd.CAUGHT))
            for one in table
        ]

    # Of what it generated later nothing is known either, and no exception was caught there.
    later = run.whole[0]._replace(outcome=NOT_OBSERVED, ended=int(SaveEnd.NOT_OBSERVED), amount=3, prompt=0)
    run = replace(run, base=unknown(run.base), whole=[*unknown(run.whole), later])
    caught = swallowed(type=kind, message=message, places=((step, ""),))
    diagnosis = diagnose(replace(run, swallowed=(caught,)))
    first = diagnosis.findings[0]
    assert (first.id, first.severity, first.tokens) == ("exception-swallowed", severity, 64)
    assert first.title.endswith("Was it tried once more?") == (severity == "limit")
    assert first.grade == Grade.READ
    assert "came to rest" in first.title
    assert "not-saved:exception-swallowed" not in diagnosis.saves.accounts


def test_a_caught_exception_stands_beside_a_save_not_at_rest(tmp_path: Path) -> None:
    """Such an exception was taken for control flow, and the prompt for stored, with nothing to fix."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt(f"a{i}", 128, digest=5) for i in range(2)], Rounding(32, keep=True).policy())
    sim.write()
    run = read_run(tmp_path)
    fact = swallowed(places=((run.entries[0].step, ""),), type="FileExistsError", message="x")
    for grade, said in ((Grade.READ, True), (Grade.WRITTEN, False)):
        found = diagnose(replace(run, base=graded(run.base, grade), swallowed=(fact,)))
        finding = the(found, "already-stored")
        assert any("where it saves: FileExistsError: x" in line for line in finding.evidence) == said


def test_an_exception_where_it_saves_stands_beside_a_missed_key(tmp_path: Path) -> None:
    """An index that could not be written was called another key, and its exception was in a note."""
    run = run_again(tmp_path)
    fact = swallowed(type="OperationalError", message="database is locked", places=())
    for caught in ((), (fact,)):
        one = the(diagnose(replace(run, swallowed=caught)), "key-mismatch")
        assert any("OperationalError: database is locked" in line for line in one.evidence) == bool(caught)
        assert one.remedy[0].startswith("First look at the exception") == bool(caught)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_store_that_is_emptied_is_not_called_another_key(tmp_path: Path, emptied: bool) -> None:
    run = run_again(tmp_path)
    if emptied:
        gone = OutsideBytes(1, 1000, 1000, 0, 1000, 4, files=8, removed=8, put=1000, taken_away=1000)
        run = replace(run, outside=(gone,))
    found = the(diagnose(run), "key-mismatch")
    assert (found.severity == LIMIT) == emptied == ("removes what it stored" in found.title)
    assert any("8 of 8 files that it wrote" in line for line in found.evidence) == emptied


def lost_of(run: Run, request: int, start: int, end: int, ended: SaveEnd, step: int, pairs: int = 2,
            kind: str = "prefill") -> list[LostSpan]:  # fmt: skip
    """What the run lost: one range of a request's positions."""
    tag = run.engines[0].tag
    return [LostSpan(request, tag, start, end, pairs, kind, step, ended, True, Grade.READ)]


def losing(run: Run, end: SaveEnd, request: int = 0, **more: Any) -> Run:
    """The run with all tokens of a prompt lost; ``more``: fields of it."""
    of = run.requests[request]
    lost = lost_of(run, request, 0, of.prompt, end, of.chunk_step)
    return replace(run, lost=lost, base=[one for one in run.base if one.request != request], **more)


@pytest.mark.parametrize(("last", "ident"), [(-1, "exception-swallowed"), (1, "store-incomplete")])
def test_exceptions_that_came_too_often_to_be_said_one_by_one(tmp_path: Path, last: int, ident: str) -> None:
    """Of those after the sixteenth the steps are not all known: what is lost after it is theirs."""
    run = run_of(tmp_path)
    step = run.requests[1].chunk_step
    fact = swallowed(places=((step + last, ""),) * 16, count=16, went_on=False)
    found = diagnose(losing(run, SaveEnd.NOT_AT_REST, 1, swallowed=(fact,))).findings
    assert found[0].id == ident


@pytest.mark.parametrize(("end", "kept"), [(SaveEnd.NOTHING_READ, 64), (SaveEnd.NOT_DECLARED, 128)])
def test_what_is_lost_of_an_earlier_prompt_is_not_held(tmp_path: Path, end: SaveEnd, kept: int) -> None:
    """What was left out as held already is no loss."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt(name, 128, digest=5) for name in "ab"], Rounding(32).policy())
    sim.write()
    run = read_run(tmp_path)
    step = run.requests[0].chunk_step
    case = make_case(replace(run, lost=lost_of(run, 0, 64, 128, end, step, pairs=1)))
    assert kept_before(case, case.requests[1], Grade.DECLARED) == kept


@pytest.mark.parametrize("named", [True, False])
def test_a_layer_that_is_never_read_is_one_finding(tmp_path: Path, named: bool) -> None:
    """Three false ones stood beside it, and it said "1 to 3 of 4 layers"."""
    sim = Sim(tmp_path, layers=4, batched=200, kv_blocks=64, ints={"unit": 32})
    for at, length in enumerate([320, 128, 512, 64, 128]):
        request = f"r{at}"
        sim.arrive(Prompt(request, length, digest=at + 1))
        for start in range(0, length, 200):
            end = min(length, start + 200)
            entries = [Entry(request, end - start, end, start)] if named else []
            sim.step(
                [Chunk(request, start, end - start, first=not start)], entries, prompts={request: length}
            )
            sim.read(request, start, end, layers=[0, 1, 2])
        sim.finish(request, length)
    sim.write()
    run = read_run(tmp_path)
    (found,) = diagnose(run).findings
    assert (found.id, found.tokens) == ("stored-nothing", 1152) and "some layers" in found.headline
    assert [(one.layer, one.tokens) for one in run.kept if not one.tokens] == [(sim.layer_names[3], 0)]


@pytest.mark.parametrize(("end", "out"), [(SaveEnd.MISPLACED, False), (SaveEnd.LOST_LATER, True)])
def test_no_preemption_is_ruled_out_beside_reads_of_others_kv(
    tmp_path: Path, end: SaveEnd, out: bool
) -> None:
    """It may have given the blocks to another before they were read."""
    run = run_of(tmp_path)
    first, *others = run.requests
    requests = [first._replace(preemptions=1, preempt_step=first.chunk_step), *others]
    found = diagnose(losing(run, end, requests=requests))
    assert ("preempted-before-save" in ruled_out(found)) == out


def test_prompts_left_out_that_begin_like_a_stored_are_a_choice(tmp_path: Path) -> None:
    """A key of the first tokens alone would do so, and so does admission on second use."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt("a", 128, digest=1, prefixes=(7, 8, 9))], Rounding(32).policy())
    rest = [Prompt(f"r{n}", 128, digest=n, prefixes=(7, n * 10, n * 100)) for n in (2, 3)]
    sim.serve(rest, Rounding(4096).policy())
    first = analyse(sim).findings[0]
    assert (first.id, first.requests, first.severity) == ("metadata-has-no-store", 2, LIMIT)


def test_what_is_not_offered_behind_a_hit_is_not_for_stored(tmp_path: Path) -> None:
    """The connector loads the part that it has, and never offers the rest; its keys were blamed."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt("a", 128, digest=1, prefixes=(7, 8, 9))], Rounding(32).policy())
    rest = [Prompt(f"r{n}", 128, digest=n, prefixes=(7, n * 10, n * 100)) for n in (2, 3)]
    sim.serve(rest, Policy(nothing, match=lambda prompt, local: 32))
    diagnosis = analyse(sim)
    assert diagnosis.loads.tokens["loaded"] == 64
    assert "false-already-stored" not in {one.id for one in diagnosis.findings}


@pytest.mark.parametrize("end", [SaveEnd.MISPLACED, SaveEnd.READ_LATE])
def test_a_save_that_is_told_before_it_is_read_is_to_wait(tmp_path: Path, end: SaveEnd) -> None:
    run = losing(run_of(tmp_path), end)
    early = AsyncSave(0, SaveEnd.SAVED, (0,), (), {}, early=True)
    for saves in ([], [early]):
        found = the(diagnose(replace(run, async_saves=saves)), "kv-misplaced")
        assert found.remedy[0].startswith("Report a save in get_finished once all") == bool(saves)
        assert any("finished before it was read" in line for line in found.evidence) == bool(saves)
    preempted = replace(run, requests=[one._replace(preemptions=1) for one in run.requests])
    assert any("preempted request" in line for line in the(diagnose(preempted), "kv-misplaced").remedy)
    assert not any("preempted request" in line for line in the(diagnose(run), "kv-misplaced").remedy)


@pytest.mark.parametrize("preemptions", [0, 1])
def test_stale_kv_of_preempted_requests_alone(tmp_path: Path, preemptions: int) -> None:
    """What had been computed before the preemption was counted as there."""
    run = losing(run_of(tmp_path), SaveEnd.STALE)
    run = replace(run, requests=[one._replace(preemptions=preemptions) for one in run.requests])
    found = the(diagnose(run), "kv-stale")
    assert found.remedy[0].startswith("When a request resumes") == bool(preemptions)
    assert ("each was preempted (1 request)" in found.evidence) == bool(preemptions)


@pytest.mark.parametrize(
    ("end", "ident"),
    [
        (SaveEnd.STALE, "kv-stale"),
        (SaveEnd.MISPLACED, "kv-misplaced"),
        (SaveEnd.READ_LATE, "kv-misplaced"),
        (SaveEnd.PUT_FAILED, "store-failed"),
        (SaveEnd.NOT_AT_REST, "exception-swallowed"),
        (SaveEnd.LOST_LATER, "store-lost-later"),
    ],
)
def test_what_was_read_and_is_not_in_the_store_as_it_should_be(
    tmp_path: Path, end: SaveEnd, ident: str
) -> None:
    run = run_of(tmp_path)
    first = run.requests[0].chunk_step
    diagnosis = diagnose(losing(run, end, swallowed=(swallowed(places=((first, ""),)),)))
    found = diagnosis.findings[0]
    severity = "limit" if ident == "store-lost-later" else "fault"
    assert (found.id, found.severity, found.tokens, found.grade) == (ident, severity, 64, Grade.READ)
    where = "64 of 64 tokens of 1 request, in 2 of 2 (layer, rank) pairs, "
    first = [line.startswith(where) for line in found.evidence]
    # of a failed put the exception comes before how much it cost
    assert first[0] == (ident not in ("store-failed", "exception-swallowed"))
    assert any(first) == (ident != "exception-swallowed")
    assert ("OSError" in " ".join(found.evidence)) == (ident in ("store-failed", "exception-swallowed"))
    assert found.remedy[0].startswith("Look at store.py:1") == (ident == "store-failed")
    assert ("once other requests had them" in found.title) == (end == SaveEnd.READ_LATE)
    # The exception is the put's: it is not told twice as a fault.
    twice = {one.id for one in diagnosis.findings if one.severity == "fault"}
    assert twice == ({ident} if severity == "fault" else set())


def test_files_stay_empty_where_the_evidence_says(tmp_path: Path) -> None:
    """What raised before the first byte is to be looked at first, ended it a save or not; that a file is not
    there is how code finds out."""
    run = run_of(tmp_path)
    place = (run.requests[0].chunk_step, "")
    fact = swallowed(type="TypeError", message="no bfloat16", went_on=False, places=(place,))
    asked = replace(fact, type="FileNotFoundError", where="store.py:9 in has", count=99)
    found = the(diagnose(losing(run, SaveEnd.NOT_AT_REST, swallowed=(asked, fact))), "store-incomplete")
    assert found.remedy[0] == "Look at store.py:1 in put: what was to be stored raises TypeError there"
    assert found.remedy[1].startswith("Flush and close")


def test_of_a_prompt_not_seen_whole_a_loss_is_one_at_least(tmp_path: Path) -> None:
    """Of 320 tokens that were read in a wrong place 64 were known: they passed for all."""
    run = losing(run_of(tmp_path), SaveEnd.MISPLACED)
    unseen = run.base[0]._replace(request=run.lost[0].request, outcome=NOT_OBSERVED, prompt=True, amount=0)
    found = the(diagnose(replace(run, base=[*run.base, unseen])), "kv-misplaced")
    assert found.evidence[0].startswith("at least 64 of 64 tokens of 1 request, ")


@pytest.mark.parametrize(
    ("end", "ident"),
    [
        (SaveEnd.NOT_AT_REST, "store-incomplete"),
        (SaveEnd.NOTHING_READ, "stored-nothing"),
    ],
)
@pytest.mark.parametrize("hook", ["", "thread", "save_kv_layer"])
def test_an_exception_stands_before_what_it_explains(
    tmp_path: Path, end: SaveEnd, ident: str, hook: str
) -> None:
    run = run_of(tmp_path)
    first = run.requests[0].chunk_step
    raised = HookException(hook=hook, type="OSError", message="x", where="s.py:1", step=first, count_so_far=1)
    requests = [one._replace(saved=0) for one in run.requests]
    diagnosis = diagnose(losing(run, end, requests=requests, exceptions=(raised,) if hook else ()))
    behind = {"thread": (SaveEnd.NOT_AT_REST,), "save_kv_layer": (SaveEnd.NOTHING_READ,)}
    cause = "hook-raised" if end in behind.get(hook, ()) else ident
    order = [one.id for one in diagnosis.findings if one.severity == "fault"]
    assert order[0] == ("hook-raised" if hook and ident == "stored-nothing" else cause)
    assert cause in order


@pytest.mark.parametrize("end", [SaveEnd.PART_READ, SaveEnd.NOTHING_READ])
@pytest.mark.parametrize("hooks", [["build_connector_worker_meta"], ["wait_for_save"]])
def test_what_workers_may_take_back_is_a_choice(tmp_path: Path, end: SaveEnd, hooks: list[str]) -> None:
    """A worker dropped units over its quota, and said so: the lookup promised what had landed alone."""
    sim = served(tmp_path, [64, 128], Rounding(32).policy(), connector_facts={"overrides": hooks})
    sim.write()
    run = read_run(tmp_path)
    base = graded(run.base, Grade.READ)
    (found,) = (
        one
        for one in diagnose(losing(replace(run, base=base), end)).findings
        if one.id in ("slots-short", "stored-nothing")
    )
    answers = "build_connector_worker_meta" in hooks
    assert (found.severity == "limit") is answers
    assert found.title.endswith("Is that meant?") is answers


@pytest.mark.parametrize(
    ("grade", "ident"), [(Grade.READ, "decode-not-offered"), (Grade.DECLARED, "stored-nothing")]
)
def test_generated_tokens_seemingly_named_that_nobody_reads(tmp_path: Path, grade: Grade, ident: str) -> None:
    run = run_of(tmp_path)
    lost = lost_of(run, 0, 64, 66, SaveEnd.NOTHING_READ, 0, kind="decode")
    engine = replace(run.engines[0], decode_entries=1)
    total = run.total + 4
    diagnosis = diagnose(
        replace(run, lost=lost, base=graded(run.base, grade), engines=(engine,), total=total)
    )
    assert [one.id for one in diagnosis.findings] == [ident]


def test_calls_raised_without_a_recorded_exception_are_counted(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    hooks = [one._replace(raised=2 * (one.hook == "save_kv_layer")) for one in run.hooks]
    found = the(diagnose(replace(run, hooks=hooks)), "hook-raised")
    assert found.evidence == ["4 calls raised; the exceptions were not recorded"]  # in two layers


def test_what_nobody_reads_says_nothing_if_no_read_was_seen(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    lost = lost_of(run, 0, 32, 64, SaveEnd.NOT_DECLARED, 1)
    kept = [one for one in run.base if one.request != 0]
    unread = replace(run, lost=lost, base=kept, total=run.total - 64)
    base = graded(kept, Grade.READ)
    assert [one.id for one in diagnose(replace(unread, base=base)).findings] == ["metadata-has-no-store"]
    unseen = replace(unread.engines[0], unreadable_steps=1)
    (other,) = kept
    unknown = other._replace(request=0, outcome=NOT_OBSERVED, amount=2, prompt=2, grade=Grade.NOT_OBSERVED)
    half = [other, unknown]
    blind = diagnose(replace(unread, base=half, engines=(unseen,), total=run.total - 62))
    assert [one.id for one in blind.findings] == []


def test_a_part_of_a_prompt_whose_metadata_is_not_understood(tmp_path: Path) -> None:
    """That the metadata names no more is not known: a worker that takes less looks the same."""
    run = run_of(tmp_path)
    step = run.entries[0].step
    lost = lost_of(run, 0, 32, 64, SaveEnd.NOT_DECLARED, step)
    base = graded(run.base, Grade.READ)
    base = [
        one if one.request else one._replace(amount=one.amount - 64, prompt=one.prompt - 64) for one in base
    ]
    partly = replace(run, lost=lost, base=base)
    assert [one.id for one in diagnose(partly).findings] == ["metadata-has-no-store"]
    unread = replace(run.engines[0], unreadable_steps=1, watched_steps=frozenset({step}))
    first = diagnose(replace(partly, engines=(unread,))).findings[0]
    assert (first.id, first.tokens) == ("metadata-has-no-store", 32)
    assert first.severity == LIMIT  # no metadata promised the others
    assert any("slots that the save hook indexes" in line for line in first.remedy)
    assert any("not understood" in line for line in first.evidence)


def kept_of(sim: Sim, request: str, prompt: int, start: int, end: int, shared: tuple[int, ...]) -> None:
    """A prompt of which [start, end) is named and read; ``shared``: digests of its beginnings."""
    entry = Entry(request, end - start, -1, start)
    sim.one_step(request, prompt, [entry], digest=int(request[1:]) + 1, prefixes=shared)
    sim.read(request, start, end)


def test_a_stored_part_read_again_tells_nothing_of_the_unit(tmp_path: Path) -> None:
    """It is read for a later request, which shares its blocks: the same prompt was kept as a whole before."""
    sim = Sim(tmp_path, block=16, kv_blocks=64, ints={"unit": 16})
    kept_of(sim, "r1", 70, 0, 64, (1, 2, 3, 4))
    kept_of(sim, "r2", 90, 0, 80, (5, 6, 7, 8))
    sim.one_step("r3", 70, [Entry("r3", 32, -1, 0)], digest=2, prefixes=(1, 2, 3, 4))
    sim.read("r3", 0, 32)
    found = {one.id: one.tokens for one in analyse(sim).findings}
    assert "metadata-has-no-store" not in found and found["below-save-granularity"] == 6 + 10 + 6


def test_a_read_beyond_a_prompts_own_metadata_tells_no_unit(tmp_path: Path) -> None:
    """Units of 96 tokens, which no number names: a later prompt's unit begins with a block of this one."""
    sim = Sim(tmp_path, block=32, kv_blocks=64)
    kept_of(sim, "r1", 200, 0, 192, (1, 2, 3, 4))
    kept_of(sim, "r2", 310, 0, 288, (5, 6, 7, 8))
    kept_of(sim, "r3", 130, 0, 96, (9, 10, 11, 12))
    kept_of(sim, "r4", 215, 0, 192, (9, 10, 11, 12))
    sim.read("r3", 96, 128)
    found = {one.id: one.tokens for one in analyse(sim).findings}
    assert found["below-save-granularity"] == 8 + 22 + 2 + 23 and "metadata-has-no-store" not in found


def test_a_preempted_request_tells_nothing_of_the_unit(tmp_path: Path) -> None:
    sim = Sim(tmp_path, block=32, kv_blocks=64)
    for n, (length, kept) in enumerate(((200, 192), (330, 320), (170, 96))):
        kept_of(sim, f"r{n}", length, 0, kept, (5 * n + 1, 5 * n + 2, 5 * n + 3, 5 * n + 4))
    sim.write()
    run = read_run(tmp_path)
    preempted = replace(run, requests=[*run.requests[:2], run.requests[2]._replace(preemptions=1)])
    assert ["below-save-granularity" in ids(diagnose(one)) for one in (run, preempted)] == [False, True]


def test_blocks_kept_for_an_unseen_save_say_nothing_of_the_unit(tmp_path: Path) -> None:
    """It is copied when its request is over, and no entry is read of it. All others are below the unit."""
    sim = Sim(tmp_path, block=64, kv_blocks=64, ints={"unit": 256})
    for n, length in enumerate((81, 119, 245, 278)):
        name = f"r{n}"
        sim.one_step(name, length, digest=n + 1, ends=False)
        if length > 256:
            sim.open_save(name)
        sim.finish(name, length)
    sim.write()
    run = read_run(sim.dir)
    watched = replace(run, lost=graded(run.lost, Grade.READ))
    found = {one.id: one.tokens for one in diagnose(watched).findings}
    assert found == {"below-save-granularity": 81 + 119 + 245}


def test_what_is_shorter_than_a_unit_was_not_taken_for_stored(tmp_path: Path) -> None:
    """Units of 64 tokens in blocks of 16; the third prompt begins like the first one, and fills none."""
    sim = Sim(tmp_path, block=16, kv_blocks=64)
    kept_of(sim, "r1", 200, 0, 192, (1, 2, 3, 4))
    kept_of(sim, "r2", 250, 0, 192, (5, 6, 7, 8))
    sim.one_step("r3", 56, digest=4, prefixes=(1, 9))
    found = analyse(sim).findings
    assert "false-already-stored" not in {one.id for one in found}
    assert "fault" not in {one.severity for one in found}


def test_generated_tokens_in_a_prompts_last_block_are_no_sign(tmp_path: Path) -> None:
    """Whole blocks are read when a request is over; what is generated beyond its last one is not offered."""
    sim = Sim(tmp_path, block=16, kv_blocks=64)
    sim.one_step("r1", 30, [Entry("r1", 32, -1, 0)], digest=1, ends=False)
    for _ in range(5):
        sim.step([], [], tokens=1)
    sim.read("r1", 0, 32)
    sim.finish("r1", 35, 6)
    diagnosis = analyse(sim)
    assert [one.id for one in diagnosis.findings] == ["decode-not-offered"]


@pytest.mark.parametrize(("accounted", "asked"), [(0, False), (4096, True)])
def test_narrower_numbers_that_came_back_answer_for_fewer_bytes(
    tmp_path: Path, accounted: int, asked: bool
) -> None:
    """Not where others account for all of theirs: then whole tokens are missing."""
    run = run_of(tmp_path, [40, 200])
    one = OutsideBytes(1, 8192, 4096, 4096, accounted, 64, 4096, 4, 0, 4096, 0)
    first, *others = run.load_rows
    rows = [replace(first, ends={LoadEnd.ALTERED: 1}), *others]
    for load_rows, expected in ((run.load_rows, True), (rows, asked)):
        found = {f.id for f in diagnose(replace(run, outside=[one], load_rows=load_rows)).findings}
        assert ("store-incomplete" in found) == expected


@pytest.mark.parametrize(("files", "first"), [(1, "below-save-granularity"), (4, "store-incomplete")])
def test_next_to_nothing_in_one_file_is_an_index(tmp_path: Path, files: int, first: str) -> None:
    one = OutsideBytes(1, 8192, 100, 100, 0, 64, 100, files, put=100)
    assert diagnose(replace(run_of(tmp_path, [40, 200]), outside=[one])).findings[0].id == first


def test_files_that_stay_empty_are_asked_for_whatever_was_read(tmp_path: Path) -> None:
    one = OutsideBytes(1, 0, None, None, 0, 64, files=16, empty=True)
    found, unit = diagnose(replace(run_of(tmp_path, [40]), outside=[one])).findings
    assert (found.id, unit.id) == ("store-incomplete", "below-save-granularity")
    assert found.severity == LIMIT and found.title.startswith("Of 16 files that the connector opened")
    other = OutsideBytes(1, 0, 64, 64, 0, 64, went=64, files=16)
    told = diagnose(replace(run_of(tmp_path, [40]), outside=[one, other])).findings
    assert "store-incomplete" not in [one.id for one in told]  # another rank's files hold what it wrote


@pytest.mark.parametrize(
    ("came", "rest", "removed", "first"),
    [
        (8192, 4096, 2, "store-lost-later"),
        (4096, 4096, 0, "store-incomplete"),
        (8192, 8192, 0, "below-save-granularity"),
        (16384, 8192, 2, "below-save-granularity"),  # temporary files: what stays accounts for all
        (100, 20, 2, "store-incomplete"),  # next to nothing was removed; KV in memory, or a loss: asked
    ],
    ids=["files removed", "fewer bytes", "all there", "copied", "an index written anew"],
)
def test_a_possible_loss_after_the_read_goes_before_a_choice(
    tmp_path: Path, came: int, rest: int, removed: int, first: str
) -> None:
    run = run_of(tmp_path, [40, 200])
    one = OutsideBytes(1, 8192, came, rest, 0, 64, 4096, 4, removed, came, came - rest)
    found = diagnose(replace(run, outside=[one])).findings
    assert (found[0].id, found[0].severity) == (first, LIMIT)
