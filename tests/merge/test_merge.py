"""Two runs joined: by which ids, with which numbers, on which clock; and what cannot be joined."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from synth import Chunk, Prompt
from two_runs import SECOND, Engine, Host, handed_over, pair

from kvtrace.merge import join
from kvtrace.merge.build import MergedRuns
from kvtrace.merge.build import merge as merge_runs
from kvtrace.merge.merged import Alone, Joined
from kvtrace.merge.place import load, new_directory, requests, write
from kvtrace.render.merged import merged_page
from kvtrace.render.page import Screen
from kvtrace.render.terminal import terminal

Shell = Callable[..., tuple[int, str, str]]
IDS = {"remote_request_id": "p-1", "remote_engine_id": "engine-p"}


def merge(*runs: Path, error_ms: int = 100) -> MergedRuns:
    with TemporaryDirectory() as place:
        return merge_runs([str(run) for run in runs], error_ms * 10**6, Path(place))


def joined(answer: MergedRuns) -> list[Joined]:
    return [row for row in answer.requests if isinstance(row, Joined)]


def reasons(answer: MergedRuns) -> dict[str, str]:
    return {row.alone.id: row.why for row in answer.requests if isinstance(row, Alone)}


# ------------------------------------------------------------------------------ joins and numbers


def test_a_request_is_told_across_both_engines(tmp_path: Path) -> None:
    answer = merge(*handed_over(tmp_path))
    (one,) = joined(answer)
    assert (one.there.id, one.here.id, one.how, one.key) == ("p-1", "d-1", "returned", "remote_request_id")
    assert (one.prompt, one.computed, one.sent_by, one.received_by) == (
        600, 600, {"declared": 512}, {"declared": 384},
    )  # fmt: skip
    assert (one.offered, one.accepted, one.computed_here, one.again, one.last) == (384, 384, 216, 128, 0)
    assert one.again_by == {"the connector here did not offer them": 128} == answer.merged.sums.again_by
    assert reasons(answer) == {} and answer.merged.joins == {"returned": 1}
    sums = answer.merged.sums
    assert (sums.joined, sums.sent, sums.received, sums.again) == (1, 512, 384, 128)
    prefill, decode = answer.merged.engines
    assert (prefill.saved, prefill.grade, decode.accepted, decode.requests) == (512, "declared", 384, 1)


def test_the_last_token_that_vllm_always_computes_is_told_apart(tmp_path: Path) -> None:
    there, here = pair(tmp_path)
    there.computes("p-1", 600, 600)
    there.returned("p-1", IDS)
    here.fetches("d-1", IDS, 600, 599)
    (one,) = joined(merge(there.write(), here.write()))
    assert (one.again, one.last, one.again_by) == (one.sent - 599, 1, {})


def test_why_tokens_were_computed_again(tmp_path: Path) -> None:
    there, here = pair(tmp_path)
    there.computes("p-1", 600, 512)
    there.returned("p-1", IDS)
    here.sim.arrive(Prompt("d-1", 600))
    here.brought("d-1", IDS)
    here.sim.lookup("d-1", 0, 448, 256)
    here.sim.step([Chunk("d-1", 256, 344, first=True)], prompts={"d-1": 600})
    here.sim.finish("d-1", 600)
    (one,) = joined(merge(there.write(), here.write()))
    assert one.again_by == {
        "the scheduler here did not accept them": 192,
        "the connector here did not offer them": 64,
    }


def simple(place: Path, brought: dict[str, str], there_brought: dict[str, str] | None = None) -> MergedRuns:
    """One request there that returned nothing, one here with these ids."""
    there, here = pair(place)
    if there_brought is not None:
        there.sim.arrive(Prompt("p-1", 64))
        there.brought("p-1", there_brought, ["do_remote_decode"])
    there.computes("p-1", 64, 64)
    there.client("0", "p-1")
    here.fetches("d-1", brought, 64, 32)
    return merge(there.write(), here.write())


def test_a_requests_id_joins_though_its_engine_returned_nothing(tmp_path: Path) -> None:
    (one,) = joined(simple(tmp_path, IDS))
    assert (one.how, one.value) == ("named", "p-1")


@pytest.mark.parametrize(
    ("mine", "others"),
    [("transfer_id", "transfer_id"), ("remote_prefiller.kv_request_id", "remote_decoder.kv_request_id")],
)
def test_the_id_of_a_transfer_that_both_brought_joins(tmp_path: Path, mine: str, others: str) -> None:
    (one,) = joined(simple(tmp_path, {mine: "x-77"}, {others: "x-77"}))
    assert (one.there.id, one.here.id, one.how, one.key) == ("p-1", "d-1", "transfer", mine)


@pytest.mark.parametrize(
    ("brought", "why"),
    [
        ({}, join.NO_ID),
        ({"remote_request_id": "p-9"}, join.NOT_HERE),
        ({"remote_request_id": "p-1", "remote_engine_id": "another"}, join.NO_ENGINE),
        ({"remote_engine_id": "engine-p"}, join.NO_ID),
        ({"req_id": "0"}, join.NOT_HERE),
    ],
)
def test_what_no_id_joins_stays_alone_and_says_why(tmp_path: Path, brought: dict[str, str], why: str) -> None:
    answer = simple(tmp_path, brought)
    assert joined(answer) == [] and reasons(answer)["d-1"] == why
    assert answer.merged.sums.joined == 0 and sum(answer.merged.alone.values()) == 2
    assert "same X-Request-Id header" in " ".join(
        terminal(merged_page(answer.merged, "m"), Screen(100)).split()
    )


@pytest.mark.parametrize("ids", [{"remote_request_id": "elsewhere"}, {"transfer_id": "x-1"}])
def test_two_that_load_from_a_third_are_not_joined(tmp_path: Path, ids: dict[str, str]) -> None:
    one, two = pair(tmp_path)
    for engine, ident in ((one, "d-1"), (two, "d-2")):
        engine.role = "kv_both"
        engine.__post_init__()
        engine.fetches(ident, ids, 64, 32, ["do_remote_prefill"])
    answer = merge(one.write(), two.write())
    assert joined(answer) == [] and set(reasons(answer).values()) == {join.NOT_HERE}


def test_an_equal_prompt_is_no_evidence(tmp_path: Path) -> None:
    there, here = pair(tmp_path)
    there.computes("a-p", 512, 512)
    here.loads("b-d", 512, 256)
    assert set(reasons(merge(there.write(), here.write())).values()) == {join.NO_ID}


def of_one_client(place: Path, client: str, roles: tuple[str, str] = ("kv_both", "kv_both")) -> MergedRuns:
    there, here = pair(place)
    there.role, here.role = roles
    for engine, ident in ((there, "e-1"), (here, "e-2")):
        engine.__post_init__()
        engine.client(client, ident)
    there.computes("e-1", 64, 64)
    here.loads("e-2", 64, 32)
    return merge(there.write(), here.write())


def test_the_clients_id_joins_the_earlier_with_the_later(tmp_path: Path) -> None:
    (one,) = joined(of_one_client(tmp_path, "cmpl-7f2e-0"))
    assert (one.there.id, one.here.id, one.how, one.value) == ("e-1", "e-2", "shared", "cmpl-7f2e-0")


def test_plain_numbers_are_nobodys_ids(tmp_path: Path) -> None:
    assert set(reasons(of_one_client(tmp_path, "0")).values()) == {join.NUMBERS}


def test_an_engine_that_only_loads_computes_for_nobody(tmp_path: Path) -> None:
    assert joined(of_one_client(tmp_path, "cmpl-7f2e-0", ("kv_consumer", "kv_consumer"))) == []


def test_an_id_that_fits_two_requests_joins_none(tmp_path: Path) -> None:
    there, here = pair(tmp_path)
    for _ in range(2):
        there.computes("p-1", 64, 64)
    here.fetches("d-1", IDS, 64, 32)
    answer = merge(there.write(), here.write())
    assert joined(answer) == [] and reasons(answer)["d-1"] == join.SEVERAL


# ------------------------------------------------------------------------------ clocks


def test_one_boot_is_one_clock_whatever_the_hosts_are_called(tmp_path: Path) -> None:
    answer = merge(*handed_over(tmp_path, Host("another name", "boot-1")))
    (one,) = joined(answer)
    assert len(answer.merged.clocks) == 1 and answer.merged.clocks[0].hosts == ("h1", "another name")
    assert one.sure and 0.49 * SECOND < one.after_ns < 0.51 * SECOND


def test_hosts_of_the_same_name_have_clocks_of_their_own(tmp_path: Path) -> None:
    answer = merge(*handed_over(tmp_path, Host("h1", "boot-2", 7000 * SECOND)))
    (one,) = joined(answer)
    assert len(answer.merged.clocks) == 2
    assert one.sure and 0.49 * SECOND < one.after_ns < 0.51 * SECOND


def test_order_between_hosts_is_claimed_beyond_uncertainty_only(tmp_path: Path) -> None:
    runs = handed_over(tmp_path, Host("h2", "boot-2", 7000 * SECOND))
    assert joined(merge(*runs, error_ms=400))[0].sure
    assert not joined(merge(*runs, error_ms=600))[0].sure


def test_a_request_before_its_cause_shows_the_clocks_offset(tmp_path: Path) -> None:
    answer = merge(*handed_over(tmp_path, Host("h2", "boot-2", 7000 * SECOND), early=SECOND))
    (one,) = joined(answer)
    assert answer.merged.uncertainty_ns >= 0.5 * SECOND and not one.sure
    assert "differ by 500" in answer.merged.notes[0] and "h1 and h2" in answer.merged.notes[0]


def test_on_one_clock_nothing_comes_before_its_cause(tmp_path: Path) -> None:
    answer = merge(*handed_over(tmp_path, early=int(0.6 * SECOND)))
    assert joined(answer) == [] and reasons(answer)["d-1"] == join.EARLY


# ------------------------------------------------------------------------------ runs


def test_a_run_twice_is_one_line(tmp_path: Path, shell: Shell) -> None:
    prefill, decode = handed_over(tmp_path)
    shutil.copytree(prefill, tmp_path / "copy")
    for again in (prefill, tmp_path / "copy", tmp_path / "decode" / ".." / "prefill"):
        code, out, err = shell("merge", prefill, decode, again, "-o", tmp_path / "m")
        assert (code, out) == (2, "") and err.startswith("kvtrace: the same run twice: ")
        assert err.count("\n") == 1 and not (tmp_path / "m").exists()


@pytest.mark.parametrize("what", ["nothing", "empty", "file", "damaged", "one"])
def test_what_cannot_be_merged_is_one_line(tmp_path: Path, shell: Shell, what: str) -> None:
    prefill, decode = handed_over(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    other = {"one": prefill}.get(what, tmp_path / what)
    if what == "damaged":
        shutil.copytree(decode, other)
        for spool in (other / "spool").iterdir():
            spool.write_bytes(b"no spool")
    words = [prefill] if what == "one" else [prefill, other]
    code, out, err = shell("merge", *words, "-o", tmp_path / "m")
    assert (code, out) == (2, "") and err.startswith("kvtrace: ") and err.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_a_run_without_requests_is_told_and_is_no_error(tmp_path: Path) -> None:
    there, here = pair(tmp_path)
    there.computes("p-1", 64, 64)
    answer = merge(there.write(), here.write())
    assert answer.merged.runs[1].requests == 0
    assert "decode: no request reached a scheduler" in answer.merged.notes


def test_versions_that_differ_are_told(tmp_path: Path) -> None:
    there, here = pair(tmp_path, kvtrace="0.9.0")
    there.computes("p-1", 64, 64)
    note = "the runs were recorded by different versions of kvtrace: 0.1.0, 0.9.0"
    assert note in merge(there.write(), here.write()).merged.notes


def test_a_run_that_goes_on_is_told_as_far_as_it_goes(tmp_path: Path) -> None:
    there, _ = pair(tmp_path)
    host = Host(socket.gethostname(), "boot-2", time.time_ns())
    here = Engine(tmp_path / "decode", 4, "kv_consumer", "engine-d", host, pid=os.getpid())
    there.computes("p-1", 64, 64)
    answer = merge(there.write(), here.write())
    assert [run.running for run in answer.merged.runs] == [False, True]
    assert any("decode is still running" in note for note in answer.merged.notes)


def test_nothing_is_written_over(tmp_path: Path, shell: Shell) -> None:
    runs = handed_over(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("x")
    code, _, err = shell("merge", *runs, "-o", tmp_path / "m")
    assert code == 2 and "not empty" in err and sorted(p.name for p in (tmp_path / "m").iterdir()) == ["mine"]


# ------------------------------------------------------------------------------ the merged directory


@pytest.fixture
def place(tmp_path: Path, shell: Shell) -> Path:
    """A merge of two runs, which are beside it."""
    folder = tmp_path / "m"
    assert shell("merge", *handed_over(tmp_path), "-o", folder)[0] == 0
    return folder


def test_it_is_read_as_it_was_written_and_moves_with_its_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    answer = merge(*handed_over(runs))
    with new_directory(runs / "m") as place:
        write(answer, place)
    moved = runs.rename(tmp_path / "elsewhere")
    merged = load(moved / "m")
    assert [Path(run.path) for run in merged.runs] == [moved / "prefill", moved / "decode"]
    assert list(requests(moved / "m", len(merged.engines))) == answer.requests
    assert (moved / "m").stat().st_mode & 0o077 == 0


def test_explain_requests_and_why_take_it(place: Path, shell: Shell) -> None:
    code, out, err = shell("explain", place)
    assert (code, err) == (0, "") and "128 were sent and yet computed again" in " ".join(out.split())
    assert shell("explain", place / "merged.json") == (code, out, err)
    code, out, _ = shell("requests", place)
    assert code == 0 and "1:p-1" in out and "2:d-1" in out
    for wanted in ("p-1", "d-1", "2:d-1", "d"):
        code, out, err = shell("why", place, "--request", wanted)
        assert (code, err) == (0, "") and out.index("In run 1 prefill") < out.index("In run 2 decode")
        assert "500 ms after it arrived there, on the same clock" in " ".join(out.split())
    code, out, _ = shell("why", place / "merged.json", "--request", "p-1", "--format", "json")
    assert code == 0 and [one["id"] for one in json.loads(out)["stories"]] == ["p-1", "d-1"]
    for words in (("requests", place, "--format", "markdown"), ("explain", place, "--format", "json")):
        assert shell(*words)[0] == 0


def test_requests_fits_80_columns_with_ids_as_vllm_makes_them(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = pair(tmp_path)
    for n in range(3):
        ident = f"cmpl-{n}84ab9c2f7d14c0f9f3e6a7b1c2d3e4f-0-8efe0a4{n}"
        there.computes(ident, 64, 64)
        here.fetches(f"{ident}-d", {"remote_request_id": ident}, 64, 32)
    shell("merge", there.write(), here.write(), "-o", tmp_path / "m")
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = shell("requests", tmp_path / "m")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    shown = next(word for word in out.split() if word.startswith("2:cmpl-1"))
    assert shell("why", tmp_path / "m", "--request", shown)[0] == 0


def test_what_a_merge_has_not_is_one_line(place: Path, shell: Shell) -> None:
    lines: list[tuple[Any, ...]] = [
        ("why", place, "--request", "zzz"),
        ("requests", place, "--verdict", "saved"),
        ("explain", place, "--format", "html"),
        ("export", place, "--format", "csv"),
    ]
    for words in lines:
        code, out, err = shell(*words)
        assert (code, out) == (2, "") and err.startswith("kvtrace: ") and err.count("\n") == 1, words


@pytest.mark.parametrize(
    "words",
    [
        ("check", "m"), ("baseline", "m"), ("diff", "m", "prefill"), ("diff", "prefill", "m"),
        ("top", "m", "--once"), ("metrics", "m", "--once"), ("explain", "m", "--format", "html"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_verb_of_one_run_names_the_runs_to_give(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    shell("merge", *handed_over(tmp_path), "-o", "m")
    code, out, err = shell(*words)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "is of one run: m: give it each of them: prefill, decode" in err


def test_a_merge_is_explained_to_a_file(tmp_path: Path, place: Path, shell: Shell) -> None:
    file = tmp_path / "both.md"
    words = ("explain", place, "--format", "markdown", "-o", file)
    assert shell(*words) == (0, "", "") and "sent and yet computed again" in file.read_text()
    code, _, err = shell(*words)
    assert code == 2 and "there already" in err


def test_a_run_that_is_gone_leaves_the_rest_told(tmp_path: Path, place: Path, shell: Shell) -> None:
    shutil.rmtree(tmp_path / "prefill")
    code, out, _ = shell("why", place, "--request", "p-1")
    assert code == 0 and "In run 2 decode" in out and "prefill: the run is not at" in " ".join(out.split())


@pytest.mark.parametrize("name", ["merged.json", "requests.jsonl"])
def test_a_damaged_merge_is_one_line(place: Path, shell: Shell, name: str) -> None:
    whole = (place / name).read_bytes()
    for data in (whole[: len(whole) // 2], b"[]\n", b'{"schema": 1}\n', b"\xff\xfe", b"null\n"):
        (place / name).write_bytes(data)
        code, out, err = shell("why", place, "--request", "p-1")
        assert (code, out) == (2, "") and err.startswith("kvtrace: ") and err.count("\n") == 1
