"""Every rule on a run that shows its cause, and on a healthy twin that does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnosed import analyse, graded, ids, prompts, ruled_out, said, served, the, tokens
from synth import WATCHED, Chunk, Entry, Fate, Policy, Prompt, Rounding, Sim, nothing, run_json

from kvtrace.causes import diagnose
from kvtrace.ledger import read_run
from kvtrace.ledger.run import HookException, OutsideBytes, StartFailure
from kvtrace.terms import Grade
from kvtrace.trace.facts import STEP
from kvtrace.trace.format import Fact
from kvtrace.words import count

FLAGSHIP = [1870, 180, 900, 1200, 1999, 2047, 640, 1500, 2100, 2210]


def test_flagship(tmp_path: Path) -> None:
    sim = Sim(tmp_path, tp=2, layers=4, batched=2048, ints={"unit": 2048, "block_size": 32},
              args={"max_num_batched_tokens": 2048})  # fmt: skip
    sim.serve(prompts(FLAGSHIP, output=4), Rounding(2048).policy())
    diagnosis = analyse(sim)
    first = diagnosis.findings[0]
    assert ids(diagnosis) == ["below-save-granularity", "decode-not-offered"]
    assert (first.severity, first.stage, first.requests) == ("limit", 1, 10)
    assert "8 of 10 prompts" in first.title
    text = " ".join([first.title, *first.evidence, *first.remedy])
    for words in ("2048", "max_num_batched_tokens, set by --max-num-batched-tokens",
                  "all 10 prompts with", "shorter than one unit: 8; with a partial last unit: 2",
                  "median", "0 (8 requests)", "2 048 (2 requests)"):  # fmt: skip
        assert words in text, words
    assert tokens(diagnosis) == {
        "saved": 4096,
        "not-saved:below-save-granularity": sum(FLAGSHIP) - 4096,
        "not-saved:decode-not-offered": 30,
    }
    assert diagnosis.verdict.startswith(
        f"4 096 of {count(sum(FLAGSHIP))} prompt tokens computed here (28.0 %)"
    )
    assert "10 550 were not saved" in diagnosis.verdict and ": 8 of 10 prompts are" in diagnosis.verdict
    out = ruled_out(diagnosis)
    assert out["full-cudagraph-replay"].startswith("graph mode FULL in 0 of ")
    assert "use_direct_call is False on all 8 layers" in out["direct-call-bypass"]
    assert (
        out["connector-not-created"]
        == "created in the scheduler and in 2/2 workers, from my_store/connector.py"
    )
    assert out["local-hit"].startswith("0 tokens (0 %) were reused")
    assert "ranks-diverge" not in out  # what metadata says, it says for both ranks
    assert [(row.into, row.out) for row in diagnosis.stages] == [
        (sum(FLAGSHIP), sum(FLAGSHIP)),
        (sum(FLAGSHIP), 4096),
    ] + [(4096, 4096)] * 5
    assert first.events[0].request == "req-6"


@pytest.mark.parametrize("empty", [True, False])
def test_unit_of_the_connector_itself(tmp_path: Path, empty: bool) -> None:
    sim = Sim(tmp_path, batched=1024, extra={"unit": 256, "path": "/x"}, ints={"unit": 256, "block_size": 32})
    sim.serve(prompts([40, 100, 180, 200, 230, 255, 300, 900]), Rounding(256, empty_entries=empty).policy())
    diagnosis = analyse(sim)
    finding = diagnosis.findings[0]
    assert (finding.id, finding.severity) == ("below-save-granularity", "limit")
    assert 'kv_connector_extra_config["unit"]' in " ".join(finding.evidence)
    assert tokens(diagnosis)["saved"] == 256 + 768


@pytest.mark.parametrize(
    ("extra", "ints", "setting"),
    [
        ({"unit": 512}, {"unit": 512}, 'lower "unit" in kv_connector_extra_config'),
        ({"store": {"chunk_size": 512}}, {}, 'lower "store.chunk_size" in kv_connector_extra_config'),
        ({}, {"_max_num_batched_tokens": 512}, "lower --max-num-batched-tokens"),
        ({"seg": 512, "capacity": 512}, {"capacity": 512}, ""),
        ({"max_chunks": 512}, {"max_chunks": 512}, ""),
        ({}, {"unit": 512}, ""),  # what a user sets it by is not known
    ],
)
def test_a_remedy_names_a_setting_called_unit_and_no_number(
    tmp_path: Path, extra: dict[str, Any], ints: dict[str, int], setting: str
) -> None:
    """What a smaller unit would save was said as a number, though other losses stay; and any setting of the
    unit's size was named."""
    sim = Sim(tmp_path, batched=512, block=32, extra=extra, ints=ints)
    sim.serve(prompts([300, 600, 1100]), Rounding(512).policy())
    finding = the(analyse(sim), "below-save-granularity")
    said = " ".join(finding.remedy)
    assert setting.lower() in said.lower() and ("lower" in said.lower()) == bool(setting)
    assert "change the rounding in " in said.lower() and "%" not in said and "would have" not in said


def test_stock_connector_with_all_prompts_below_a_block(tmp_path: Path) -> None:
    sim = Sim(tmp_path, connector="ExampleConnector", block=128, ints={"_block_size": 128})
    sim.serve(prompts([20, 50, 128]), Rounding(128, d=1).policy())
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["below-save-granularity"]
    assert "block size" in " ".join(diagnosis.findings[0].evidence)
    assert "--block-size" in diagnosis.findings[0].remedy[0]


@pytest.mark.parametrize(
    ("ints", "cause"),
    [
        ({"port": 4096}, "metadata-has-no-store"),
        ({"window": 4096}, "metadata-has-no-store"),
        ({"max_model_len": 4096, "max_blocks": 12}, "metadata-has-no-store"),
        ({"bytes_per_token": 4096}, "metadata-has-no-store"),
        ({"_inner._compress_bits": 8}, "metadata-has-no-store"),  # not 8 blocks, as the only number there is
        ({"min_tokens": 4096}, "below-save-granularity"),
        ({"_max_batched": 4096}, "below-save-granularity"),
        # Two numbers of the connector are larger than every prompt: which one is the unit?
        ({"unit": 4096, "queue": 9000}, "metadata-has-no-store"),
    ],
)
def test_a_large_number_is_no_unit_for_its_size_alone(
    tmp_path: Path, ints: dict[str, int], cause: str
) -> None:
    """Nothing was ever offered, and the connector has one number that is larger than every prompt:
    that of max_num_batched_tokens, and by chance or not? That it is the unit its name says."""
    sim = served(tmp_path, [60, 90], Policy(nothing), batched=4096, ints=ints)
    assert ids(analyse(sim)) == [cause]


@pytest.mark.parametrize(
    ("other", "cause"),
    [("max_local_chunks", "below-save-granularity"), ("segment_size", "metadata-has-no-store")],
)
def test_prompts_are_rounded_to_nothing_by_what_is_named_a_unit(
    tmp_path: Path, other: str, cause: str
) -> None:
    """Each prompt is in the metadata with no slot; two numbers are larger than all prompts (LMCache#4094)."""
    sim = served(tmp_path, [60, 90], Rounding(544).policy(), ints={"chunk_size": 544, other: 9000})
    assert ids(analyse(sim)) == [cause]


@pytest.mark.parametrize(
    ("extra", "seen"),
    [
        ({"max_offload_tokens": 128}, "; the connector holds 'max_offload_tokens' = 128"),
        ({"max_offload_bytes": 128}, ""),
    ],
)
def test_a_limit_on_what_is_stored_of_a_prompt(tmp_path: Path, extra: dict[str, int], seen: str) -> None:
    """LMCache#5029: of each prompt the first tokens alone, as many as a setting says."""

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, 128, -1, 0)]

    found = the(
        analyse(served(tmp_path, [300, 170, 210], Policy(store), extra=extra)), "metadata-has-no-store"
    )
    assert f"no more than the first 128 tokens of any of these was offered{seen}" in found.evidence
    assert found.remedy[0].startswith("See 'max_offload_tokens' = 128" if seen else "See what ends a store: ")


def test_what_is_not_a_prompts_beginning_is_no_limit_on_it(tmp_path: Path) -> None:
    """The 64 tokens behind the first ones are stored alone."""

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, 64, -1, 64)]

    found = the(analyse(served(tmp_path, [192, 210, 300], Policy(store))), "metadata-has-no-store")
    assert "the first 128 tokens" not in " ".join([*found.evidence, *found.remedy])


def test_why_nothing_may_be_offered(tmp_path: Path) -> None:
    found = the(analyse(served(tmp_path, [310, 170, 215], Policy(nothing))), "metadata-has-no-store")
    assert found.remedy[0].startswith("Nothing of any prompt is offered: see what switches saving on")


def test_a_threshold_between_the_prompts_is_named(tmp_path: Path) -> None:
    """UCM#925: prompts below persist_token_threshold are not stored."""

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, prompt.length, -1, 0)] if prompt.length >= 200 else []

    sim = served(
        tmp_path, [64, 96, 128, 160, 224, 256, 288, 320], Policy(store),
        extra={"persist_token_threshold": "200", "port": 8000},
    )  # fmt: skip
    found = the(analyse(sim), "metadata-has-no-store")
    assert found.evidence[0].endswith("; the connector holds 'persist_token_threshold' = 200")
    assert found.remedy[0].startswith("See 'persist_token_threshold' = 200")


def test_prompts_of_several_engines_are_counted_together(tmp_path: Path) -> None:
    first, second = Sim(tmp_path, tag=1, pid=100), Sim(tmp_path, tag=2, pid=200)
    for at, sim in enumerate((first, second)):
        sim.serve(prompts([60, 90], start=1 + 2 * at), Policy(nothing))
    assert "of all 4 prompts" in said(analyse(first, second), "metadata-has-no-store")


@pytest.mark.parametrize(("batched", "ints", "both"), [(128, {}, True), (128, {"_max_batch": 128}, False)])
def test_full_chunks_alone_look_like_a_unit(
    tmp_path: Path, batched: int, ints: dict[str, int], both: bool
) -> None:
    """A connector that passes over steps of few tokens was said to round."""
    sim = served(tmp_path, [300, 220, 520], Rounding(batched).policy(), batched=batched, ints=ints)
    found = the(analyse(sim), "below-save-granularity")
    assert ("or leaves out what fills no prefill chunk: either fits" in found.title) is both
    assert ("See whether the connector passes over steps of few tokens" in found.remedy[0]) is both


def test_whole_units_are_healthy(tmp_path: Path) -> None:
    diagnosis = analyse(served(tmp_path, [64, 128, 512, 1024], tp=2))
    assert ids(diagnosis) == []
    assert tokens(diagnosis) == {"saved": 1728}
    assert diagnosis.verdict.startswith("All 1 728 prompt tokens computed here were ")
    assert set(ruled_out(diagnosis)) >= {
        "no-connector-configured", "connector-not-created", "full-cudagraph-replay", "direct-call-bypass",
        "local-hit", "wrong-connector-class", "layer-not-hooked", "metadata-not-bound", "hook-raised",
        "below-save-granularity", "first-chunk-only", "role-does-not-save",
    }  # fmt: skip


def test_another_class_than_the_configured_one(tmp_path: Path) -> None:
    other = {"resolves": False, "module": "vllm.bundled", "file": "/v/bundled.py"}
    diagnosis = analyse(served(tmp_path, [64, 128], connector_facts=other))
    assert ids(diagnosis) == ["wrong-connector-class"]
    assert "vllm.bundled.ChunkStore is live" in diagnosis.findings[0].title
    assert "wrong-connector-class" not in ruled_out(diagnosis)


def test_a_class_handed_on_by_a_module_is_the_configured_one(tmp_path: Path) -> None:
    sim = Sim(tmp_path, connector_facts={"resolves": True, "module": "other.place", "file": "/o/place.py"})
    sim.serve(prompts([64, 128]), Rounding(32).policy())
    assert ids(analyse(sim)) == []


def test_no_connector_configured(tmp_path: Path) -> None:
    diagnosis = analyse(served(tmp_path, [64, 300], Policy(nothing), output=3, connector=None))
    assert ids(diagnosis) == ["no-connector-configured"]
    assert tokens(diagnosis) == {"not-saved:no-connector-configured": 368}
    assert (
        diagnosis.verdict
        == "None of the 364 prompt tokens computed here was saved: this engine has no KV connector."
    )
    assert {"full-cudagraph-replay", "direct-call-bypass"} <= set(ruled_out(diagnosis))


def test_connector_not_created_in_one_worker(tmp_path: Path) -> None:
    diagnosis = analyse(served(tmp_path, [64, 128], output=3, tp=2, live=[True, False]))
    assert diagnosis.findings[0].id == "connector-not-created"
    assert "worker 1" in diagnosis.findings[0].title
    assert tokens(diagnosis) == {
        "saved": 96, "not-saved:connector-not-created": 98, "not-saved:decode-not-offered": 2,
    }  # fmt: skip
    assert "ranks-diverge" in ids(diagnosis)


def test_connector_not_created_in_the_scheduler(tmp_path: Path) -> None:
    diagnosis = analyse(served(tmp_path, [64], Policy(nothing), created=False, live=False))
    assert ids(diagnosis) == ["connector-not-created"]
    assert "scheduler" in diagnosis.findings[0].title


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("assert num_new_tokens > 0", "get_num_new_matched_tokens must leave one token"),
        ("assert num_external_computed_tokens > 0", "get_num_new_matched_tokens must answer (0, False)"),
        ("assert req_id in self.requests", "get_finished must name only requests"),
        ("assert scheduler_output.kv_connector_metadata is not None", "build_connector_meta must return"),
        ("assert request.is_finished()", "get_finished must return (ids whose save is done, ids whose load"),
        ("assert token_budget >= 0", "Read the line of vLLM"),
    ],
)
def test_an_engine_that_ended_says_what_vllm_asserts(tmp_path: Path, line: str, asked: str) -> None:
    sim = served(tmp_path, [64, 128])
    sim.write()
    run = read_run(tmp_path)
    where = "sched/scheduler.py:1170 in schedule"
    ended = StartFailure(stage=STEP, type="AssertionError", message=line, where=where, pid=1)
    first = diagnose(replace(run, ended_in_steps=(ended,))).findings[0]
    assert (first.id, first.severity) == ("engine-ended", "fault") and where in first.evidence[0]
    assert first.remedy[0].startswith(asked)
    raised = HookException(hook="save_kv_layer", type="OSError", message="x", where="s.py:1", count_so_far=1)
    named = ids(diagnose(replace(run, ended_in_steps=(ended,), exceptions=(raised,))))
    assert "engine-ended" not in named and "hook-raised" in named


@pytest.mark.parametrize(("put", "says"), [(4096, "Fix the connector at s.py:1"), (0, "Make /srv/kv/a")])
def test_a_file_that_is_missing_is_no_place_to_make(tmp_path: Path, put: int, says: str) -> None:
    """Files had been written there; the one that was to be renamed was never made."""
    served(tmp_path, [64, 128]).write()
    error = "[Errno 2] No such file or directory: '/srv/kv/a'"
    raised = HookException(
        hook="wait_for_save", type="FileNotFoundError", message=error, where="s.py:1", count_so_far=1
    )
    outside = [OutsideBytes(1, 4096, 4096, 4096, 4096, 4, put=put)]
    found = the(diagnose(replace(read_run(tmp_path), exceptions=(raised,), outside=outside)), "hook-raised")
    assert found.remedy[0].startswith(says)


def test_a_connector_without_kv_stores_nothing(tmp_path: Path) -> None:
    """Its hooks are empty, the KV caches are given to the base class: it was said to save somewhere."""
    hooks = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
    sim = Sim(tmp_path, noop=hooks, connector_facts={"overrides": [*hooks, "build_connector_meta"]})
    sim.one_step("a", 64, digest=1, unreadable=True)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"not-saved:role-does-not-save": 64}
    assert ids(diagnosis) == ["role-does-not-save"]
    assert "never gets hold of the KV caches" in diagnosis.findings[0].title


def test_connector_failed_to_start(tmp_path: Path) -> None:
    failed = {"ok": False, "error_type": "ModuleNotFoundError", "error": "No module named 'x'"}
    sim = Sim(tmp_path, created=False, live=False, connector_facts=failed)
    diagnosis = analyse(sim)
    assert diagnosis.findings[0].id == "connector-failed-to-start"
    assert "ModuleNotFoundError" in diagnosis.verdict
    assert "No module named 'x'" in diagnosis.findings[0].evidence[0]
    before = diagnose(replace(read_run(tmp_path), engines=()))
    assert before.verdict == (
        "The engine did not start: ChunkStore did not start: ModuleNotFoundError: No module named 'x'."
    )


def test_a_failed_start_comes_before_a_hook_that_raised(tmp_path: Path) -> None:
    """What another engine's connector raised in the same process lost nothing here."""
    failed = {"ok": False, "error_type": "KeyError", "error": "'x'"}
    sim = Sim(tmp_path, created=False, live=False, connector_facts=failed)
    raised = {"hook": "shutdown", "type": "RuntimeError", "message": "no", "where": "c.py:3 in f", "step": 0}
    sim.workers[0].fact(Fact.EXCEPTION, raised)
    assert ids(analyse(sim))[:2] == ["connector-failed-to-start", "hook-raised"]


def test_registration_that_raises(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.workers[0].fact(Fact.EXCEPTION, {"hook": "register_kv_caches", "type": "ValueError", "message": "no",
                                         "where": "c.py:3 in f", "step": 0})  # fmt: skip
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["connector-failed-to-start"]


@pytest.mark.parametrize(("role", "found"), [("kv_consumer", True), ("kv_both", False)])
def test_role_does_not_save(tmp_path: Path, role: str, found: bool) -> None:
    diagnosis = analyse(served(tmp_path, [64, 128], Policy(nothing), output=2, role=role))
    assert ("role-does-not-save" in ids(diagnosis)) == found
    if found:
        assert tokens(diagnosis) == {"not-saved:role-does-not-save": 194}
        assert diagnosis.findings[0].severity == "limit"


def test_a_role_is_ruled_out_only_if_all_engines_have_stores(tmp_path: Path) -> None:
    """Of the other one nothing is known: it got no request."""
    first, second = Sim(tmp_path, tag=1, pid=100), Sim(tmp_path, tag=2, pid=200, role="kv_consumer")
    first.serve(prompts([64]), Rounding(32).policy())
    assert "role-does-not-save" not in ruled_out(analyse(first, second))


def test_later_entries_for_chunk_one_leave_first_chunk_open(tmp_path: Path) -> None:
    """The first chunk's blocks were named after the request had finished."""

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, 128, -1, 0)] if last else []

    sim = served(tmp_path, [256, 320], Policy(store), batched=128, ints={"unit": 32})
    assert "first-chunk-only" not in ruled_out(analyse(sim))


def test_a_consumer_with_an_unknown_step_stores_none_by_role(tmp_path: Path) -> None:
    """Its metadata can't be read, and that nothing was read is known of one of two steps."""
    sim = Sim(tmp_path, role="kv_consumer", layers=1, block=16, kv_blocks=64)
    step = sim.one_step("seen", 64, digest=1, unreadable=True)
    sim.effect(0, step, 0, 0)
    sim.effect(0, step, None, 0, hook="wait_for_save")
    sim.step([], tokens=1)  # what names "seen" may come in the step behind its last one
    sim.one_step("unknown", 96, digest=2, unreadable=True)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"not-saved:role-does-not-save": 64, "not-observed": 96}
    assert [finding.id for finding in diagnosis.findings if finding.severity != "note"] == [
        "role-does-not-save"
    ]


@pytest.mark.parametrize(
    ("empty", "taken", "found"),
    [
        (("save_kv_layer", "wait_for_save"), 63, True),
        (("save_kv_layer",), 63, False),
        (("save_kv_layer", "wait_for_save"), 0, False),
    ],
)
def test_a_connector_that_is_made_to_load_alone(
    tmp_path: Path, empty: tuple[str, ...], taken: int, found: bool
) -> None:
    """vLLM's DecodeBenchConnector, a pull connector under kv_both: no fault that it stores nothing. One that
    has a hook that saves, or that never loads either, is not excused by this."""
    sim = served(tmp_path, [64], Policy(nothing, match=lambda prompt, local: taken), noop=empty)
    diagnosis = analyse(sim)
    assert ("role-does-not-save" in ids(diagnosis)) == found
    if found:
        assert "metadata-has-no-store" not in ids(diagnosis)
    # One of several, inside another connector, has siblings that save: its lookups need not find anything.
    run = read_run(tmp_path)
    (engine,) = run.engines
    assert engine.connector is not None
    inside = replace(engine, connector=replace(engine.connector, parent=1))
    said = ids(diagnose(replace(run, engines=(inside,))))
    assert ("role-does-not-save" in said) == (len(empty) == 2)


def test_a_consumer_that_saves_all_the_same(tmp_path: Path) -> None:
    sim = served(tmp_path, [64, 128], Rounding(32).policy(), role="kv_consumer", ints={"u": 32})
    assert ids(analyse(sim)) == []


def test_the_empty_key_is_a_symptom_of_the_unit(tmp_path: Path) -> None:
    sim = Sim(tmp_path, connector="ExampleConnector", block=128, ints={"_block_size": 128})
    sim.serve(prompts([50, 60, 70, 120]), Rounding(128, d=1, keep=True).policy())
    diagnosis = analyse(sim)
    # Where the store rounds a prompt to nothing, the empty key is a symptom.
    assert ids(diagnosis) == ["below-save-granularity"]
    assert tokens(diagnosis) == {"not-saved:below-save-granularity": 300}
    first = diagnosis.findings[0]
    # of no prompt that reaches it a least length would look the same
    assert "nothing of prompts of less than 128 tokens: all 4 prompts are shorter" in first.title
    assert "after it 3 such prompts got no entry at all" in " ".join(first.evidence)


def test_false_already_stored_one_past_a_block(tmp_path: Path) -> None:
    """Stores round n - 1, lookups n - 2: 33 tokens are looked up under the empty key."""

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, 0, prompt.length)] if prompt.length == 20 else []

    sim = Sim(tmp_path, connector="ExampleConnector", block=32, ints={"_block_size": 32})
    sim.serve(prompts([20, 33, 33, 33]), Policy(store))
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["false-already-stored", "below-save-granularity"]
    assert tokens(diagnosis) == {"not-saved:false-already-stored": 99, "not-saved:below-save-granularity": 20}


def test_the_same_short_prompt_again_is_not_false(tmp_path: Path) -> None:
    sim = Sim(tmp_path, block=128, ints={"_block_size": 128})
    same = [Prompt(f"r{i}", 50, digest=9) for i in range(3)]
    sim.serve(same, Rounding(128, d=1, keep=True).policy())
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["below-save-granularity"]


def test_already_stored_by_an_earlier_request(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    twice = [Prompt(f"a{i}", 128, digest=5) for i in range(3)] + [
        Prompt(f"b{i}", 200, digest=6) for i in range(2)
    ]
    sim.serve(twice, Rounding(32, keep=True).policy())
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {
        "saved": 128 + 192, "not-saved:already-stored": 256 + 192, "not-saved:below-save-granularity": 16,
    }  # fmt: skip
    assert ids(diagnosis) == ["already-stored", "below-save-granularity"]
    assert {f.severity for f in diagnosis.findings if f.id in ids(diagnosis)} == {"limit"}


def test_a_prompt_is_held_as_far_as_prompts_that_begin_like_it(tmp_path: Path) -> None:
    """The most that was kept of any other prompt was taken for it."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt("other", 256, digest=1)], Rounding(32).policy())
    first = Policy(lambda p, i, start, end, last: [Entry(p.id, 32, -1, 0)])
    sim.serve([Prompt("a", 128, digest=2, prefixes=(7, 8, 9))], first)
    sim.serve([Prompt("b", 130, digest=3, prefixes=(7, 8, 9))], Policy(nothing))
    assert tokens(analyse(sim)).get("not-saved:already-stored") == 32


def test_what_the_gpus_own_cache_had_nobody_has_stored(tmp_path: Path) -> None:
    """Three requests of one beginning were refused by a quota; the second one found it on the GPU, and the
    third one's was called already stored."""
    sim, on_gpu = Sim(tmp_path, kv_blocks=64), {"b": 96}
    sim.watching = WATCHED
    sim.serve([Prompt("other", 256, digest=1)], Rounding(32).policy(), measure=lambda n, r, layer, s: s)
    for name in "abc":
        prompt = Prompt(name, 128, digest=2, prefixes=(7, 8, 9))
        sim.serve(
            [prompt], Policy(nothing), local=lambda p: on_gpu.get(p.id, 0), measure=lambda n, r, layer, s: 0
        )
    assert "not-saved:already-stored" not in tokens(analyse(sim))


@pytest.mark.parametrize(
    ("grade", "calm"), [(Grade.DECLARED, False), (Grade.READ, False), (Grade.WRITTEN, True)]
)
def test_already_stored_is_no_better_seen_than_the_earlier_save(
    tmp_path: Path, grade: Grade, calm: bool
) -> None:
    """From an earlier read it was said that the connector holds the tokens, and nothing is to be fixed."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt(f"a{i}", 128, digest=5) for i in range(2)], Rounding(32, keep=True).policy())
    sim.write()
    run = read_run(tmp_path)
    run = replace(run, base=graded(run.base, grade), lost=graded(run.lost, Grade.READ))
    finding = the(diagnose(run), "already-stored")
    assert (finding.id, finding.severity, finding.grade) == (
        "already-stored",
        "limit",
        min(grade, Grade.READ),
    )
    assert ("holds these tokens" in finding.title) == calm == ("came to rest" not in finding.title)
    assert "Nothing to fix" not in " ".join(finding.remedy)
    assert finding.remedy[0].startswith("See what get_num_new" if calm else "Ask kvtrace verify whether the")


def test_of_reused_tokens_it_is_said_whether_ever_stored(tmp_path: Path) -> None:
    """It was said that none of them is lost."""
    sim = Sim(tmp_path, ints={"unit": 32}, prefix_caching=True)
    half = Policy(lambda p, i, start, end, last: [Entry(p.id, 64, -1, 0)])
    sim.serve([Prompt("a", 128, digest=2, prefixes=(7, 8, 9))], half)
    sim.serve([Prompt("b", 130, digest=3, prefixes=(7, 8, 9))], Policy(nothing), local=lambda p: 96)
    said = ruled_out(analyse(sim))["local-hit"]
    assert said.startswith("96 tokens") and said.endswith("a save of 64 of these is known")


def test_already_stored_by_a_hit_that_is_loaded(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    policy = Policy(nothing, match=lambda prompt, local: prompt.length - 1)
    sim.serve([Prompt("a", 128, digest=1), Prompt("b", 64, digest=2)], policy)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"loaded": 127 + 63, "not-saved:already-stored": 2}
    assert ids(diagnosis) == ["already-stored"]  # vLLM computes the last token even where the store holds it
    assert not any("Let such prompts load" in line for line in diagnosis.findings[0].remedy), "they did"
    assert diagnosis.loads.accounts["loaded"] == 190 * 2


def test_a_hit_that_ends_before_the_last_token_does_not_hold_it(tmp_path: Path) -> None:
    """A store in whole blocks answers so, too: of the last token it says nothing."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt("a", 129, digest=1)], Policy(nothing, match=lambda prompt, local: 128))
    assert "already-stored" not in ids(analyse(sim))


def test_what_a_store_leaves_out_before_it_is_not_called_held(tmp_path: Path) -> None:
    """From where a first store began it was said that the store holds what stands before it."""

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, 64, prompt.length, start=64)]

    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt("a", 128, digest=1)], Policy(store))
    assert tokens(analyse(sim)) == {"saved": 64, "not-saved:metadata-has-no-store": 64}


def test_behind_a_hit_an_earlier_save_is_seen_no_better(tmp_path: Path) -> None:
    """For the hit, which ends before them, the connector was said to hold tokens that were only read."""
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve([Prompt("a", 128, digest=5)], Rounding(32).policy())
    sim.serve([Prompt("b", 128, digest=5)], Policy(nothing, match=lambda prompt, local: 32))
    finding = the(analyse(sim), "already-stored")
    assert finding.tokens == 96 and "not seen that it came to rest" in finding.title
    assert finding.evidence[0].endswith("answered with a hit by the lookup: 1")


def test_first_chunk_only(tmp_path: Path) -> None:
    sim = Sim(tmp_path, connector="ExampleConnector", batched=128, ints={"_block_size": 32})
    sim.serve(prompts([400, 300, 200]), Rounding(32, d=1, first_chunk_only=True).policy())
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["first-chunk-only", "below-save-granularity"]
    assert tokens(diagnosis) == {
        "saved": 384,
        "not-saved:first-chunk-only": 256 + 160 + 64,
        "not-saved:below-save-granularity": 16 + 12 + 8,
    }
    assert diagnosis.findings[0].severity == "limit"
    # The reason is said of the tokens that it explains, and what a report counts is what the sentence does.
    assert "516 were not saved" in diagnosis.verdict and ", 480 of them: all 3" in diagnosis.verdict
    assert sum(sum(of.values()) for of in diagnosis.saves.prompts.values()) == 900


@pytest.mark.parametrize("understood", [True, False])
def test_later_chunks_may_be_offered_where_metadata_is_unread(tmp_path: Path, understood: bool) -> None:
    """The worker may pass over them: it was said to offer them."""
    sim = Sim(tmp_path, connector="ExampleConnector", batched=128, ints={"_block_size": 32})
    sim.serve(prompts([400, 300, 200]), Rounding(32, d=1, first_chunk_only=True).policy())
    sim.write()
    run = read_run(tmp_path)
    steps = frozenset() if understood else frozenset({one.first_step for one in run.requests})
    engine = replace(run.engines[0], unreadable_steps=len(steps), watched_steps=steps)
    found = the(diagnose(replace(run, engines=[engine])), "first-chunk-only")
    assert any("is not understood: whether it names" in line for line in found.evidence) is not understood


@pytest.mark.parametrize(
    ("lengths", "ints", "found"),
    [
        ((200, 250, 180), {}, "first-chunk-only"),
        ((200, 250, 300), {}, "first-chunk-only"),
        ((200, 250, 180), {"tokens_per_batch": 128}, "below-save-granularity"),
    ],
    ids=["none fills another unit of that length", "one does", "the connector has that number"],
)
def test_the_first_chunks_alone_are_seen_before_a_unit(
    tmp_path: Path, lengths: tuple[int, ...], ints: dict[str, int], found: str
) -> None:
    """Chunks of 128 tokens, of each prompt the first is stored. Nothing but that says that 128 is a unit."""
    sim = served(tmp_path, lengths, Rounding(32, first_chunk_only=True).policy(), batched=128, ints=ints)
    assert [one.id for one in analyse(sim).findings][:1] == [found]


@pytest.mark.parametrize(
    ("first", "again", "found"),
    [(128, False, "first-chunk-only"), (128, True, None), (64, False, "metadata-has-no-store")],
    ids=["the first unit, once", "each unit", "less than there was: a limit"],
)
def test_the_first_chunks_that_fill_a_unit(
    tmp_path: Path, first: int, again: bool, found: str | None
) -> None:
    """Chunks of 100 tokens, and units of 128: the second chunk fills the first one."""

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        before, here = start // 128 * 128, end // 128 * 128
        if here == before or (before and not again):
            return []
        return [Entry(prompt.id, first if not again else here - before, prompt.length, start=before)]

    sim = served(tmp_path, [440, 384, 512], Policy(store), batched=100, ints={"unit": 128})
    first = [one.id for one in analyse(sim).findings][:1]
    assert first == [found or "below-save-granularity"]


def test_several_stored_chunks_are_not_the_first_one_alone(tmp_path: Path) -> None:
    """A unit that lies over the border of two chunks is left out: of prompts of two chunks that end soon
    after it nothing but the first chunk is stored."""

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        first, after = -(-start // 96) * 96, end // 96 * 96
        return [Entry(prompt.id, after - first, prompt.length, start=first)] if after > first else []

    sim = served(tmp_path, [600, 330, 300], Policy(store), batched=256, ints={"unit": 96})
    found = ids(analyse(sim))
    assert "first-chunk-only" not in found and "metadata-has-no-store" in found


def test_metadata_has_no_store(tmp_path: Path) -> None:
    rounding = Rounding(32)

    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return (
            list(rounding.policy().store(prompt, index, start, end, last)) if prompt.digest % 4 == 0 else []
        )

    sim = Sim(tmp_path, ints={"unit": 32, "admit_every": 4})
    sim.serve(prompts([64, 128, 192, 96, 256, 320, 160, 128]), Policy(store))
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["metadata-has-no-store"]
    assert diagnosis.findings[0].severity == "limit"
    assert tokens(diagnosis) == {"saved": 224, "not-saved:metadata-has-no-store": 1120}


@pytest.mark.parametrize("late", [True, False])
def test_stores_a_step_late_are_as_good_a_reason_as_a_unit(tmp_path: Path, late: bool) -> None:
    """What the last step computes is never stored; it was called a unit of the whole batch."""

    def computed(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        if not late:
            return list(Rounding(512).policy().store(prompt, index, start, end, last))
        return [Entry(prompt.id, 512, start, start - 512)] if index else []

    sim = served(tmp_path, [700, 300, 1300, 600, 1100], Policy(computed))
    (found,) = analyse(sim).findings
    assert (found.id, found.tokens) == ("below-save-granularity", 928)
    assert ("or what a prompt's last step computes" in found.headline) == late


@pytest.mark.parametrize("most", [96, 160])
def test_a_store_that_ends_within_the_first_chunk_is_no_chunk(tmp_path: Path, most: int) -> None:
    """The first three blocks of each prompt alone: that was called the first chunk, of 160 tokens."""

    def first(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        taken = min(end, most) // 32 * 32
        return [] if index else [Entry(prompt.id, taken, end, 0)]

    sim = served(tmp_path, [200, 250, 300, 150, 50], Policy(first), batched=160, ints={"unit": 32})
    assert ("first-chunk-only" in ids(analyse(sim))) is (most == 160)


def test_what_a_last_step_computed_and_was_stored_is_not_denied(tmp_path: Path) -> None:
    """No step's own tokens are offered in it, as where a thread copies later: the last ones are, too."""

    def later(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, end // 64 * 64, end, 0)] if index else []

    sim = served(tmp_path, [700, 1000, 1300, 600, 1100], Policy(later), ints={"unit": 64})
    (found,) = analyse(sim).findings
    assert found.id == "below-save-granularity" and "last step" not in found.headline


def test_a_block_that_two_chunks_fill_is_one_finding(tmp_path: Path) -> None:
    """It was a fault of the slot mapping for one request, and had no known reason for another."""

    def whole_blocks(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        first, behind = -(-start // 32) * 32, end // 32 * 32
        return [Entry(prompt.id, behind - first, end, first)] if behind > first else []

    sim = served(tmp_path, [320, 128, 512, 64], Policy(whole_blocks), batched=200, ints={"unit": 32})
    (found,) = analyse(sim).findings
    assert (found.id, found.severity, found.tokens) == ("metadata-has-no-store", "limit", 96)
    assert "no block that two prefill chunks fill together" in found.headline
    assert "took no block that two prefill chunks fill together" in found.title.replace("offered", "took")
    assert "not known" not in found.title and found.remedy[0].endswith("is the one in which it begins")


def test_decode_that_is_not_offered(tmp_path: Path) -> None:
    diagnosis = analyse(served(tmp_path, [64, 96], output=33))
    assert ids(diagnosis) == ["decode-not-offered"]
    assert tokens(diagnosis)["not-saved:decode-not-offered"] == 64
    assert diagnosis.verdict.startswith("All 160 prompt tokens computed here were ")
    assert diagnosis.verdict.endswith("; no output token was offered for saving.")


def test_decode_that_is_offered(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.one_step("a", 64, [Entry("a", 64, 64, 0)], digest=1, ends=False)
    for n in range(40):
        sim.step([], [Entry("a", 32, 96, 64)] if n == 31 else [], tokens=1)
    sim.finish("a", 104, 41)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved": 96, "not-saved:below-save-granularity": 8}
    assert ids(diagnosis) == ["below-save-granularity"]
    assert diagnosis.findings[0].severity == "limit"


def test_metadata_not_bound(tmp_path: Path) -> None:
    sim = served(tmp_path, [64, 128], output=2, fate=lambda n: Fate(unbound_ranks=frozenset({0, 1})), tp=2)
    diagnosis = analyse(sim)
    assert diagnosis.findings[0].id == "metadata-not-bound"
    assert tokens(diagnosis) == {"not-saved:metadata-not-bound": 192, "not-saved:decode-not-offered": 2}
    assert [row.out for row in diagnosis.stages] == [192, 192, 0, 0, 0, 0, 0]


def test_dummy_runs_are_nothing(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.step([], [], tokens=64, fate=Fate(unbound_ranks=frozenset({0})), dummy=True)
    sim.serve(prompts([64]), Rounding(32).policy())
    diagnosis = analyse(sim)
    assert ids(diagnosis) == []


@pytest.mark.parametrize(
    ("kind", "message", "severity", "title", "evidence"),
    [
        ("OSError", "disk full", "fault", "", "disk full"),
        # Ctrl-C comes wherever Python is, in a hook of a healthy connector as well.
        ("KeyboardInterrupt", "", "note", "was stopped (KeyboardInterrupt)", ""),
    ],
)
def test_hook_raised(
    tmp_path: Path, kind: str, message: str, severity: str, title: str, evidence: str
) -> None:
    sim = served(
        tmp_path, [64, 128], fate=lambda n: Fate(raising=frozenset({(0, 1)})) if n == 2 else Fate(), layers=4
    )
    raised = {"hook": "save_kv_layer", "layer": "l1", "step": sim.step_id, "type": kind,
              "message": message, "where": "store.py:12 in write"}  # fmt: skip
    sim.workers[0].fact(Fact.EXCEPTION, raised)
    diagnosis = analyse(sim)
    found = diagnosis.findings[0]
    assert (found.id, found.severity) == ("hook-raised", severity)
    assert title in found.title and evidence in " ".join(found.evidence)
    assert diagnosis.saves.accounts == {"saved": 64 * 4 + 128, "not-saved:hook-raised": 128 * 3}


def test_exceptions_of_threads_are_counted_kind_by_kind(tmp_path: Path) -> None:
    """A fact counts all of its process: two of one kind and one of another were said to be five."""
    sim = served(tmp_path, [64, 128])
    for at, kind in enumerate(("KeyError", "KeyError", "OSError"), 1):
        raised = {"hook": "thread", "step": sim.step_id, "type": kind, "where": "s.py:1", "count_so_far": at}
        sim.workers[0].fact(Fact.EXCEPTION, raised)
    found = the(analyse(sim), "hook-raised")
    assert found.title == "Its threads raised KeyError, OSError, 3 times."
    assert [one.rpartition(", ")[2] for one in found.evidence] == ["2 times", "1 time"]


def test_a_hook_in_which_the_process_was_stopped_did_not_raise(tmp_path: Path) -> None:
    """Nothing was to be stored in that step."""
    sim = served(tmp_path, [64], layers=4)
    sim.arrive(Prompt("last", 128, digest=9))
    sim.step([Chunk("last", 0, 64, first=True)], [], prompts={"last": 128},
             fate=Fate(raising=frozenset({(0, 1)})))  # fmt: skip
    stopped = {"hook": "save_kv_layer", "layer": "l1", "step": sim.step_id, "type": "KeyboardInterrupt",
               "message": "", "where": "store.py:12 in write"}  # fmt: skip
    sim.workers[0].fact(Fact.EXCEPTION, stopped)
    assert "hook-raised" not in ids(analyse(sim))


def test_layer_not_hooked(tmp_path: Path) -> None:
    sim = served(tmp_path, [64, 128], fate=lambda n: Fate(dead_pairs=frozenset({(0, 3)})), layers=4)
    diagnosis = analyse(sim)
    assert diagnosis.findings[0].id == "layer-not-hooked"
    assert "layers.3" in diagnosis.findings[0].title
    assert tokens(diagnosis) == {"saved": 144, "not-saved:layer-not-hooked": 48}


def test_a_body_that_is_called_directly_is_bypassed(tmp_path: Path) -> None:
    every = frozenset({(0, 0), (0, 1)})
    sim = served(tmp_path, [128], fate=lambda n: Fate(dead_pairs=every), direct_call=True)
    assert ids(analyse(sim))[0] == "direct-call-bypass"


@pytest.mark.parametrize(
    ("idle", "said"),
    [((), "it saves in wait_for_save or later."), (("wait_for_save",), "neither does wait_for_save.")],
)
def test_saves_elsewhere(tmp_path: Path, idle: tuple[str, ...], said: str) -> None:
    sim = Sim(tmp_path, noop=("save_kv_layer", "wait_for_layer_load", *idle), ints={"unit": 32})
    sim.serve(prompts([64, 128]), Rounding(32).policy(), fate=lambda n: Fate(dead_pairs=frozenset({(0, 1)})))
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved": 192}
    note = the(diagnosis, "saves-elsewhere")
    assert (note.severity, note.title.rpartition(": ")[2]) == ("note", said)


def test_agent_not_loaded(tmp_path: Path) -> None:
    sim = served(tmp_path, [64], tp=2)
    sim.write()
    rows: list[dict[str, Any]] = [
        {"pid": 100, "ppid": 1, "name": "VLLM::EngineCore", "command": "", "vllm": True},
        {"pid": 101, "ppid": 100, "name": "VLLM::Worker_TP0", "command": "", "vllm": True},
        {"pid": 102, "ppid": 100, "name": "VLLM::Worker_TP1", "command": "", "vllm": True},
        {"pid": 5, "ppid": 1, "name": "python", "command": "", "vllm": False},
    ]
    run_json(tmp_path, rows)
    healthy = diagnose(read_run(tmp_path))
    assert ruled_out(healthy)["agent-not-loaded"].startswith("3 of 3")
    # A worker that starts a compiler is two processes of one title until the exec.
    run_json(tmp_path, [*rows, {**rows[2], "pid": 103, "ppid": 102}])
    assert ruled_out(diagnose(read_run(tmp_path)))["agent-not-loaded"].startswith("3 of 3")
    sim.workers[1].path.unlink()
    broken = diagnose(read_run(tmp_path))
    assert "agent-not-loaded" in ids(broken)
    assert "VLLM::Worker_TP1" in the(broken, "agent-not-loaded").title


def test_a_rank_of_an_external_launcher_lacks_no_worker(tmp_path: Path) -> None:
    """Each rank is a process of its own with engine and worker in it, whatever the number of ranks."""
    sim = served(tmp_path, [64], tp=2)
    sim.write()
    sim.workers[1].path.unlink()
    run = read_run(tmp_path)
    (engine,) = run.engines
    assert "agent-not-loaded" in ids(diagnose(run))
    own = next(process.spool for process in run.processes if process.name == engine.process)
    assert own is not None
    alone = replace(engine, workers=(replace(engine.workers[0], spool=own),))
    assert "agent-not-loaded" not in ids(diagnose(replace(run, engines=[alone])))


def test_negative_answers_count_as_nothing(tmp_path: Path) -> None:
    sim = Sim(tmp_path, ints={"unit": 32})
    sim.serve(prompts([64]), Policy(Rounding(32).policy().store, match=lambda p, local: -128))
    diagnosis = analyse(sim)
    assert ids(diagnosis) == []
    assert diagnosis.loads.accounts == {"missed:lookup-miss": 128}
