"""Every rule about loads on a run that shows its cause, and on a healthy twin that does not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import ablation
import pytest
from diagnosed import analyse, graded, not_observed, ruled_out, said, the, words
from synth import Chunk, Entry, Fate, Policy, Prompt, Rounding, Sim

from kvtrace.causes import Diagnosis, diagnose
from kvtrace.causes.case import make_case
from kvtrace.causes.cause import LOADS
from kvtrace.causes.evidence.loads import KeptBefore
from kvtrace.causes.evidence.settings import differing, set_alike
from kvtrace.causes.registry import CATALOGUE
from kvtrace.causes.rules import key_mismatch
from kvtrace.causes.rules.already_stored import there_before
from kvtrace.ledger import read_run
from kvtrace.ledger.contents.judge import ELSEWHERE, SAME_PROMPT
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.run import Place
from kvtrace.terms import FAULT, LIMIT, NOTE, SAVED, Grade
from kvtrace.trace import rows
from kvtrace.trace.format import Fact, Flag, Kind, Role, Way, pack_head

LOAD, ASYNC = int(Flag.LOAD), int(Flag.ASYNC)
SECOND = 10**9


def of_loads(diagnosis: Diagnosis) -> list[str]:
    """Ids of the findings about loads."""
    return [f.id for f in diagnosis.findings if CATALOGUE[f.id].ledger == LOADS or f.id == "load-late"]


def again(sim: Sim, lengths: list[int], stored: list[int], answers: list[int | None]) -> None:
    """Prompts one after another, saved up to ``stored``, looked up with ``answers``; those of one length
    are the same prompt. Each takes two seconds."""
    for i, (length, saved, answer) in enumerate(zip(lengths, stored, answers, strict=True)):
        prompt = Prompt(f"r{i}", length, digest=length)
        sim.arrive(prompt)
        taken = max(0, min(answer or 0, length - 1))
        sim.lookup(prompt.id, 0, answer, taken)
        entries = [Entry(prompt.id, saved, length, 0)] if saved else []
        sim.step([Chunk(prompt.id, taken, length - taken, first=True)], entries, prompts={prompt.id: length})
        sim.finish(prompt.id, length)
        sim.clock(2 * SECOND)


def test_what_a_load_brought_wrong_is_not_taken_for_stored(tmp_path: Path) -> None:
    """Of a prompt of which only the first chunk was stored, the rest was "stored by an earlier request": by
    the one whose load of it was wrong."""
    sim = Sim(tmp_path)
    again(sim, [384] * 3, [128, 0, 0], [0, 256, 0])
    sim.write()
    run = read_run(tmp_path)
    wrong = {((128, 256, LoadEnd.WRONG),): 1}
    for lost, there in (({}, 256), (wrong, 128)):
        rows = [replace(one, lost=lost) if one.request == 1 else one for one in run.load_rows]
        case = make_case(replace(run, load_rows=rows))
        case.requests[1].taken = 256  # as far as nobody was seen to leave it out
        assert there_before(case, case.requests[2]) == [(0, there)]


# ------------------------------------------------------------------------- key-mismatch


def test_keys_of_several_engines_are_not_said_to_agree(tmp_path: Path) -> None:
    """The second engine finds nothing of what the first one stored; of each alone nothing is wrong, and it
    was said that these prompts begin like no earlier one of the run."""
    first, second = Sim(tmp_path, tag=1, pid=100), Sim(tmp_path, tag=2, pid=200)
    first.serve([Prompt("a", 128, digest=4)], Rounding(32).policy())
    second.serve([Prompt("b", 128, digest=4)], Rounding(32).policy())
    diagnosis = analyse(first, second)
    assert not ruled_out(diagnosis).keys() & {"key-mismatch", "lookup-miss", "already-stored"}
    why = not_observed(diagnosis)["key-mismatch"]
    assert why.startswith("1 lookup found nothing of a prompt that begins like an earlier one of")
    alone = Sim(tmp_path / "alone")
    alone.serve([Prompt("a", 128, digest=4)], Rounding(32).policy())
    assert {"lookup-miss", "already-stored"} <= ruled_out(analyse(alone)).keys()


@pytest.mark.parametrize("same_place", [True, False])
def test_another_engine_stored_it_at_the_same_place(tmp_path: Path, same_place: bool) -> None:
    """Keys of Python's hash() differ by process: a restarted engine finds nothing of what lies there."""
    sims = [Sim(tmp_path, layers=1, tag=tag, pid=100 * tag, ints={"unit": 32}, kv_blocks=8) for tag in (1, 2)]
    for at, sim in enumerate(sims):
        sim.clock(at * SECOND)
        sim.arrive(Prompt(f"r{at}", 130, digest=4))
        sim.lookup(f"r{at}", 0, 0, 0)
        chunk, entry = Chunk(f"r{at}", 0, 130, first=True), Entry(f"r{at}", 128, 130, 0)
        step = sim.step([chunk], [entry], prompts={f"r{at}": 130})
        sim.stored(f"r{at}", 0, 128, 0)
        sim.finish(f"r{at}", 130)
        target = sim.workers[0].name(f"/srv/{0 if same_place else at}/{at}.bin")
        head = pack_head(Kind.OUTSIDE, Role.WORKER, Way.FILE, sim.tag * 10 + 1)
        sim.workers[0].add(*rows.Outside(head, sim.clock(), step, 0, target, 128 * 512, 128 * 512, 0))
        sim.write()
    run = read_run(tmp_path)
    diagnosis = diagnose(replace(run, base=graded(run.base, Grade.WRITTEN)))
    if not same_place:
        assert "whether these engines share a store" in not_observed(diagnosis)["key-mismatch"]
        return
    finding = the(diagnosis, "key-mismatch")
    assert (finding.severity, finding.tokens, finding.requests) == (LIMIT, 128, 1)
    assert "r0 of another engine had saved 128 tokens at or below /srv/0, where both write," in words(finding)
    assert "hashlib" in finding.remedy[0]


def test_settings_that_differ_between_engines_are_named(tmp_path: Path) -> None:
    """What another engine saved is not found: of equal settings there is nothing to say."""
    given = {"hash_algo": "sha256", "kv_transfer": {"connector": "C", "extra": {"a": {"b": 64}, "c": "/x"}}}
    unlike = {"hash_algo": None, "kv_transfer": {"connector": "C", "extra": {"a": {"b": 32}, "c": "/x"}}}
    for tag, own in ((1, given), (2, given), (3, unlike)):
        sim = Sim(tmp_path, tag=tag, pid=100 * tag, engine_facts=own)
        sim.one_step(f"r{tag}", 64, [])
        sim.write()
    case = make_case(read_run(tmp_path))
    rows = case.run.load_rows
    missed = [KeptBefore(rows[2], case.requests[by], 64) for by in (0, 1)]
    assert differing(case, [KeptBefore(rows[1], case.requests[0], 64)]) == []
    named = ["prefix_caching_hash_algo (not set here, sha256 there)", '"a.b" (32 here, 64 there)']
    assert differing(case, missed) == named
    assert ", ".join(named) in set_alike(named)[0] and not set_alike([])


def test_key_mismatch(tmp_path: Path) -> None:
    sim = Sim(tmp_path, connector="ExampleConnector", ints={"_block_size": 32})
    again(sim, [129, 129, 129], [128, 128, 128], [0, 0, 0])
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == ["key-mismatch"]
    finding = the(diagnosis, "key-mismatch")
    assert diagnosis.findings[0] is finding
    assert (finding.severity, finding.tokens, finding.requests) == ("fault", 256, 2)
    for text in ("all 2 lookups", "one token longer than whole blocks of 32", "floor((n - 1) / 32) x 32",
                 "asks for a block less", "Round the lookup as the store does."):  # fmt: skip
        assert text in words(finding), text
    assert diagnosis.loads.tokens == {"missed:key-mismatch": 256, "missed:lookup-miss": 131}
    # No key was compared: an emptied store, or an index that was never written, looks the same.
    assert diagnosis.verdict.endswith("Loads: an earlier save is not found by the lookup.")
    assert "See whether the entry is there at the lookup" in words(finding)


@pytest.mark.parametrize(
    ("found", "prompt", "severity"),
    [(170, 129, "fault"), (161, 129, "limit"), (170, 150, "limit")],
    ids=["one token longer than blocks", "others of that length are found", "another length"],
)
def test_a_miss_beside_hits_may_be_a_choice(tmp_path: Path, found: int, prompt: int, severity: str) -> None:
    """Keys that match elsewhere do not match here for one reason that is known: the rounding."""
    sim = Sim(tmp_path, ints={"unit": 32})
    again(sim, [found, found, prompt, prompt], [160, 0, 128, 128], [0, 160, 0, 0])
    (finding,) = [one for one in analyse(sim).findings if one.id == "key-mismatch"]
    assert finding.severity == severity
    assert ("does it decline some" in finding.title) == (severity == "limit")
    assert ("does not find" in finding.title) == (severity == "fault")  # it may find, and not offer
    assert ("finds of such a prompt" in finding.remedy[0]) == (severity == "limit")


@pytest.mark.parametrize(("found", "lost"), [(None, ["r2", "r3"]), (160, ["r2"])])
def test_what_is_never_found_is_one_finding(tmp_path: Path, found: int | None, lost: list[str]) -> None:
    """Half of a connector's misses, all by one wrong key, were a fault, and half a choice, as these prompts
    had another length. Where some are found, a miss with other saves in between may be an eviction."""
    sim = Sim(tmp_path, ints={"unit": 32})
    again(sim, [129, 150, 150, 129], [128, 128, 0, 0], [0, 0, 0, 0])
    if found:
        again(sim, [170, 170], [160, 0], [0, found])
    finding = the(analyse(sim), "key-mismatch")
    assert [event.request for event in finding.events] == lost
    assert (f"all {len(lost)} lookups" in finding.title) == (found is None)


@pytest.mark.parametrize(
    ("grade", "peer", "said"),
    [
        (Grade.WRITTEN, "", "r2 had saved 128 of"),
        (Grade.READ, "10.0.0.2:80", "a save of r2 had read 128 of"),
        (Grade.DECLARED, "", "the metadata of r2 had named 128 of"),
    ],
)
def test_what_was_sent_is_not_said_to_be_saved(tmp_path: Path, grade: Grade, peer: str, said: str) -> None:
    """A server had answered 507 to it: what it keeps was not seen, and its lookups told the truth."""
    sim = Sim(tmp_path, ints={"unit": 32})
    again(sim, [170, 170, 150, 150], [160, 0, 128, 0], [0, 160, 0, 0])
    sim.write()
    run = read_run(tmp_path)
    base = [one._replace(sent_to=peer if one.outcome == SAVED else "") for one in graded(run.base, grade)]
    finding = the(diagnose(replace(run, base=base)), "key-mismatch")
    assert said in finding.evidence[0]
    assert ("was this one kept" in finding.title) == (grade < Grade.WRITTEN)
    assert ("took what was sent" in finding.remedy[0]) == bool(peer)


def test_scripts_ablation_makes_a_fault_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    again(sim, [161, 161, 150, 150], [160, 0, 128, 128], [0, 160, 0, 0])
    monkeypatch.setattr(key_mismatch, "_finding", ablation._always_fault)
    assert the(analyse(sim), "key-mismatch").severity == "fault"


def test_a_connector_whose_lookup_is_a_constant_only_pushes(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"_block_size": 32}, noop=("get_num_new_matched_tokens",))
    again(sim, [129, 129, 129], [128, 128, 128], [0, 0, 0])
    assert of_loads(analyse(sim)) == []


def test_found_again_is_healthy(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    again(sim, [129, 129], [128, 0], [0, 128])
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == []
    assert "found again" in ruled_out(diagnosis)["key-mismatch"]
    assert "1 hit in 2 lookups" in ruled_out(diagnosis)["lookup-miss"]


@pytest.mark.parametrize(
    "case",
    [
        "producer",
        "evicted",
        "whole prompt",
        "not saved in all layers",
        "at once",
        "not finished",
        "other tokens",
    ],
)
def test_a_miss_that_proves_no_other_key(tmp_path: Path, case: str) -> None:
    """Each leaves another explanation than another key."""
    role = "kv_producer" if case == "producer" else "kv_both"
    sim = Sim(tmp_path, ints={"unit": 32}, role=role)
    if case == "evicted":  # other prompts were saved in between
        again(sim, [129, 161, 129, 161], [128, 160, 128, 160], [0, 0, 0, 0])
    elif case == "whole prompt":  # a lookup in whole units must leave a token to compute
        again(sim, [128, 128], [128, 128], [0, 0])
    elif case == "other tokens":
        again(sim, [129, 130], [128, 128], [0, 0])
    elif case == "at once":  # the save may be in a background thread still
        for i in range(2):
            sim.one_step(f"r{i}", 129, [Entry(f"r{i}", 128, 129, 0)], digest=1)
    else:
        fate = Fate(dead_pairs=frozenset({(0, 1)})) if case == "not saved in all layers" else Fate()
        flags = int(Flag.STORE | Flag.ASYNC) if case == "not finished" else int(Flag.STORE)
        for i in range(2):
            sim.one_step(f"r{i}", 129, [Entry(f"r{i}", 128, 129, 0, flags)], digest=1, fate=fate)
            sim.clock(2 * SECOND)
    diagnosis = analyse(sim)
    assert "key-mismatch" not in of_loads(diagnosis)
    missed = [one.severity for one in diagnosis.findings if one.id == "lookup-miss"]
    saved = case in ("evicted", "whole prompt", "at once")  # ... by a request that was over
    assert (LIMIT in missed) == saved and (saved or {NOTE}.issuperset(missed))


@pytest.mark.parametrize(("length", "found"), [(129, ["key-mismatch"]), (128, ["lookup-miss"])])
def test_written_files_settle_a_save_at_once(tmp_path: Path, length: int, found: list[str]) -> None:
    """Of a prompt of whole units a lookup must leave a token to compute: a part of it may be no unit."""
    sim = Sim(tmp_path, layers=1, ints={"unit": 32})
    for i in range(2):
        step = sim.one_step(f"r{i}", length, [Entry(f"r{i}", 128, length, 0)], digest=1)
        sim.effect(0, step, 0, 128, size=4096, files=1)
    assert of_loads(analyse(sim)) == found


@pytest.mark.parametrize(
    ("length", "first"), [(129, "Round the lookup as the store does."), (140, "No lookup found anything: ")]
)
def test_what_is_never_found_by_a_lookup(tmp_path: Path, length: int, first: str) -> None:
    """vLLM's ExampleConnector rounds prompts of one token more than whole blocks down once more."""
    sim = Sim(tmp_path, layers=1, block=32, ints={"unit": 32}, kv_blocks=64)
    for name, tokens, kept in (("a", length, 128), ("b", 350, 320), ("c", length, 0)):
        entries = [Entry(name, kept, tokens, 0)] if kept else []
        step = sim.one_step(name, tokens, entries, digest=tokens)
        if kept:
            sim.stored(name, 0, kept, 0, step=step)
    sim.write()
    run = read_run(tmp_path)
    finding = the(diagnose(replace(run, base=graded(run.base, Grade.WRITTEN))), "key-mismatch")
    assert finding.headline == "what was saved is never found by a lookup"
    assert finding.remedy[0].startswith(first)


# ------------------------------------------------------------------- both books, one finding


def test_what_never_came_is_one_finding_and_no_lost_save(tmp_path: Path) -> None:
    sim = Sim(tmp_path, noop=("wait_for_layer_load",))
    step = sim.one_step("a", 128, [Entry("a", 32, 128, 96)], taken=96, digest=1)
    sim.effect(0, step, None, 0, hook="start_load_kv", flags=LOAD)
    diagnosis = analyse(sim)
    account = "not-loaded:load-not-injected"
    assert diagnosis.saves.tokens == {account: 96, "saved": 32}
    assert diagnosis.loads.tokens[account] == 96
    assert [(f.id, f.tokens, f.share) for f in diagnosis.findings] == [("load-not-injected", 96, 0.75)]
    assert [(one.verdict, one.tokens.lost) for one in diagnosis.requests] == [("load-not-injected", 0)]
    assert [(stage.into, stage.out) for stage in diagnosis.stages] == [(32, 32)] * 7  # computed here
    assert diagnosis.verdict.startswith("All 32 prompt tokens computed here were ")


def test_a_lookup_that_answers_more_than_there_is(tmp_path: Path) -> None:
    """vLLM asserts that it does not: the engine was gone, and a choice stood first."""
    sim = Sim(tmp_path, ints={"unit": 32}, prefix_caching=True)
    sim.serve([Prompt("a", 128, digest=1)], Rounding(32).policy())
    sim.arrive(Prompt("b", 112, digest=2))
    sim.lookup("b", 32, 96, None)
    finding = analyse(sim).findings[0]
    assert (finding.id, finding.severity, finding.requests) == ("lookup-clamped", FAULT, 1)
    assert "b: 96 tokens offered behind 32 that the GPU has, of a prompt of 112" in finding.evidence[0]
    assert "behind num_computed_tokens" in finding.remedy[0]


@pytest.mark.parametrize(("local", "said"), [(64, True), (32, False)])
def test_as_many_missing_as_the_gpu_had(tmp_path: Path, local: int, said: bool) -> None:
    sim = Sim(tmp_path, noop=("wait_for_layer_load",), prefix_caching=True)
    sim.arrive(Prompt("a", 160, digest=1))
    sim.lookup("a", local, 64, 64)
    sim.step([Chunk("a", local + 64, 96 - local, first=True)], prompts={"a": 160})
    sim.effect(0, sim.step_id, None, 0, hook="start_load_kv", flags=LOAD)
    sim.finish("a", 160)
    finding = the(analyse(sim), "load-not-injected")
    assert finding.tokens == 64 and ("behind num_computed_tokens" in finding.remedy[0]) == said


@pytest.mark.parametrize(("offered", "asked"), [(32, True), (128, False)])
def test_a_lookup_that_finds_less_than_was_saved(tmp_path: Path, offered: int, asked: bool) -> None:
    """What it left out was called what a hit leaves to compute, with nothing to do."""
    sim = Sim(tmp_path, ints={"unit": 32}, kv_blocks=16)
    for name, answer, saved in (("a", 0, 128), ("b", offered, 0)):
        sim.arrive(Prompt(name, 130, digest=4))
        sim.lookup(name, 0, answer, answer)
        entries = [Entry(name, saved, 130, 0)] if saved else []
        sim.step([Chunk(name, answer, 130 - answer, first=True)], entries, prompts={name: 130})
        for layer in range(sim.layers) if saved else ():
            sim.stored(name, 0, saved, layer)
        sim.finish(name, 130)
    sim.write()
    run = read_run(tmp_path)
    found = diagnose(replace(run, base=graded(run.base, Grade.WRITTEN)))
    if not asked:
        assert "found again by the lookup" in ruled_out(found)["key-mismatch"]
        assert not {"lookup-miss", "already-stored"} & {one.id for one in found.findings}
        return
    finding, again = the(found, "lookup-miss"), the(found, "already-stored")
    assert (finding.severity, finding.tokens, finding.requests) == (LIMIT, 96, 1)
    assert "b: 32 tokens offered behind 0 that the GPU has, of 128 that had been saved for a" in words(
        finding
    )
    assert again.tokens == 96 and again.title.endswith("and the lookup offers less than that (1 request).")
    assert "key-mismatch" not in ruled_out(found)


# -------------------------------------------------------------- lookup-miss, never-looked-up


def test_new_prompts_are_no_finding(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt("a", 64, digest=1), Prompt("b", 96, digest=2)], Rounding(32).policy())
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == []
    assert "2 prompts like no earlier one" in ruled_out(diagnosis)["lookup-miss"]
    assert "all 2 requests" in ruled_out(diagnosis)["never-looked-up"]
    store = Place("directory", "/srv/kv", files=2, older=19)
    again = diagnose(replace(read_run(tmp_path), places=[store]))
    assert "0 hits in 2 lookups, though its store holds 19 files from" in ruled_out(again)["lookup-miss"]


def share_a_beginning(tmp_path: Path, unit: int) -> Diagnosis:
    """Of two prompts of 128 tokens, both of which begin with the same 96."""
    sim = Sim(tmp_path, ints={"unit": unit})
    for name, tail in (("a", 1), ("b", 2)):
        sim.one_step(name, 128, [Entry(name, 128, 128, 0)], digest=tail, prefixes=(71, 72, 73, 90 + tail))
    return analyse(sim)


def test_a_shared_beginning_that_is_not_there(tmp_path: Path) -> None:
    """Why nothing is ever found is what its user wants to know; that it was saved makes it a question."""
    finding = the(share_a_beginning(tmp_path, 32), "lookup-miss")
    assert (finding.severity, finding.tokens, finding.requests) == (LIMIT, 96, 1)
    assert "1 prompt like an earlier one that was over by then: b in 96 tokens like a" in words(finding)


def test_no_hit_is_expected_within_a_unit(tmp_path: Path) -> None:
    finding = the(share_a_beginning(tmp_path, 128), "lookup-miss")
    assert (finding.severity, finding.tokens) == ("note", 96) and "expected" not in finding.title
    assert "had no whole unit to find" in finding.title
    assert finding.evidence[0].endswith("they hold no whole unit of 128 tokens")


def test_where_no_unit_is_known_lookups_find_whole_blocks(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.one_step("saved", 70, [Entry("saved", 70, 70, 0)])  # to its last token: by no unit
    for name in "ab":
        sim.one_step(name, 32, [], prefixes=(71,))
    finding = the(analyse(sim), "lookup-miss")
    assert "had no whole block to find" in finding.title
    assert finding.evidence[0].endswith("they hold no whole block of 32 tokens")


@pytest.mark.parametrize("saves", [True, False])
def test_a_consumer_finds_nothing_of_another_engine(tmp_path: Path, saves: bool) -> None:
    """kthena#1432: each engine had a memory of its own. That a consumer saves nothing is not the question."""
    sims = [Sim(tmp_path, layers=1, tag=tag, pid=100 * tag, kv_blocks=8, role=role, ints={"unit": 32})
            for tag, role in ((1, "kv_producer"), (2, "kv_consumer"))]  # fmt: skip
    for at, sim in enumerate(sims):
        sim.clock(at * SECOND)
        sim.arrive(Prompt(f"r{at}", 130, digest=4))
        sim.lookup(f"r{at}", 0, 0, 0)
        entries = [Entry(f"r{at}", 128, 130, 0)] if saves and not at else []
        sim.step([Chunk(f"r{at}", 0, 130, first=True)], entries, prompts={f"r{at}": 130})
        if entries:
            sim.stored(f"r{at}", 0, 128, 0)
        sim.finish(f"r{at}", 130)
        sim.write()
    run = read_run(tmp_path)
    found = diagnose(replace(run, base=graded(run.base, Grade.READ)))
    miss = the(found, "lookup-miss")
    assert ("Do both use one store?" in miss.title) is saves
    assert (miss.severity == LIMIT) is saves
    limits = [one.id for one in found.findings if one.severity == LIMIT]
    assert limits.index("role-does-not-save") == len(limits) - 1 if saves else "lookup-miss" not in limits


def test_where_nothing_was_saved_no_lookup_is_told_of(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    for name in "ab":
        sim.one_step(name, 128, [], digest=4)
    assert "lookup-miss" not in of_loads(analyse(sim))


def test_a_miss_counts_what_had_been_saved_alone(tmp_path: Path) -> None:
    """Of a store that keeps every second prompt all were counted, those that it never had, too."""
    sim = Sim(tmp_path, ints={"unit": 32})
    prompts = [Prompt(f"{digest}{at}", 64 * digest, digest=digest) for digest in (1, 2) for at in "ab"]
    stores = Rounding(32).policy()
    policy = replace(stores, store=lambda p, *rest: stores.store(p, *rest) if p.digest == 1 else [])
    sim.serve(prompts, policy)
    finding = the(analyse(sim), "lookup-miss")
    assert finding.tokens == 32 and finding.requests == 1
    assert "1 prompt like an earlier one (up to 128 tokens)" in words(finding)


def test_a_miss_says_nothing_of_earlier_saves_in_its_title(tmp_path: Path) -> None:
    """ "No earlier save covers them" stood above evidence of prompts that were saved, and not found."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt(name, 64, digest=1) for name in "ab"], Rounding(32).policy())
    finding = the(analyse(sim), "lookup-miss")
    assert "1 prompt like an earlier one that was over by then" in words(finding)
    assert "no earlier save" not in finding.title and "after an earlier save" in finding.title


def test_a_consumer_that_finds_nothing(tmp_path: Path) -> None:
    sim = Sim(tmp_path, role="kv_consumer")
    again(sim, [64, 96], [0, 0], [0, 0])
    finding = the(analyse(sim), "lookup-miss")
    assert finding.tokens == 160 and "kv_consumer" in words(finding)


def test_a_store_that_the_gpu_is_ahead_of(tmp_path: Path) -> None:
    sim = Sim(tmp_path, prefix_caching=True, ints={"unit": 32})
    sim.arrive(Prompt("a", 128, digest=1))
    sim.lookup("a", 96, -32, 0)
    sim.step([Chunk("a", 96, 32, first=True)], [Entry("a", 128, 128, 0)], prompts={"a": 128})
    sim.finish("a", 128)
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == []
    assert "0 hits in 1 lookup" in ruled_out(diagnosis)["lookup-miss"]


def test_never_looked_up(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.asks = False
    sim.one_step("a", 64, [Entry("a", 64, 64, 0)])
    diagnosis = analyse(sim)
    assert [f.id for f in diagnosis.findings] == ["never-looked-up"]
    assert (diagnosis.findings[0].severity, diagnosis.findings[0].tokens) == ("limit", 64)


# ----------------------------------------------------------------------- lookup-clamped


@pytest.mark.parametrize(
    ("local", "answer", "taken", "severity", "said"),
    [
        (0, 127, 0, "limit", "prompt_logprobs"),
        (0, 128, 127, "note", "last token of a whole prompt"),
        (0, 110, 96, "limit", "rounded down to a whole block"),
        (0, 127, 32, "limit", "does not say why"),
    ],
)
def test_lookup_clamped(
    tmp_path: Path, local: int, answer: int, taken: int, severity: str, said: str
) -> None:
    sim = Sim(tmp_path)
    sim.arrive(Prompt("a", 128, digest=1))
    sim.lookup("a", local, answer, taken)
    sim.step([Chunk("a", taken, 128 - taken, first=True)], prompts={"a": 128})
    sim.finish("a", 128)
    finding = the(analyse(sim), "lookup-clamped")
    assert (finding.severity, finding.tokens) == (severity, answer - taken)
    assert said in words(finding)


def test_no_blocks(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.arrive(Prompt("a", 128, digest=1))
    sim.lookup("a", 0, 96, None)
    sim.step([], tokens=1)
    sim.finish("a", 0, 0, "FINISHED_ABORTED")
    assert "no free KV blocks" in said(analyse(sim), "lookup-clamped")


def test_an_offer_that_is_taken(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.serve([Prompt("a", 128, digest=1)], Policy(lambda *_: [], match=lambda prompt, local: 96))
    diagnosis = analyse(sim)
    assert "all 96 tokens" in ruled_out(diagnosis)["lookup-clamped"]


# ------------------------------------------------------------------- into the layers, or not


def loading(tmp_path: Path, *, fate: Fate | None = None, noop: tuple[str, ...] = (), **more: object) -> Sim:
    """One request that loads 96 of 128 tokens in its only step."""
    sim = Sim(tmp_path, noop=noop, **more)  # type: ignore[arg-type]
    sim.one_step("a", 128, [Entry("a", 128, 128, 0)], taken=96, digest=1, fate=fate or Fate())
    return sim


def test_a_load_that_works(tmp_path: Path) -> None:
    sim = loading(tmp_path, tp=2)
    for rank in range(2):
        for layer in range(2):
            sim.effect(rank, sim.step_id, layer, 96, hook="start_load_kv", flags=LOAD)
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == []
    out = ruled_out(diagnosis)
    assert {"load-failed", "load-not-injected", "loaded-partly", "load-after-use", "lookup-clamped"} <= set(
        out
    )
    assert "measured in every layer)" in out["load-not-injected"]


def test_a_load_of_layers_with_a_window_says_so(tmp_path: Path) -> None:
    """Of these no more is to be written than lies in the window: that was said of all tokens."""
    names = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
    groups = [{"kind": "SlidingWindowSpec", "block_size": 16, "layers": names, "window": 64}]
    sim = loading(tmp_path, engine_facts={"kv_groups": groups})
    for layer in range(2):
        sim.effect(0, sim.step_id, layer, 96, hook="start_load_kv", flags=LOAD)
    diagnosis = analyse(sim)
    assert diagnosis.saves.trust_note.endswith("; of layers with a window only what lies in it comes back")
    out = ruled_out(diagnosis)
    assert "measured in every layer; of layers with a window what it holds" in out["load-not-injected"]
    assert out["loaded-partly"].endswith("; of layers with a window what it holds")


@pytest.mark.parametrize(
    ("connector", "severity"), [("DecodeBenchConnector", "limit"), ("ChunkStore", "fault")]
)
def test_kv_that_is_made_up_by_design_is_no_fault(tmp_path: Path, connector: str, severity: str) -> None:
    loading(tmp_path, connector=connector).write()
    run = read_run(tmp_path)
    wrong = {"ends": {LoadEnd.WRONG: 192}, "lost": {((0, 96, LoadEnd.WRONG),): 0b11}}
    rows = [replace(one, **wrong) if one.accepted else one for one in run.load_rows]
    finding = the(diagnose(replace(run, load_rows=rows)), "kv-load-wrong")
    assert finding.severity == severity and ("made-up" in finding.remedy[0]) is (severity == "limit")


def test_shifted_blocks_of_a_prompt_are_no_reuse_at_first(tmp_path: Path) -> None:
    """Each block held the one saved before it, also that of another prompt: an offset, and no eviction."""
    loading(tmp_path).write()
    run = read_run(tmp_path)
    wrong = {"ends": {LoadEnd.WRONG: 192}, "lost": {((0, 96, LoadEnd.WRONG),): 0b11}}
    wrong["reasons"] = {LoadEnd.WRONG: (SAME_PROMPT, ELSEWHERE)}
    rows = [replace(one, **wrong) if one.accepted else one for one in run.load_rows]
    remedy = the(diagnose(replace(run, load_rows=rows)), "kv-load-wrong").remedy
    assert "off by one" in remedy[0] and "eviction" in remedy[1]


@pytest.mark.parametrize(("compared", "said"), [(96, True), (0, False)])
def test_wrong_loads_are_told_apart_from_compared_ones(tmp_path: Path, compared: int, said: bool) -> None:
    """Made-up KV of a prompt of one block was "came whole": nothing had compared it."""
    sim = Sim(tmp_path, kv_blocks=128)
    for at in range(10):
        sim.one_step(f"r{at}", 128 if at % 2 else 64, taken=32, digest=at + 1)
    sim.write()
    run = read_run(tmp_path)
    wrong = {"ends": {LoadEnd.WRONG: 64}, "lost": {((0, 32, LoadEnd.WRONG),): 0b11}, "proved": 0}
    fine = {"ends": {LoadEnd.LOADED: 64}, "lost": {}, "proved": compared}
    rows = [replace(one, **(wrong if one.prompt == 128 else fine)) for one in run.load_rows]
    finding = the(diagnose(replace(run, load_rows=rows)), "kv-load-wrong")
    assert any("others that came whole" in line for line in finding.evidence) is said


@pytest.mark.parametrize("caught", [True, False])
def test_load_not_injected_with_a_complaint(tmp_path: Path, caught: bool) -> None:
    sim = Sim(tmp_path)
    sim.arrive(Prompt("a", 128, digest=1))
    sim.lookup("a", 0, 127, 127, ASYNC)
    step = sim.step([], tokens=0)
    sim.effect(0, step, None, 0, hook="start_load_kv", flags=LOAD)
    of = {"hook": "start_load_kv", "layer": None, "step": step, "connector": 71, "count": 1}
    sim.workers[0].fact(
        Fact.LOG,
        {**of, "logger": "c", "level": "WARNING", "message": "but the attn_metadata is None", "shown": False},
    )
    if caught:
        where = "c.py:7 in get"
        sim.workers[0].fact(Fact.SWALLOWED, {**of, "type": "OSError", "message": "gone", "where": where})
    sim.done("a", flags=LOAD)
    sim.step([Chunk("a", 127, 1, first=True)], [Entry("a", 128, 128, 0)], prompts={"a": 128})
    sim.finish("a", 128)
    diagnosis = analyse(sim)
    finding = diagnosis.findings[0]
    assert (finding.id, finding.severity, finding.tokens) == ("load-not-injected", "fault", 127)
    assert "attn_metadata is None" in words(finding)
    logged = 'See why start_load_kv logged "but the attn_metadata is None" (warning)'
    assert finding.remedy[0].startswith("Mend what raised at c.py:7 in get" if caught else logged)
    assert "not in the layers when attention ran" in diagnosis.verdict


def test_load_not_injected_where_other_loads_are(tmp_path: Path) -> None:
    sim = loading(tmp_path, kv_blocks=16)
    sim.write_kv("a", 0, 96)
    first = sim.step_id
    second = sim.one_step("b", 128, taken=96, digest=2, ends=False)
    for layer in range(2):
        sim.effect(0, first, layer, 96, hook="start_load_kv", flags=LOAD)
        sim.effect(0, second, layer, 0, hook="wait_for_layer_load", flags=LOAD)
    sim.effect(0, second, None, 0, hook="start_load_kv", flags=LOAD)
    finding = the(analyse(sim), "load-not-injected")
    assert (finding.tokens, finding.requests) == (96, 1)
    assert finding.events[0].request == "b" and finding.events[0].layer
    # The hook wrote another load: that it fills copies is not the first thing to look at.
    assert "passes over" in finding.remedy[0] and "copy" not in finding.remedy[0]


@pytest.mark.parametrize(("written", "end"), [(0, "load-not-injected"), (64, "loaded-partly")])
def test_what_was_loaded_into_other_requests_slots(tmp_path: Path, written: int, end: str) -> None:
    """Block ids were kept in eight bits: it was said that the lookup promises more than is stored."""
    sim = Sim(tmp_path, kv_blocks=32)
    sim.one_step("other", 128, [Entry("other", 128, 128, 0)], digest=1, ends=False)
    step = sim.one_step("a", 128, taken=96, digest=2, ends=False)
    for layer in range(2):
        sim.effect(0, step, layer, 96, hook="start_load_kv", flags=LOAD)
    sim.write_kv("a", 0, written)
    sim.write_kv("other", 0, 96 - written)
    finding = the(analyse(sim), end)
    assert "; slots of 1 other request were, which load nothing in the step" in words(finding)
    assert finding.remedy[0].startswith("Compare the blocks that the load hooks write with those")


@pytest.mark.parametrize(("hook", "named"), [("start_load_kv", True), ("wait_for_save", False)])
def test_a_load_in_part_whose_job_an_exception_ended(tmp_path: Path, hook: str, named: bool) -> None:
    """Its place is the first thing to look at; it was said that no save is known to be lost by it."""
    sim = Sim(tmp_path, kv_blocks=32)
    step = sim.one_step("a", 128, taken=96, digest=2, ends=False)
    for layer in range(2):
        sim.effect(0, step, layer, 64, hook="start_load_kv", flags=LOAD)
    sim.write_kv("a", 0, 64)
    fact = {"hook": "executor", "asked_by": hook, "connector": 71, "type": "OSError", "message": "gone",
            "where": "c.py:42 in job", "step": step, "count": 1, "ended": True}  # fmt: skip
    sim.workers[0].fact(Fact.SWALLOWED, fact)
    diagnosis = analyse(sim)
    remedy = the(diagnosis, "loaded-partly").remedy[0]
    assert remedy.startswith("Mend what raised at c.py:42 in job: OSError: gone") is named
    title = the(diagnosis, "exception-swallowed").title
    assert title.endswith("no save is known to be lost by it alone.") is named


def test_what_was_loaded_into_the_blocks_of_a_hit(tmp_path: Path) -> None:
    """They are shared with the request that computed them: it was said that another's were written."""
    sim = Sim(tmp_path, block=32, kv_blocks=32)
    sim.give("first", [7, 8, 9, 10], flags=int(Flag.FIRST))
    sim.one_step("first", 128, digest=1)
    sim.give("a", [7, 8, 11, 12], flags=int(Flag.FIRST))
    sim.arrive(Prompt("a", 128))
    sim.lookup("a", 64, 32, 32)
    step = sim.step([Chunk("a", 96, 32, first=True)], prompts={"a": 128})
    sim.effect(0, step, 0, 32, hook="start_load_kv", flags=LOAD)
    sim.write_kv("a", 0, 32)
    sim.finish("a", 128)
    finding = the(analyse(sim), "load-not-injected")
    assert "; slots of its tokens 0-32 were, which the GPU's own prefix cache had" in words(finding)
    assert "other request" not in words(finding)
    assert finding.remedy[0].startswith("Begin behind num_computed_tokens")


@pytest.mark.parametrize("groups", [[[0], [1]], [[0, 1]]])
def test_a_load_into_the_blocks_of_another_group(tmp_path: Path, groups: list[list[int]]) -> None:
    """The first group's block ids were taken for all layers: the hook passed over nothing."""
    sim = loading(tmp_path, kv_blocks=64, groups=[(16, one) for one in groups])
    step = sim.one_step("b", 128, taken=96, digest=2, ends=False)
    sim.write_kv("a", 0, 96, step=step - 1)
    sim.write_kv("b", 0, 96, layers=[0])
    remedy = the(analyse(sim), "load-not-injected").remedy[0]
    assert remedy.startswith("Give each layer the blocks of its own KV cache group") is (len(groups) == 2)


@pytest.mark.parametrize(
    ("ranks", "layers", "where", "remedy"),
    [
        ([0, 1], [0, 1], "the layers", "Look at start_load_kv"),
        ([1], [0, 1], "the layers on rank 1", "See whether every rank loads"),
        ([0, 1], [1], "1 of 2 layers", "See whether start_load_kv goes through all layers"),
        ([1], [1], "1 of 2 layers on rank 1", "See whether every rank loads"),
    ],
)
def test_where_a_load_did_not_come(
    tmp_path: Path, ranks: list[int], layers: list[int], where: str, remedy: str
) -> None:
    """Of two ranks, or of layers that were still being written, one had the KV."""
    sim = loading(tmp_path, tp=2, kv_blocks=16)
    step = sim.one_step("b", 128, taken=96, digest=2, ends=False)
    for rank in (0, 1):
        for layer in (0, 1):
            sim.write_kv("a", 0, 96, layers=[layer], rank=rank, step=step - 1)
            if rank not in ranks or layer not in layers:
                sim.write_kv("b", 0, 96, layers=[layer], rank=rank)
    finding = the(analyse(sim), "load-not-injected")
    assert finding.headline == f"96 accepted tokens not in {where} when attention ran"
    assert finding.remedy[0].startswith(remedy)


def test_load_failed_by_an_exception(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    sim.hook(0, "start_load_kv", sim.step_id, flags=int(Flag.RAISED))
    sim.workers[0].fact(
        Fact.EXCEPTION,
        {"hook": "start_load_kv", "layer": "", "step": sim.step_id, "connector": 71, "type": "OSError",
         "message": "gone", "where": "c.py:3 in start_load_kv", "count_so_far": 1},
    )  # fmt: skip
    finding = the(analyse(sim), "load-failed")
    assert finding.tokens == 96 and "OSError: gone (at c.py:3" in words(finding)


def test_load_failed_by_blocks(tmp_path: Path) -> None:
    sim = loading(tmp_path)
    sim.load_errors(0, sim.step_id, 1)
    finding = the(analyse(sim), "load-failed")
    assert finding.tokens == 32
    assert finding.title.endswith("of the only load: the connector reported it.")


def test_a_failed_load_of_what_nobody_stored_is_not_held(tmp_path: Path) -> None:
    """The lookup alone said so: it was said that "the connector holds these tokens already"."""
    sim = Sim(tmp_path, kv_blocks=32)
    step = sim.one_step("b", 128, taken=96, digest=1, ends=False)
    sim.load_errors(0, step, 1)
    sim.step([Chunk("b", 0, 128)], prompts={"b": 128})
    sim.finish("b", 128)
    finding = the(analyse(sim), "already-stored")
    assert finding.title.startswith(
        "The connector takes these tokens for stored: they were computed as a load"
    )
    assert "If the store does not have them" in finding.remedy[-1]


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_computed_behind_a_failed_load(tmp_path: Path, fails: bool) -> None:
    """It was called "what a hit leaves to compute", and is more than that."""
    sim = Sim(tmp_path, kv_blocks=32)
    sim.one_step("a", 128, [Entry("a", 128, 128, 0)], digest=1)
    step = sim.one_step("b", 128, taken=96, digest=1, ends=False)
    if fails:
        sim.load_errors(0, step, 1)
        sim.step([Chunk("b", 64, 64)], prompts={"b": 128})
    sim.finish("b", 128)
    sim.write()
    run = read_run(tmp_path)
    finding = the(diagnose(replace(run, base=graded(run.base, Grade.WRITTEN))), "already-stored")
    assert ("computed as a load failed" in finding.title) is fails
    assert finding.remedy[-1].startswith("See why their load failed.") is fails


OF_NOBODY = "of none of its requests: vLLM computed nothing anew"


@pytest.mark.parametrize("writes_seen", [True, False])
def test_reported_blocks_that_are_of_no_request(tmp_path: Path, writes_seen: bool) -> None:
    """The places of blocks in their table were reported, not their ids: the request ran on, as for vLLM
    nothing had failed. What was seen not to be written is told as that."""
    sim = loading(tmp_path, kv_blocks=16)
    sim.write_kv("a", 0, 96)
    step = sim.one_step("b", 128, taken=96, digest=2)
    if writes_seen:
        sim.effect(0, step, None, 0, hook="start_load_kv", flags=LOAD)
    else:
        sim.effect(0, step, None, -1, hook="start_load_kv", flags=LOAD)
        sim.touch_unknown(hook="start_load_kv", flags=LOAD)
    sim.load_errors(0, step, 1)
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == ["load-not-injected" if writes_seen else "load-failed"]
    finding = the(diagnosis, of_loads(diagnosis)[0])
    assert OF_NOBODY in words(finding)
    assert finding.remedy[0].startswith("Let get_block_ids_with_load_errors return the ids") is writes_seen
    assert "not known to come back" not in diagnosis.verdict  # all of it is known


def test_a_whole_load_beside_a_report_of_nobody_s_blocks(tmp_path: Path) -> None:
    """It was said to have failed, for the load of another request of its step."""
    sim = Sim(tmp_path, kv_blocks=32)
    lengths = {"a": 128, "b": 128}
    first = []
    for request in lengths:
        sim.arrive(Prompt(request, 128))
        sim.lookup(request, 0, 96, 96)
        first.append(Chunk(request, 96, 32, first=True))
    step = sim.step(first, prompts=lengths)
    sim.effect(0, step, None, 160, hook="start_load_kv", flags=LOAD)
    sim.write_kv("a", 0, 96)
    sim.write_kv("b", 0, 64)
    sim.load_errors(0, step, 1)
    for request in lengths:
        sim.finish(request, 128)
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == ["loaded-partly"]
    assert the(diagnosis, "loaded-partly").tokens == 32


@pytest.mark.parametrize("how", ["computed anew", "ended by vLLM", "another load under way", "preempted"])
def test_reported_blocks_that_may_be_of_a_request(tmp_path: Path, how: str) -> None:
    sim = Sim(tmp_path)
    if how == "another load under way":
        sim.load_begins("z", 128, 96)
    step = sim.one_step("a", 128, [Entry("a", 128, 128, 0)], taken=96, digest=1, ends=False)
    sim.load_errors(0, step, 1)
    if how == "computed anew":
        sim.step([Chunk("a", 64, 64)], prompts={"a": 128})
    if how == "preempted":
        sim.preempt("a", 128)
    sim.finish("a", 128, status="FINISHED_ERROR" if how == "ended by vLLM" else "FINISHED_STOPPED")
    said = words(the(analyse(sim), "load-failed"))
    assert OF_NOBODY not in said and (how == "computed anew") == ("tokens computed anew, from" in said)


def test_each_of_a_step_s_loads_reports_a_block_of_its_own(tmp_path: Path) -> None:
    """More is computed anew for the first than was reported; the second's was called a fault of its own."""
    sim = Sim(tmp_path, kv_blocks=32)
    first = []
    for request in "ab":
        sim.arrive(Prompt(request, 128))
        sim.lookup(request, 0, 96, 96)
        first.append(Chunk(request, 96, 32, first=True))
    lengths = {"a": 128, "b": 128}
    step = sim.step(first, [Entry(one, 96, 96, 0, int(Flag.LOAD)) for one in "ab"], prompts=lengths)
    sim.write_kv("a", 32, 96, step=step)
    sim.write_kv("b", 0, 32, step=step)
    sim.load_errors(0, step, 2)
    sim.step([Chunk("a", 0, 128), Chunk("b", 32, 96)], prompts=lengths)
    for request in "ab":
        sim.finish(request, 128)
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == ["load-failed"]
    assert the(diagnosis, "load-failed").tokens == 96 + 64


@pytest.mark.parametrize("how", ["late start", "no wait", "full graph"])
def test_load_after_use(tmp_path: Path, how: str) -> None:
    fate = Fate()
    if how == "full graph":
        fate = Fate(dead_pairs=frozenset({(0, 0), (0, 1)}), mode=2)
    elif how == "no wait":
        fate = Fate(unhooked=frozenset({(0, 1)}))
    sim = loading(tmp_path, fate=fate, noop=("save_kv_layer",))
    if how == "late start":
        sim.hook(0, "start_load_kv", sim.step_id)
    finding = the(analyse(sim), "load-after-use")
    assert finding.severity == "fault"
    assert finding.tokens == 96  # also where one layer of two was not waited for: a token needs all
    assert finding.remedy == [CATALOGUE["load-after-use"].remedy]


@pytest.mark.parametrize(
    ("hook", "first"),
    [
        ("", "Let wait_for_layer_load return only once its own layer is written"),
        ("start_load_kv", "Put each load into the metadata of the step that schedules its request"),
    ],
)
def test_a_layer_that_was_written_after_it_was_waited_for(tmp_path: Path, hook: str, first: str) -> None:
    """By a thread, and the wait returned too early; or by the next step's hook: nothing can wait for that."""
    sim = Sim(tmp_path, block=16, kv_blocks=64)
    sim.arrive(Prompt("a", 64))
    sim.lookup("a", 0, 48, 48)
    sim.step([Chunk("a", 48, 16, first=True)], [Entry("a", 48, 48, 0, int(Flag.LOAD))], prompts={"a": 64})
    step = sim.step([], tokens=1)
    sim.write_kv("a", 0, 48, hook=hook, t=sim.hook_t[0, step, "start_load_kv", ""])
    sim.finish("a", 65, 2)
    finding = the(analyse(sim), "load-after-use")
    assert [re.split(r" \(|, ", text)[0] for text in finding.remedy] == [first]


def test_a_connector_that_waits_for_nothing_cannot_be_late(tmp_path: Path) -> None:
    fate = Fate(dead_pairs=frozenset({(0, 0), (0, 1)}), mode=2)
    sim = loading(tmp_path, fate=fate, noop=("wait_for_layer_load",))
    assert "load-after-use" not in of_loads(analyse(sim))


# --------------------------------------------------------------------------- asynchronous


def test_load_never_finished(tmp_path: Path) -> None:
    sim = Sim(tmp_path, tp=2)
    sim.load_begins("a", 128, 127)
    sim.done("a", rank=0, flags=LOAD)
    sim.clock(6 * SECOND)
    sim.finish("a", 127, 0, "FINISHED_ABORTED")
    finding = the(analyse(sim), "load-never-finished")
    assert (finding.severity, finding.tokens) == ("fault", 127)
    for text in ("open for 6.0 s", "rank 0 reported it finished; rank 1 did not"):
        assert text in words(finding), text


@pytest.mark.parametrize("hook", ["get_finished", "start_load_kv"])
def test_a_load_whose_end_no_hook_tells_never_finishes(tmp_path: Path, hook: str) -> None:
    sim = Sim(tmp_path, connector_facts={"overrides": [hook]})
    sim.load_begins("a", 128, 127)
    sim.clock(6 * SECOND)
    sim.finish("a", 127, 0, "FINISHED_ABORTED")
    remedy = the(analyse(sim), "load-never-finished").remedy[0]
    assert remedy.startswith("Look at get_finished" if hook == "get_finished" else "Define get_finished")


def test_an_impatient_client_is_no_fault(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.load_begins("a", 128, 127)
    sim.clock(SECOND)
    sim.finish("a", 127, 0, "FINISHED_ABORTED")
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == []
    assert diagnosis.loads.tokens["pending"] == 127
    assert "load-never-finished" not in ruled_out(diagnosis)
    assert "1 load open for a short time" in not_observed(diagnosis)["load-never-finished"]


def test_load_late_while_the_engine_steps_on_idle(tmp_path: Path) -> None:
    """Steps in which a slow get_finished is all there is are no measure of what computing takes."""
    sim = Sim(tmp_path)
    sim.slow = {"get_finished": SECOND // 100}
    sim.load_begins("a", 128, 96)
    for _ in range(100):
        sim.step([], tokens=0)
    sim.done("a", flags=LOAD)
    sim.step([Chunk("a", 96, 32, first=True)], [Entry("a", 32, 32, 96)], prompts={"a": 128})
    sim.finish("a", 128)
    assert of_loads(analyse(sim)) == ["load-late"]


@pytest.mark.parametrize("seconds", [0, 2])
def test_load_late(tmp_path: Path, seconds: int) -> None:
    sim = Sim(tmp_path)
    sim.load_begins("a", 128, 96)
    sim.clock(seconds * SECOND)
    sim.done("a", flags=LOAD)
    sim.step([Chunk("a", 96, 32, first=True)], [Entry("a", 32, 32, 96)], prompts={"a": 128})
    sim.finish("a", 128)
    diagnosis = analyse(sim)
    assert of_loads(diagnosis) == (["load-late"] if seconds else [])
    if seconds:
        (finding,) = diagnosis.findings
        assert finding.severity == "note" and "2000 ms" in finding.title
        assert "asynchronous" not in " ".join(finding.remedy), "it is that already"
    assert ruled_out(diagnosis)["load-never-finished"] == "the only asynchronous load finished"
