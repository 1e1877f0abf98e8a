"""Bytes that were read against bytes that came to rest (kvtrace/ledger/saves/accounts.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace.ledger.saves.files import rewritten
from kvtrace.ledger.slots.accounts import Account, TracedSpool, accounts
from kvtrace.ledger.slots.reads import Touch
from kvtrace.trace import hooks
from kvtrace.trace.format import Flag, Kind, Role, Way, pack_head
from kvtrace.trace.rest_file import RestFile, RestingFile

SLOT = 64
NONE = np.empty((0, 8), dtype=np.int64)


class Run:
    """A spool of one layer: reads and what went outside, in the order of the calls."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {1: "layer"}
        self.slots: list[tuple[int, ...]] = []
        self.outside: list[tuple[int, ...]] = []
        self.t = 0

    def name(self, text: str) -> int:
        ident = len(self.names) + 1
        self.names[ident] = text
        return ident

    def read(
        self, call: int, count: int = 4, step: int = 1, first: int = 0, text: str | None = None,
        hook: hooks.Hook = hooks.SAVE_LAYER, way: Flag = Flag.STORE,
    ) -> Run:  # fmt: skip
        head = pack_head(Kind.SLOTS, Role.WORKER, hook.code, 7, way)
        named = self.name(f"{first}+{count}" if text is None else text) if text != "" else 0
        self.t += 1
        self.slots.append((head, self.t, 1, step, named, count, 0, call))
        return self

    def write(
        self,
        call: int,
        path: str,
        amount: int,
        size: int | None = None,
        step: int = 1,
        anew: bool = False,
        way: Way = Way.FILE,
    ) -> Run:
        marks = int(Flag.FIRST) if anew else 0
        head = pack_head(Kind.OUTSIDE, Role.WORKER, way, 7, marks)
        self.t += 1
        size = max(0, amount) if size is None else size
        self.outside.append((head, self.t, call, step, self.name(path), amount, size, 0))
        return self

    def sent(self, call: int, amount: int, refused: int = 0) -> Run:
        head = pack_head(Kind.OUTSIDE, Role.WORKER, Way.SOCKET, 7)
        self.t += 1
        self.outside.append((head, self.t, call, 1, self.name("tcp host:1"), amount, 0, refused))
        return self

    def named(self, call: int, old: str, new: str = "", gone: bool = True) -> Run:
        head = pack_head(Kind.OUTSIDE, Role.WORKER, Way.NAME, 7, int(Flag.REPLACED) if gone else 0)
        self.t += 1
        to = self.name(new) if new else 0
        self.outside.append((head, self.t, call, 1, self.name(old), 0, to, 0))
        return self

    def result(self, **sizes: int | None):
        """``sizes``: of files at the end, None for those that are gone."""
        files = tuple(RestingFile(name, size is not None, size) for name, size in sizes.items())
        table = [np.array(part, dtype=np.int64) if part else NONE for part in (self.slots, self.outside)]
        trace = TracedSpool("spool", self.names, *table, {"layer": float(SLOT)})
        return accounts(trace, RestFile(files=files))

    def told(self, **sizes: int | None) -> dict[int, Account]:
        return {call: one for call, (one, *_) in self.result(**sizes).of_call.items()}


def test_a_call_whose_bytes_account_for_what_it_read_is_written() -> None:
    assert Run().read(1).write(1, "a", 4 * SLOT).told(a=256) == {1: Account.WRITTEN}
    assert Run().read(1).write(1, "a", 4 * SLOT + 80).told(a=336) == {1: Account.WRITTEN}  # a header


@pytest.mark.parametrize("amount", [0, 64, 128, 200, 250, 1000, -1])
def test_bytes_that_do_not_account_for_reads_say_nothing(amount: int) -> None:
    assert Run().read(1).write(1, "a", amount, max(0, amount)).told(a=max(0, amount)) == {}


def test_reads_and_writes_of_calls_meet_in_their_step_or_run() -> None:
    of_step = Run().read(1).read(2, first=8).write(3, "a", 512)
    assert of_step.told(a=512) == {1: Account.WRITTEN, 2: Account.WRITTEN}
    of_run = Run().read(1).read(2, step=2).write(3, "a", 512, step=0)
    assert of_run.told(a=512) == {1: Account.WRITTEN, 2: Account.WRITTEN}


def test_slots_that_one_call_reads_twice_count_once() -> None:
    assert Run().read(1).read(1).write(1, "a", 256).told(a=256) == {1: Account.WRITTEN}


def test_slots_that_a_call_reads_and_fills_were_read_for_a_load() -> None:
    """They were taken for KV that never came to rest: `want = kv[blocks]` before `kv[blocks] = loaded`."""
    run = Run().read(1).write(1, "a", 256).read(2, first=8, hook=hooks.START_LOAD)
    run.read(2, first=8, hook=hooks.START_LOAD, way=Flag.LOAD)
    result = run.result(a=256)
    assert result.totals[0].read == 256 and result.of(1)[0] == Account.WRITTEN


def test_slots_that_are_not_known_leave_it_open() -> None:
    assert Run().read(1, text="").write(1, "a", 256).told(a=256) == {}
    assert Run().read(1, text="0+4/8+1").write(1, "a", 256).told(a=256) == {}


@pytest.mark.parametrize("keeps_old", [False, True])
def test_a_file_renamed_when_done_is_at_rest_there(keeps_old: bool) -> None:
    run = Run().read(1).write(1, "part", 256).named(1, "part", "a", gone=not keeps_old)
    assert run.told(a=256, part=256 if keeps_old else None) == {1: Account.WRITTEN}
    linked = Run().read(1).write(1, "part", 256).named(1, "part", "a", gone=False).named(1, "part")
    assert linked.told(a=256, part=None) == {1: Account.WRITTEN}


def test_one_temporary_name_for_many_files() -> None:
    run = Run()
    for call in (1, 2, 3):
        run.read(call, step=call).write(call, "tmp", 256, step=call).named(call, "tmp", f"f{call}")
    assert set(run.told(tmp=None, f1=256, f2=256, f3=256).values()) == {Account.WRITTEN}


def test_what_the_connector_removes_or_empties_was_there_once() -> None:
    run = Run().read(1).write(1, "a", 256).named(2, "a")
    assert run.told(a=None) == {1: Account.LOST_LATER}
    assert Run().read(1).write(1, "a", 256).told(a=0) == {1: Account.LOST_LATER}


def test_what_a_compaction_moves_to_another_file_is_not_lost() -> None:
    run = Run().read(1).write(1, "journal", 256).write(2, "segment", 256, step=2).named(2, "journal")
    assert run.told(journal=None, segment=256) == {}
    run = Run().read(1).write(1, "journal", 256).read(2, first=8).write(2, "a", 256).named(3, "journal")
    assert run.told(journal=None, a=256) == {1: Account.LOST_LATER, 2: Account.WRITTEN}


def test_a_databases_size_says_nothing_of_its_rows() -> None:
    """They are deleted, and others written in their place, in one call with those that made it grow."""
    run = Run().read(1).write(1, "db", 256, way=Way.SQLITE)
    assert run.told(db=256) == {}


def test_a_write_that_adds_no_byte_takes_none_from_a_file() -> None:
    """It may be the end of the write before."""
    run = Run().read(1).write(1, "a", 256).write(2, "a", 0, 256, step=2)
    assert run.told(a=256) == {1: Account.WRITTEN}


def test_a_file_gone_without_a_seen_removal_says_nothing() -> None:
    assert Run().read(1).write(1, "a", 256).told(a=None) == {}


def twice(amount: int, slots: int) -> Run:
    run = Run().read(1).write(1, "a", 256)
    return run.read(2, step=2, text=f"8+{slots}").write(2, "a", amount, step=2, anew=True)


def test_a_name_to_which_less_came_anew_says_nothing_of_before() -> None:
    assert twice(128, 2).told(a=128) == {2: Account.WRITTEN}


def test_a_name_to_which_as_much_came_anew_was_written_over() -> None:
    run = twice(256, 4)
    assert run.told(a=256) == {1: Account.OVERWRITTEN, 2: Account.WRITTEN}
    assert run.result(a=256).of(1) == (Account.OVERWRITTEN, "", 2)
    run.read(3, step=3).write(3, "b", 256, step=3).named(3, "b", "a")
    assert run.told(a=256) == {1: Account.OVERWRITTEN, 2: Account.OVERWRITTEN, 3: Account.WRITTEN}


def test_an_index_that_is_written_anew_counts_for_nothing() -> None:
    run = Run().read(1).write(1, "a", 128).write(1, "b", 128).write(1, "index", 2)
    run.read(2, first=8, step=2).write(2, "c", 256, step=2).write(2, "index", 4, step=2, anew=True)
    run.read(3, text="0+2", step=3).write(3, "a", 128, step=3, anew=True).write(
        3, "index", 6, step=3, anew=True
    )
    result = run.result(a=128, b=128, c=256, index=6)
    assert result.of(1) == (Account.WRITTEN_OVER, "", 3) and result.of(2)[0] == Account.WRITTEN


def test_files_that_never_held_a_byte_are_said() -> None:
    assert Run().read(1, text="").write(1, "a", 0).write(1, "b", 0).result(a=0, b=0).totals[0].empty
    assert not Run().read(1, text="").write(1, "a", 0).write(1, "b", 1).result(a=0, b=1).totals[0].empty
    assert not Run().read(1, text="").write(1, "a", 0).write(1, "b", 0).sent(1, 9).result().totals[0].empty


def touch(step: int, account: Account, over: int = 0, columns: int = 0b11) -> Touch:
    return Touch(step, 0, columns, ((0, 64),), account=account, over=over)


def prompt(*prefixes: tuple[int, int]) -> SimpleNamespace:
    return SimpleNamespace(prefixes=dict(prefixes), prefix=0, block=16, digest=0, arrived=100)


@pytest.mark.parametrize(
    ("other", "later", "found"),
    [
        (((7, 64),), touch(5, Account.WRITTEN), Account.WRITTEN),
        (((7, 64),), touch(5, Account.OPEN), Account.WRITTEN_OVER),
        (((7, 64),), touch(5, Account.WRITTEN, columns=0b01), Account.WRITTEN_OVER),
        (((8, 64),), touch(5, Account.WRITTEN), Account.WRITTEN_OVER),
        (((5, 32), (8, 64)), touch(5, Account.OPEN), Account.LOST_LATER),
        (((6, 32),), touch(5, Account.WRITTEN), Account.WRITTEN_OVER),
    ],
    ids=[
        "the same tokens",
        "not known to be there",
        "in one layer",
        "not comparable",
        "other tokens",
        "fewer of the same",
    ],
)
def test_what_the_same_tokens_wrote_over_is_there(
    other: tuple[tuple[int, int], ...], later: Touch, found: Account
) -> None:
    requests: Any = {0: prompt((6, 32), (7, 64)), 1: prompt(*other)}
    first = touch(2, Account.OVERWRITTEN, over=5)
    told = dict(rewritten({0: [first], 1: [later]}, requests))
    assert told[0].account == found and told[1] == later


@pytest.mark.parametrize(
    ("account", "other", "found"),
    [
        (Account.OVERWRITTEN, 1, Account.OVERWRITTEN),
        (Account.OVERWRITTEN, 6, Account.LOST_LATER),
        (Account.OVERWRITTEN, 4, Account.LOST_LATER),
        (Account.WRITTEN_OVER, 1, Account.WRITTEN_OVER),
    ],
    ids=["older KV stays: one key", "the oldest", "not by the next one", "a part is there"],
)
def test_what_other_tokens_wrote_over_is_gone(account: Account, other: int, found: Account) -> None:
    """``other``: the step of a prompt that stays."""
    requests: Any = {0: prompt((6, 32)), 1: prompt((7, 32)), 2: prompt((8, 32))}
    reads = {
        0: [touch(2, account, over=5)],
        1: [touch(5, Account.WRITTEN)],
        2: [touch(other, Account.WRITTEN)],
    }
    assert dict(rewritten(reads, requests))[0].account == found


def test_a_file_holds_no_more_than_its_size() -> None:
    """A ring, or an arena whose places are used again: which of the writes are still in it is not known."""
    run = Run().read(1).write(1, "ring", 256).read(2, step=2, first=8).write(2, "ring", 256, 256, step=2)
    assert run.told(ring=256) == {}
    (total,) = run.result(ring=256).totals
    assert (total.came, total.at_end) == (512, 256)
    assert set(run.told(ring=512).values()) == {Account.WRITTEN}


def test_what_a_file_grew_by_unseen_came_too() -> None:
    (total,) = Run().read(1, 8).write(1, "db", 128, 192).result(db=576).totals
    assert (total.came, total.at_end) == (512, 512)  # it held 64 before


def test_what_nobody_else_can_have_written_is_the_readers() -> None:
    """A thread whose work no call asked for; the other connector, of the scheduler's side, reads nothing."""
    run = Run().read(1).write(2, "a", 256, step=0).read(3, way=Flag.LOAD, hook=hooks.START_LOAD)
    (of_nobody, *wrote), (of_another, *loaded) = run.outside[0], run.slots[1]
    run.outside = [(of_nobody & ~(0xFF << 24), *wrote)]
    run.slots[1] = (of_another + (1 << 24), *loaded)
    assert run.told(a=256)[1] == Account.WRITTEN


def test_what_went_to_a_peer_is_sent_and_refusals_are_said() -> None:
    found = Run().read(1).sent(1, 300).result()
    assert found.of(1) == (Account.SENT, "tcp host:1", 0)
    assert Run().read(1).sent(1, 0, refused=1).told() == {1: Account.REFUSED}
    assert Run().read(1).sent(1, 20).told() == {}


def test_files_that_never_get_a_byte() -> None:
    run = Run().read(1).write(1, "a", 0).read(2, step=2).write(2, "b", 0, step=2)
    assert run.told(a=0, b=0) == {1: Account.EMPTY, 2: Account.EMPTY}
    assert Run().read(1).write(1, "lock", 0).told(lock=0) == {}  # one name says nothing


def test_the_totals_of_a_connector() -> None:
    (total,) = Run().read(1, 8).write(1, "a", 128).result(a=128).totals
    assert (total.read, total.came, total.at_end, total.went) == (512, 128, 128, 128)
    (total,) = Run().read(1).write(1, "arena", -1, 4096).result(arena=4096).totals
    assert total.came is None and total.at_end is None
    run = Run().read(1).write(1, "a", 256).named(1, "a").read(2, first=8).write(2, "b", 256)
    (total,) = run.result(a=None, b=256).totals
    assert (total.files, total.removed, total.put, total.taken_away) == (2, 1, 512, 256)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "anew", "gone", "rename", "sent"]),
        st.integers(1, 4),
        st.integers(1, 3),
        st.sampled_from([-1, 0, 64, 128, 256, 512]),
    ),
    max_size=12,
)


def made(events) -> Run:
    run = Run()
    for what, call, step, amount in events:
        if what == "read":
            run.read(call, 4, step, first=16 * call)
        elif what == "sent":
            run.sent(call, max(0, amount))
        elif what in ("write", "anew"):
            run.write(call, f"f{call}", amount, abs(amount), step, anew=what == "anew")
        else:
            run.named(call, f"f{call}", f"g{call}" if what == "rename" else "")
    return run


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_nothing_is_written_that_is_not_there_at_the_end(events) -> None:
    """With all files gone nothing is WRITTEN."""
    run = made(events)
    names = {name: None for name in run.names.values() if name[0] in "fg"}
    assert Account.WRITTEN not in run.told(**names).values()


def test_an_open_call_is_told_apart_where_bytes_were_put() -> None:
    silent = Run().read(1)
    assert silent.result().of(1) == (Account.OPEN, "", 0)
    putting = Run().read(1).write(1, "a", 100).read(2, step=2)
    assert [putting.result(a=100).of(call)[0] for call in (1, 2)] == [Account.PARTLY] * 2
