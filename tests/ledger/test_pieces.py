"""Pieces of the ledger by themselves: steps, the stages of the save pipeline, what trust adds up to."""

from __future__ import annotations

import ast
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtrace.ledger
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger import requests, run, side_by_side, values
from kvtrace.ledger.coverage import Bit, StoreStepBit, StoreSteps, WorkerCoverage
from kvtrace.ledger.ends import NOT_SAVED, Outcome, SaveEnd
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.ledger.saves.assign import _Class, _ranks_differ
from kvtrace.ledger.saves.measured import Cell, MeasuredCells, _cells
from kvtrace.ledger.saves.pipeline import ends
from kvtrace.ledger.saves.positions import Segment
from kvtrace.ledger.slots.sets import SlotSet
from kvtrace.ledger.steps import NEVER_RAN, Executed, Steps, StepState, locate, of_engine, step_states
from kvtrace.terms import NOT_OBSERVED, SAVED, Grade
from kvtrace.trace import facts, hooks, rows
from kvtrace.trace.format import Flag, Kind, Role, Stop, pack_head
from kvtrace.trace.reader import SpoolError

# --- steps ----------------------------------------------------------------------------------------

steps_of = st.lists(st.integers(0, 30), max_size=12)


@given(known=steps_of, wanted=steps_of, times=st.sampled_from((1, 40)))
def test_locate_finds_what_is_there(known: list[int], wanted: list[int], times: int) -> None:
    wanted = [step for step in wanted for _ in range(times)]
    at, inside = locate(np.unique(np.array(known, np.int64)), np.array(wanted, np.int64))
    assert inside.tolist() == [step in known for step in wanted]
    assert [sorted(set(known))[i] for i in at[inside]] == [step for step in wanted if step in known]


@given(known=steps_of, low=st.integers(0, 30), high=st.integers(0, 30))
def test_a_set_of_steps(known: list[int], low: int, high: int) -> None:
    found = Steps(known)
    assert len(found) == len(set(known)) and (low in found) == (low in known)
    assert found.any_within(low, high) == any(low <= step <= high for step in known)


def ran(steps: list[int], idle: Sequence[int] = (), full: Sequence[int] = ()) -> Executed:
    columns = (np.array(one, np.int64) for one in (steps, full, idle))
    real, of_graphs, empty = columns
    last = max([*steps, *idle])
    return Executed(real, np.zeros(len(steps), np.int8), of_graphs, empty, {}, {}, 0, 0, 0, last)


def test_how_a_step_went() -> None:
    steps = np.array([1, 2, 3, 9])
    executed = ran([1], idle=[3])
    state = step_states(executed, None, steps)
    assert state.tolist() == [
        StepState.RAN, StepState.NOT_RECORDED, StepState.RAN, StepState.NOT_REACHED,
    ]  # fmt: skip
    assert step_states(executed, Stop.SIZE_LIMIT, steps)[3] == StepState.NOT_RECORDED
    assert step_states(executed, Stop.CLEAN, steps)[3] == StepState.NOT_REACHED
    assert set(step_states(NEVER_RAN, None, steps)) == {StepState.NOT_REACHED}


def test_steps_of_one_engine() -> None:
    steps = np.array([7 << 32 | 1, 8 << 32 | 1, 7 << 32 | 2])
    assert (of_engine(steps, 7) & 0xFF).tolist() == [1, 2]


# --- the stages of the save pipeline ----------------------------------------------------------------

LAYERS = ("a", "b")


def ended(bits: Bit, step: StoreStepBit = StoreStepBit.BOUND, **more: object) -> SaveEnd:
    """The end of layer a's save in step 1, in which layer b did its work."""
    live = bool(more.pop("live", True))
    connector = run.Connector(cls="C", noop=("save_kv_layer",) if more.pop("in_wait", False) else ())
    modes = {1: 1} if more.pop("graphs", False) else {0: 1}
    told = facts.WorkerFact(kv_layers=LAYERS, connector_live=live, direct_call=more.pop("direct", {}))  # type: ignore[arg-type]
    worker = run.Worker(7, 1, "w", "worker 0", connector, told, modes=modes)
    stores = StoreSteps(
        np.array([1]), np.array([[bits, Bit.SAVE_OK | Bit.OP_RAN]], np.uint8), np.array([step], np.uint8)
    )
    coverage = WorkerCoverage(
        hooks={("save_kv_layer", layer): (1, 1, 0) for layer in str(more.pop("seen", "ab"))},
        ops={}, skips={}, python={}, hook_ns={}, store_steps=stores,
        layers_outside=more.pop("outside", frozenset()),  # type: ignore[arg-type]
    )  # fmt: skip
    executed = more.pop("executed", ran([1]))
    assert isinstance(executed, Executed) and not more
    return SaveEnd(int(ends(worker, executed, coverage)[0, 0]))


OP = Bit.OP_RAN


@pytest.mark.parametrize(
    ("want", "bits", "more"),
    [
        (SaveEnd.SAVED, OP | Bit.SAVE_OK, {}),
        (SaveEnd.NO_CONNECTOR, OP | Bit.SAVE_OK, {"live": False}),
        (SaveEnd.RAISED, Bit.SAVE_RAISED, {}),
        (SaveEnd.PENDING, Bit(0), {"executed": NEVER_RAN}),
        (SaveEnd.NOT_OBSERVED, Bit(0), {"executed": ran([2])}),
        (SaveEnd.CONNECTOR_GONE, OP | Bit.OP_NO_CONNECTOR, {}),
        (SaveEnd.CLEARED, OP | Bit.OP_NO_METADATA | Bit.OP_CLEARED, {}),
        (SaveEnd.NOT_BOUND, OP | Bit.OP_NO_METADATA, {}),
        (SaveEnd.NOT_BOUND, Bit(0), {"step": StoreStepBit(0)}),
        (SaveEnd.NO_FORWARD, Bit(0), {"executed": ran([], idle=[1])}),
        (SaveEnd.GRAPH_REPLAY, Bit(0), {"executed": ran([1], full=[1])}),
        (SaveEnd.ONLY_CAPTURED, Bit(0), {"seen": "b", "outside": frozenset("a"), "graphs": True}),
        (SaveEnd.DIRECT_CALL, Bit(0), {"direct": {"a": True}}),
        (SaveEnd.NO_HOOK, Bit(0), {"seen": "b"}),
        (SaveEnd.NO_HOOK, OP, {}),
        (SaveEnd.NOT_OBSERVED, OP | Bit.OP_HOOKED, {}),
        (SaveEnd.SAVED, OP, {"in_wait": True, "step": StoreStepBit.BOUND | StoreStepBit.WAIT_OK}),
        (SaveEnd.RAISED, OP, {"in_wait": True, "step": StoreStepBit.BOUND | StoreStepBit.WAIT_RAISED}),
    ],
)  # fmt: skip
def test_the_first_stage_that_failed(want: SaveEnd, bits: Bit, more: dict[str, object]) -> None:
    assert ended(bits, **more) is want  # type: ignore[arg-type]


# --- what was measured ------------------------------------------------------------------------------


def effect(slots: int, hook: hooks.Hook = hooks.SAVE_LAYER, target: int = 0, t: int = 1) -> rows.Effect:
    head = pack_head(Kind.EFFECT, Role.WORKER, hook.code, 0, int(Flag.STORE))
    return rows.Effect(head, t, 1, 1, slots, 10 if target else 0, int(bool(target)), target)


def cell_of(*effects: rows.Effect) -> Cell:
    table = np.array(effects, np.int64)
    return _cells(rows.columns(rows.Effect, table), np.zeros(len(table), np.int64))[effects[0].step][0]


def test_calls_of_one_layer_add_up() -> None:
    cell = cell_of(effect(3), effect(-1), effect(4, hooks.WAIT_SAVE, target=9, t=5), effect(0, target=9))
    assert (cell.slots, cell.unsure, cell.bytes, cell.files) == (7, True, 20, 2)
    assert cell.targets == {9: 5}
    assert cell_of(effect(-1)).slots == -1


# --- values -----------------------------------------------------------------------------------------


def test_trust_adds_up_and_keeps_the_first_examples() -> None:
    one = run.Trust(calls=2, shared=((1, "a", (0, 1)),) * 10, shared_files=10)
    both = one + one
    assert (both.calls, both.shared_files, len(both.shared)) == (4, 20, 16)
    assert one + run.Trust() == one


def test_what_the_rules_read_is_frozen() -> None:
    kinds = [one for one in vars(run).values() if isinstance(one, type) and is_dataclass(one)]
    kinds += [requests.Request, requests.Requests, LoadOf, WorkerCoverage, MeasuredCells]
    for kind in kinds:
        assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
        mutable = [one.name for one in fields(kind) if str(one.type).startswith(("list", "set"))]
        assert not mutable, (kind, mutable)


def test_a_changed_value_is_another_one_of_known_fields() -> None:
    one = SlotSet(((1, 2),))
    other = values.replace(one, partly=((3, 4),))
    assert other == SlotSet(((1, 2),), ((3, 4),)) and one.partly == ()
    with pytest.raises(TypeError, match="SlotSet has no whole"):
        values.replace(one, whole=True)


def on_two_cores(monkeypatch: pytest.MonkeyPatch, worth: int = 1) -> None:
    """So many bytes are read side by side, whatever machine and threads there are."""
    monkeypatch.setattr(side_by_side, "_WORTH", worth)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_a_process_that_reads_spools_ends_by_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever handler the command has: a pool ends its processes so, and waits for them."""
    on_two_cores(monkeypatch)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        found = side_by_side.each(lambda _, add: signal.getsignal(signal.SIGTERM), [1, 2], [5, 5], print)
        assert list(found) == [signal.SIG_DFL] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_before_such_a_process_is_ready_ends_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has done all while the other one, just forked, is not yet there: the pool hung then."""
    get_ready = side_by_side._ends_when_told

    def told_first() -> None:
        first = not (tmp_path / "first").exists()
        (tmp_path / "first").touch()
        if not first:
            os.kill(os.getpid(), signal.SIGTERM)
        get_ready()
        (tmp_path / ("ready" if first else "too late")).touch()

    monkeypatch.setattr(side_by_side, "_ends_when_told", told_first)
    on_two_cores(monkeypatch)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert list(side_by_side.each(lambda one, add: one, [1, 2], [5, 5], print)) == [1, 2]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "ready").exists() and not (tmp_path / "too late").exists()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == masked


def test_spools_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(one: int, add: side_by_side.Add) -> tuple[int, int]:
        add(1)
        if one == 13:
            raise SpoolError("13: gone")
        return one * one, os.getpid()

    read: list[int] = []
    alone = list(side_by_side.each(work, [1, 2, 3], [5, 5, 5], read.append))
    assert alone == [(one * one, os.getpid()) for one in (1, 2, 3)] and read == [1, 1, 1]
    on_two_cores(monkeypatch, worth=15)
    several = list(side_by_side.each(work, [1, 2, 3], [5, 5, 5], read.append))
    assert [square for square, _ in several] == [1, 4, 9] and read[3:] == [5, 5, 5]
    assert os.getpid() not in {pid for _, pid in several}
    with pytest.raises(SpoolError, match="13: gone"):
        list(side_by_side.each(work, [1, 13, 3], [5, 5, 5], read.append))
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert list(side_by_side.each(work, [2], [50], read.append)) == [(4, os.getpid())]


def test_no_cause_is_named_below_the_rules() -> None:
    for path in Path(kvtrace.ledger.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.rpartition(":")[2] not in CATALOGUE, f"{path.name}:{node.lineno}"


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grade", "other", "differ"),
    [
        (Grade.READ, Outcome(SAVED, grade=Grade.PROVED), False),
        (Grade.READ, Outcome(SAVED, grade=Grade.DECLARED), False),
        (Grade.READ, Outcome(NOT_OBSERVED, grade=Grade.NOT_OBSERVED), False),
        (Grade.READ, Outcome(NOT_SAVED, SaveEnd.NOT_DECLARED, Grade.DECLARED), False),
        (Grade.READ, Outcome(NOT_SAVED, SaveEnd.NOT_DECLARED, Grade.READ), True),
        (Grade.DECLARED, Outcome(NOT_SAVED, SaveEnd.PART_READ, Grade.READ), False),
        (Grade.DECLARED, Outcome(NOT_SAVED, SaveEnd.NO_CONNECTOR, Grade.DECLARED), True),
    ],
)
def test_ranks_differ_only_where_one_lost_what_another_saved(
    grade: Grade, other: Outcome, differ: bool
) -> None:
    """A rank whose step was not watched says nothing of its reads."""
    saved = Segment(0, 64, Outcome(SAVED, grade=grade), 0)
    whole = _Class(1, True, [saved, Segment(64, 96, Outcome(SAVED, grade=grade), 0)])
    part = _Class(1, True, [saved, Segment(64, 96, other, 0)])
    bounds = np.array([whole.bounds, part.bounds])
    assert any(_ranks_differ(np.array([0, 0]), *bounds[:, at].T) for at in (0, 1)) is differ
    assert not any(_ranks_differ(np.array([0, 1]), *bounds[:, at].T) for at in (0, 1)), "two layers, one rank"
