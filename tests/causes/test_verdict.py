"""The sentence that a person reads first: no "all" and no "none" beside what is not observed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from diagnosed import served
from synth import Sim

from kvtrace.causes import diagnose
from kvtrace.causes.assign import assign_spans
from kvtrace.causes.case import make_case
from kvtrace.causes.diagnose import _conclude, _order
from kvtrace.causes.pipeline import Prompts
from kvtrace.causes.registry import CATALOGUE
from kvtrace.causes.rules import save_never_finished
from kvtrace.causes.verdict import _tokens, verdict
from kvtrace.ledger import read_run
from kvtrace.terms import LIMIT, Grade, Stage

EVERY = [
    (proved, read, declared, lost, unseen)
    for proved, read, declared, lost, unseen in itertools.product(
        (0, 1088), (0, 16), (0, 48), (0, 24), (0, 40)
    )
    if proved + read + declared + lost + unseen
]


def said(
    proved: float,
    read: float,
    declared: float,
    lost: float,
    unseen: float,
    sent: dict[str, float] | None = None,
) -> str:
    sent = sent or {}
    saved = {
        Grade.PROVED: proved, Grade.READ: read + sum(sent.values()), Grade.DECLARED: declared,
    }  # fmt: skip
    prompts = Prompts(saved, sent, {Stage.HOOK: lost} if lost else {}, 0, unseen)
    return _tokens(prompts, "the reason", False)


@pytest.mark.parametrize("numbers", EVERY)
def test_every_number_is_said_and_all_and_none_only_of_all(numbers: tuple[int, ...]) -> None:
    proved, read, declared, lost, unseen = numbers
    saved, text = proved + read + declared, said(*numbers)
    kinds = sum(map(bool, (proved, read, declared)))
    assert text.startswith("All ") == (kinds == 1 and not lost and not unseen), text
    assert text.startswith("None ") == (not saved and not unseen), text
    plain = text.replace("\N{NO-BREAK SPACE}", " ").replace("1 088", "1088")
    if unseen and (saved or lost):
        assert "of 40 it is not known" in plain, text
    elif unseen:
        assert plain.startswith("It is not known whether the 40 prompt tokens"), text
    if saved and lost:
        assert f"; {lost} were not saved" in plain, text


def test_what_was_on_its_way_as_the_trace_ended_was_computed() -> None:
    said = _tokens(Prompts({Grade.WRITTEN: 96}, {}, {Stage.COMPLETION: 4}, 0, 0, 100), "", False)
    assert said.startswith(
        "96 of 200 prompt tokens computed here (48.0 %) were stored; 100 were on their way"
    )


def test_what_left_for_a_peer_is_sent_and_not_stored() -> None:
    text = said(0, 0, 0, 0, 0, {"tcp 10.0.0.2:6379": 640})
    assert text.startswith("All 640 prompt tokens computed here were sent to 10.0.0.2:6379 (what it keeps"), (
        text
    )
    text = said(128, 0, 0, 43, 0, {"unix /run/a": 64, "tcp 10.0.0.2:6379": 448})
    assert "128 of 683 prompt tokens computed here (18.7 %) were stored" in text, text
    assert "512 were sent to 10.0.0.2:6379, unix /run/a (what they keep was not seen)" in text, text


def test_what_the_forum_s_user_read() -> None:
    """1 128 prompt tokens, 1 088 of them saved and 40 not observed, were "All prompt KV"."""
    text = said(1088, 0, 0, 0, 40)
    assert text.startswith(
        "1 088 of 1 128 prompt tokens computed here (96.5 %) were stored; of 40 it is not k"
    )


def test_a_reason_of_few_lost_tokens_is_said_of_these_alone() -> None:
    lost = Prompts({Grade.WRITTEN: 2966}, {}, {Stage.SCHEDULE: 3124, Stage.EFFECT: 106}, 0, 0)
    assert _tokens(lost, "KV was read before it was computed", False, few=106).endswith(
        "; 3 230 were not saved, 106 of them: KV was read before it was computed."
    )
    assert _tokens(lost, "the reason", False).endswith("; 3 230 were not saved: the reason.")


def test_a_fault_that_explains_no_lost_token_is_no_reason(tmp_path: Path) -> None:
    """Tokens below the unit were "not saved: 2 asynchronous saves never finished"."""
    sim = served(tmp_path, [64, 70])
    sim.write()
    run = read_run(tmp_path)
    case = make_case(run)
    assign_spans(case)
    headline = "1 asynchronous save never finished"
    fault = case.finding(save_never_finished.CAUSE, "x", headline=headline, requests=1)
    text = verdict(case, [fault, *diagnose(run).findings])
    assert text.endswith(f": of each prompt only whole units of 32 tokens are stored. {headline}."), text


@pytest.mark.parametrize(
    "order",
    [
        # A key without its prefix stood behind slots-short, and behind requests that asked for no transfer.
        [("kv-load-wrong", 64.0), ("slots-short", 73.0), ("metadata-has-no-store", 1070.0)],
        # What a load never wrote is wrong as well: one bug, told by its root.
        [("load-not-injected", 448.0), ("kv-load-wrong", 0.0)],
    ],
    ids=["before more tokens of other faults", "behind the fault that counts its tokens"],
)
def test_where_wrong_data_stands(tmp_path: Path, order: list[tuple[str, float]]) -> None:
    sim = Sim(tmp_path)
    sim.write()
    case = make_case(read_run(tmp_path))
    found = [case.finding(CATALOGUE[ident], "x", tokens=tokens) for ident, tokens in reversed(order)]
    found.sort(key=lambda one: _order(one, frozenset()))
    assert [one.id for one in found] == [ident for ident, _ in order]


@pytest.mark.parametrize(
    ("root", "tokens", "first"),
    [
        ("stored-nothing", 320.0, "stored-nothing"),
        ("kv-misplaced", 96.0, "kv-misplaced"),
        ("stored-nothing", 64.0, "kv-load-wrong"),  # too little to be why
        ("store-failed", 320.0, "kv-load-wrong"),  # what failed is not there to be loaded
    ],
)
def test_what_was_not_taken_stands_before_the_wrong_loads(
    tmp_path: Path, root: str, tokens: float, first: str
) -> None:
    sim = Sim(tmp_path)
    sim.write()
    case = make_case(read_run(tmp_path))
    wrong = case.finding(CATALOGUE["kv-load-wrong"], "x", tokens=384.0)
    assert _conclude(case, [wrong, case.finding(CATALOGUE[root], "x", tokens=tokens)]).findings[0].id == first


@pytest.mark.parametrize(("tokens", "first"), [(928.0, "layer-not-hooked"), (0.0, "load-after-use")])
def test_a_layer_without_hooks_stands_before_its_late_loads(
    tmp_path: Path, tokens: float, first: str
) -> None:
    """UCM#1250: no hook waits for the load of such a layer either."""
    sim = Sim(tmp_path)
    sim.write()
    case = make_case(read_run(tmp_path))
    late = case.finding(CATALOGUE["load-after-use"], "x", tokens=960.0)
    bare = case.finding(CATALOGUE["layer-not-hooked"], "x", tokens=tokens)
    assert _conclude(case, [late, bare]).findings[0].id == first


@pytest.mark.parametrize(("unexplained", "first"), [(64.0, "metadata-has-no-store"), (8.0, "already-stored")])
def test_what_is_held_stands_behind_what_nothing_explains(
    tmp_path: Path, unexplained: float, first: str
) -> None:
    """It is no loss. A key of a prompt's head makes both: the head is held, the rest is not."""
    sim = Sim(tmp_path)
    sim.write()
    case = make_case(read_run(tmp_path))
    held = case.finding(CATALOGUE["already-stored"], "x", tokens=96.0, severity=LIMIT)
    question = case.finding(CATALOGUE["metadata-has-no-store"], "x", tokens=unexplained, severity=LIMIT)
    assert _conclude(case, [held, question]).findings[0].id == first
