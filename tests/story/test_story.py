"""One request's story: what is told, in which order, and that its ranges are the ledger's."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import recorded
from synth import HEALTHY, Chunk, Entry, Fate, Policy, Prompt, Rounding, Sim, nothing

from kvtrace import causes, ledger
from kvtrace.errors import KvtraceError
from kvtrace.ledger.ends import NOT_SAVED
from kvtrace.render.listing import listing_page
from kvtrace.render.page import Screen
from kvtrace.render.story import story_page
from kvtrace.render.terminal import terminal
from kvtrace.story import find
from kvtrace.story.listing import listing
from kvtrace.story.locate import run_directory, traced_directory
from kvtrace.story.story import Story
from kvtrace.story.tell import tell
from kvtrace.trace.format import STEP_MASK, Flag


def page(story: Story, width: int = 100) -> str:
    return terminal(story_page(story), Screen(width))


@pytest.fixture
def rounded(tmp_path: Path) -> Path:
    return recorded(tmp_path)


def test_the_order_is_that_of_the_request(rounded: Path) -> None:
    story = tell(rounded, "cmpl-7b00-0")
    kinds = [moment.kind for moment in story.moments]
    assert kinds == ["arrival", "lookup", "allocation", "chunk", "chunk", "finish"]
    times = [moment.at_ns for moment in story.moments]
    assert times == sorted(times) and times[0] == 0
    first, second = (moment for moment in story.moments if moment.kind == "chunk")
    assert (first.facts["start"], first.facts["end"], second.facts["end"]) == (0, 512, 700)
    assert [entry.slots for entry in first.entries] == [512] and second.entries == []
    assert [rank.rank for rank in first.ranks] == [0, 1]
    for rank in first.ranks:
        assert rank.bound and rank.state == "ran"
        saves = [call for call in rank.calls if call.name == "save_kv_layer"]
        assert [call.slots for call in saves] == [512, 512]
        assert {call.layer for call in saves} == {pair.layer for pair in story.pairs}
    assert [(r.start, r.end, r.account) for r in story.ranges] == [
        (0, 512, "saved"),
        (512, 700, "not-saved:below-save-granularity"),
    ]
    assert story.ranges[1].stage == 1 and story.ranges[0].pairs == [0, 1, 2, 3]


def test_equal_ranks_and_layers_are_one_line(rounded: Path) -> None:
    text = page(tell(rounded, "mine"), 200)
    assert text.count("rank 0, 1") == 1 and "save_kv_layer 2/2 layers" in text
    assert "a store of 0 slots" in text and "below-save-granularity (stage 1 schedule)" in text
    assert "decode: KV for 3 more tokens" in text
    assert text.index("arrived") < text.index("lookup") < text.index("chunk 1 of 1") < text.index("finished")


def test_whole_blocks_in_the_metadata_are_no_more_positions(tmp_path: Path) -> None:
    """A load of 199 tokens was said to be of positions 0 to 223."""
    sim = Sim(tmp_path)
    load = Entry("a", 64, 64, 0, int(Flag.LOAD))
    sim.one_step("a", 50, [load, Entry("a", 64, 64, 0)], taken=49, digest=1, ends=False)
    sim.finish("a", 53, 4)
    sim.write()
    text = page(tell(tmp_path, "a"), 200)
    assert (
        "a load of 64 slots, positions 0 to 49" in text and "a store of 64 slots, positions 0 to 49" in text
    )
    # what is generated later into the block's last slots was not there to be stored
    assert "decode: KV for 3 more tokens; no store entry reaches past the prompt" in text
    assert "no store covers it" in page(tell(tmp_path, "a", token=51), 200)


def test_pairs_that_fared_differently_are_told_apart(tmp_path: Path) -> None:
    sim = Sim(tmp_path, tp=2, layers=3)
    fate = Fate(unhooked=frozenset({(1, 2)}), missing_ranks=frozenset())
    sim.serve([Prompt("a", 64, 1)], Rounding(32).policy(), fate=lambda n: fate)
    sim.serve([Prompt("b", 64, 2)], Rounding(32).policy(), fate=lambda n: HEALTHY)
    sim.write()
    story = tell(tmp_path, "a")
    lost = [part for part in story.ranges if part.account != "saved"]
    assert [part.pairs for part in lost] == [[5]]
    assert lost[0].account.startswith(NOT_SAVED)
    text = page(story, 400)
    assert "save_kv_layer 2/3 layers (not model.layers.2.self_attn.attn)" in text
    assert "1/6" in text and "rank 1: model.layers.2.self_attn.attn" in text
    assert "rank 0  " in text and "rank 1  " in text  # no longer one line


def test_one_layer_and_one_token(rounded: Path) -> None:
    story = tell(rounded, "cmpl-7b", layer="1", token=600)
    assert story.layer == "model.layers.1.self_attn.attn"
    text = page(story, 160)
    assert "Position 600 of the prompt (700 tokens): computed in chunk 2 of 2" in text
    assert "no store covers it" in text
    assert "chunk 1 of 2" not in text and "chunk 2 of 2: 188 tokens" in text
    assert len(re.findall(r"rank [01]  \+.* save_kv_layer · \d", text)) == 2
    assert "512 to 699" in text and "0 to 511" not in text
    assert tell(rounded, "cmpl-7b", layer="layers.0.").layer == "model.layers.0.self_attn.attn"
    for bad in ("9", "layers", "nope", ""):
        with pytest.raises(KvtraceError, match=r"layer"):
            tell(rounded, "cmpl-7b", layer=bad)
    with pytest.raises(KvtraceError, match=r"no position 700.*0 to 699"):
        tell(rounded, "cmpl-7b", token=700)


def test_json_holds_the_same(rounded: Path) -> None:
    document = json.loads(json.dumps(tell(rounded, "mine").document()))
    assert document["schema"] == "kvtrace.story/1" and document["client"] == "mine"
    assert document["moments"][0]["kind"] == "arrival"
    total = sum((part["end"] - part["start"]) * len(part["pairs"]) for part in document["ranges"])
    assert total == document["computed"] * len(document["pairs"])


def test_loads_preemption_and_a_request_that_never_ends(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.serve([Prompt("loaded", 96, 3, output=2)], Policy(nothing, lambda prompt, local: 64))
    sim.arrive(Prompt("cut", 64, 4))
    sim.lookup("cut", 0, 0, 0)
    sim.step([Chunk("cut", 0, 32, first=True)], [Entry("cut", 32, 64, 0)], prompts={"cut": 64})
    sim.preempt("cut", 32)
    sim.step([Chunk("cut", 0, 64, resumed=True)], [], prompts={"cut": 64})
    sim.write()
    story = tell(tmp_path, "loaded")
    assert (story.ranges[0].start, story.ranges[0].end, story.ranges[0].account) == (0, 64, "loaded")
    assert "64 tokens offered by the connector" in page(story, 140)
    cut = page(tell(tmp_path, "cut"), 140)
    assert "not finished when the trace ends" in cut and "preempted, with KV for 32 tokens" in cut
    assert "resumed after a preemption" in cut


def test_lookups_of_a_request_that_waits_are_one_line(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.arrive(Prompt("waits", 32, 4))
    steps = []
    for offered in (0, 0, 0, 16):
        steps.append(sim.step([], tokens=1))
        sim.lookup("waits", 0, offered, None)
    sim.write()
    text = page(tell(tmp_path, "waits"), 140)
    last = (steps[2] & STEP_MASK) + 1
    assert f"0 tokens offered by the connector, 3 times up to step {last}\n" in text
    assert text.count("lookup:") == 2


def test_tokens_that_a_load_left_out(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=1, noop=("wait_for_layer_load",), kv_blocks=16)
    sim.watching = int(Flag.LOAD)
    sim.arrive(Prompt("partly", 96, 3))
    sim.lookup("partly", 0, 64, 64)
    load = Entry("partly", 48, 64, 0, int(Flag.LOAD))
    step = sim.step([Chunk("partly", 64, 32, first=True)], [load], prompts={"partly": 96})
    sim.effect(0, step, 0, 48, hook="start_load_kv", flags=int(Flag.LOAD))
    sim.write_kv("partly", 0, 48)
    sim.finish("partly", 96)
    sim.write()
    story = tell(tmp_path, "partly", token=40)
    assert [(part.start, part.end, part.account, part.stage) for part in story.ranges][:2] == [
        (0, 48, "loaded", None),
        (48, 64, "not-loaded:loaded-partly", None),
    ]
    shown = page(story, 140)
    assert "16 not loaded · loaded-partly" in shown and "left to the connector to load" in shown
    assert story.loaded and f"What its loads brought\n  {story.loaded[0]}" in shown
    (row,) = listing(str(tmp_path)).rows
    assert row["verdict"] == "loaded-partly"  # though most of its tokens came: a fault comes first


def test_what_was_measured(tmp_path: Path) -> None:
    """A store of 64 slots in every layer that no metadata named: seen on the worker alone."""
    sim = Sim(tmp_path, kv_blocks=8)
    sim.serve([Prompt("dark", 64, 5)], Policy(nothing))
    for layer in range(sim.layers):
        sim.stored("dark", 0, 64, layer, size=4096, files=1, target=77)
    sim.write()
    story = tell(tmp_path, "dark")
    (chunk,) = (moment for moment in story.moments if moment.kind == "chunk")
    saves = [call for call in chunk.ranks[0].calls if call.name == "save_kv_layer"]
    assert [(call.measured_slots, call.measured_bytes, call.measured_files) for call in saves] == [
        (64, 4096, 1),
        (64, 4096, 1),
    ]
    assert [(entry.slots, entry.declared) for entry in chunk.entries] == [(64, False)]
    text = page(story, 300)
    assert "no slots known to be for this request; measured on the workers: a store of 64 slots" in text
    assert "measured: 64 slots, 2 files, 8.0 KiB" in text


@pytest.mark.parametrize("unit", [32, 96, 512])
@pytest.mark.parametrize("fate", [HEALTHY, Fate(dead_pairs=frozenset({(0, 1)})), Fate(mode=2)])
def test_ranges_sum_to_the_ledger(tmp_path: Path, unit: int, fate: Fate) -> None:
    sim = Sim(tmp_path, tp=2, batched=128)
    prompts = [Prompt(f"r{n}", n, n, output=3) for n in (20, 96, 200, 300, 513)]
    sim.serve(prompts, Rounding(unit).policy(), fate=lambda n: fate if n % 2 else HEALTHY)
    sim.write()
    run = ledger.read_run(tmp_path)
    books = Counter[str]()
    for prompt in prompts:
        story = tell(tmp_path, prompt.id)
        own = story.accounts
        assert sum(own.values()) == story.computed * len(story.pairs)
        assert all(own[name] <= story.tokens(name) * len(story.pairs) for name in own)
        books.update(own)
        marks = sorted((r.start, r.end) for r in story.ranges)
        assert all(0 <= start < end <= story.computed for start, end in marks)
    assert dict(books) == causes.diagnose(run).saves.accounts


# ------------------------------------------------------------------------------ ids


IDS = ["chat-aa1", "chat-aa2", "chat-b", "7-x", "70-x"]
CLIENTS = {"7-x": "7", "70-x": "70", "chat-b": "b"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("chat-b", "chat-b"), ("chat-b"[:6], "chat-b"), ("7", "7-x"), ("70", "70-x"), ("b", "chat-b")],
)
def test_an_id_of_client_or_engine_or_a_unique_prefix(wanted: str, found: str) -> None:
    assert find.find(wanted, IDS, CLIENTS) == (found, 0)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("chat-a", "fits 2 requests: chat-aa1, chat-aa2"),
        ("nope", "no such request"),
        ("", "no such request"),
        ("\x1b[2J\n", "no such request"),
        ("chat-b#2", "was used 1 times"),
    ],
)
def test_other_ids_are_one_line(wanted: str, says: str) -> None:
    with pytest.raises(KvtraceError) as caught:
        find.find(wanted, IDS, CLIENTS)
    assert says in str(caught.value) and "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_an_id_that_was_used_twice(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.serve([Prompt("again", 64, 1)], Rounding(32).policy())
    sim.serve([Prompt("again", 96, 2)], Rounding(32).policy())
    sim.write()
    with pytest.raises(KvtraceError, match=r"again#1 to again#2"):
        tell(tmp_path, "again")
    first, second = tell(tmp_path, "again#1"), tell(tmp_path, "again#2")
    assert (first.prompt, second.prompt) == (64, 96)
    for story in (first, second):
        assert [moment.kind for moment in story.moments].count("arrival") == 1
        assert story.accounts == {"saved": story.prompt * 2}


# ------------------------------------------------------------------------------ paths, lists, hostile strings


def test_where_the_spools_are(rounded: Path, tmp_path: Path) -> None:
    (rounded / "report.json").write_text("{}")
    assert run_directory(rounded) == run_directory(rounded / "report.json") == rounded
    lone = tmp_path / "elsewhere"
    lone.mkdir()
    (lone / "report.json").write_text("{}")
    assert traced_directory(lone / "report.json") is None
    for path, says in (
        (lone / "report.json", "a report without its run"),
        (lone, "no spools"),
        (lone / "nope", "no such file"),
        (Path("a\0b"), "no such file"),
    ):
        with pytest.raises(KvtraceError, match=says):
            run_directory(path)


def test_the_list(rounded: Path) -> None:
    found = listing(str(rounded))
    assert [row["id"] for row in found.rows] == ["cmpl-7f3a-0", "cmpl-7b00-0"]
    assert (found.total, found.fit, found.known) == (2, 2, 2)
    assert [row["id"] for row in listing(str(rounded), sort="best", limit=1).rows] == ["cmpl-7b00-0"]
    assert [row["id"] for row in listing(str(rounded), verdict="partly-saved").rows] == ["cmpl-7b00-0"]
    none = listing(str(rounded), verdict="nope")
    text = terminal(listing_page(none), Screen())
    assert "0 requests with verdict nope" in text and "partly-saved (1)" in text
    text = terminal(listing_page(found), Screen())
    assert "cmpl-7f3a-0" in text and "below-save-granularity" in text
    assert "client" in text and "accepted" not in text  # empty columns are left out


def test_hostile_strings_are_harmless(tmp_path: Path) -> None:
    bad = "[red]x[/red] \x1b[2J\x9b31m\u202e"
    sim = Sim(tmp_path)
    sim.layer_names = [f"{bad}.{i}" for i in range(2)]
    sim.serve([Prompt(f"id {bad}", 64, 1)], Rounding(32).policy())
    sim.write()
    story = tell(tmp_path, "id ")
    story.notes.append(bad)
    for text in (page(story), page(tell(tmp_path, "id ", layer=None, token=3))):
        assert "[red]x[/red]" in text and "\\x1b[2J" in text
        assert all(char.isprintable() or char == "\n" for char in text)
    assert page(replace(story, moments=[], ranges=[]))
    text = terminal(listing_page(listing(str(tmp_path))), Screen())
    assert all(char.isprintable() or char == "\n" for char in text)
