"""Asynchronous saves whose end the engine never heard of: when that is known, and when it may still come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtrace.ledger.ends import NOT_SAVED, Blind, Outcome, SaveEnd
from kvtrace.ledger.run import AsyncSave
from kvtrace.ledger.saves.completion import ASKED, settle
from kvtrace.ledger.saves.pairs import StoreResult
from kvtrace.ledger.saves.positions import Token, decide
from kvtrace.terms import NOT_OBSERVED, PENDING, SAVED, Grade

MS = 10**6


def transfer(at_ms: int, begun: bool, spool: str = "") -> Any:
    return SimpleNamespace(store=True, begun=begun, t=at_ms * MS, spool=spool, failed=False)


def settled(
    transfers: list[list[Any]], reads_ms: dict[int, list[int]], asked_ms: list[int]
) -> list[AsyncSave]:
    """What became of each request's save, by its transfers and by when its tokens were read; ``asked_ms``:
    the begins of the steps."""
    requests: list[Any] = [SimpleNamespace(engine=0, transfers=of_one) for of_one in transfers]
    worker = SimpleNamespace(key=(0, "w"), spool="w", rank=0)
    reads = {row: [SimpleNamespace(t=ms * MS) for ms in at] for row, at in reads_ms.items()}
    ran = SimpleNamespace(began_t=np.array(asked_ms, dtype=np.int64) * MS)
    watched: Any = SimpleNamespace(slots=SimpleNamespace(reads=reads, late={}), ran=ran)
    engine: Any = SimpleNamespace(tag=0, workers=(worker,), t_last=max([*asked_ms, 100]) * MS, mute=False)
    return list(settle(requests, [engine], {(0, "w"): watched}))


def ends(copied_ms: list[int], asked_ms: list[int], heard_ms: int = 0) -> list[SaveEnd]:
    """Saves that all begin at 1 ms; their copies are over at ``copied_ms`` (0: not seen), steps begin at
    ``asked_ms``, and the engine hears of the first save's end at ``heard_ms`` (0: never)."""
    transfers = [[transfer(1, begun=True)] for _ in copied_ms]
    if heard_ms:
        transfers[0].append(transfer(heard_ms, begun=False))
    reads = {row: [ms] for row, ms in enumerate(copied_ms) if ms}
    return [save.end for save in settled(transfers, reads, asked_ms)]


LATER = list(range(1000, 1000 + ASKED))
"""Twenty steps that ask for finished saves, a second after the copies."""


def test_copies_over_long_ago_and_never_told_are_not_finished() -> None:
    assert ends([20, 30], LATER) == [SaveEnd.NOT_FINISHED] * 2


@pytest.mark.parametrize(
    ("copied", "asked"),
    [
        pytest.param([20, 30], LATER[1:], id="too few steps asked"),
        pytest.param([20, 30], list(range(200, 200 + ASKED)), id="what follows a copy may take 0.2 s"),
        pytest.param([500, 30], list(range(1180, 1180 + ASKED)), id="and as long as the longest"),
    ],
)
def test_an_end_that_may_still_be_heard_of_is_pending(copied: list[int], asked: list[int]) -> None:
    assert ends(copied, asked)[0] == SaveEnd.PENDING


def test_a_copy_that_was_not_seen_is_pending() -> None:
    assert ends([0, 30], LATER) == [SaveEnd.PENDING, SaveEnd.NOT_FINISHED]


@pytest.mark.parametrize(
    ("heard_ms", "end"),
    [
        pytest.param(40, SaveEnd.NOT_FINISHED, id="long after the longest save"),
        pytest.param(400, SaveEnd.PENDING, id="twice as long as the longest took may pass"),
    ],
)
def test_an_end_is_missed_where_others_were_heard_long_ago(heard_ms: int, end: SaveEnd) -> None:
    assert ends([20, 30], LATER, heard_ms=heard_ms) == [SaveEnd.SAVED, end]


@pytest.mark.parametrize(
    ("reads", "early"),
    [
        pytest.param({0: [50, 60]}, [True], id="read after it was told alone"),
        pytest.param({0: [30, 60]}, [False], id="begun before"),
        pytest.param({}, [False], id="not seen"),
        pytest.param({0: [50], 1: [50]}, [False, False], id="it may be the other's, read with it"),
    ],
)
def test_a_save_that_is_told_before_it_is_read_is_early(
    reads: dict[int, list[int]], early: list[bool]
) -> None:
    transfers = [[transfer(1, begun=True), transfer(40, begun=False, spool="w")] for _ in early]
    assert [save.early for save in settled(transfers, reads, [])] == early


@pytest.mark.parametrize(
    ("end", "grade", "name"),
    [
        (SaveEnd.PENDING, Grade.DECLARED, PENDING),
        (SaveEnd.PENDING, Grade.READ, SAVED),
        (SaveEnd.NOT_FINISHED, Grade.READ, NOT_SAVED),
        (SaveEnd.PENDING, Grade.WRITTEN, SAVED),
        (SaveEnd.NOT_FINISHED, Grade.WRITTEN, SAVED),
        (SaveEnd.NOT_FINISHED, Grade.PROVED, SAVED),
        (SaveEnd.FAILED, Grade.WRITTEN, NOT_SAVED),
    ],
)
def test_what_is_at_rest_is_saved_whatever_the_scheduler_hears(end: SaveEnd, grade: Grade, name: str) -> None:
    """Rows that lay whole in the files, and came back, were called pending and not saved; and what was read
    was "on its way when the trace ended", where vLLM had not been told of it yet."""
    store = StoreResult(SaveEnd.SAVED, min(grade, Grade.WRITTEN))
    token = Token(stores=(store,), unfinished=end, proved=grade == Grade.PROVED)
    assert decide(token).name == name


@pytest.mark.parametrize(("proved", "name"), [(True, SAVED), (False, NOT_SAVED)])
@pytest.mark.parametrize(
    "token", [Token(stores=(StoreResult(SaveEnd.MISPLACED, Grade.READ),)), Token(for_others=True)]
)
def test_what_came_back_equal_was_not_misread(token: Token, proved: bool, name: str) -> None:
    """That other slots were read is said of a step; the return is of these tokens."""
    assert decide(token._replace(proved=proved)).name == name


def test_what_was_read_too_early_is_stale_whatever_is_named() -> None:
    """That metadata is not understood hides no read. What nobody read is as if it
    were not named."""
    unread = StoreResult(SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED, blind=Blind.METADATA_UNREAD)
    assert decide(Token(stores=(unread,), stale=True)).end == SaveEnd.STALE
    assert decide(Token(stores=(unread,))).name == NOT_OBSERVED
    assert decide(Token(stores=(unread,), watched=True)).end == SaveEnd.NOT_DECLARED


_UNSEEN = StoreResult(SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED, blind=Blind.UNSEEN)
_LOST = {
    "named by nothing": Token(), "read too early": Token(stale=True),
    "named, and not read": Token(stores=(StoreResult(SaveEnd.NOTHING_READ, Grade.READ),)),
}  # fmt: skip


@pytest.mark.parametrize(
    "token",
    [
        *(Token(silent=why) for why in (Blind.METADATA_UNREAD, Blind.UNSEEN, Blind.OUT_OF_SIGHT)),
        Token(stores=(_UNSEEN,)),
    ],
)
def test_what_came_back_is_stored_though_nobody_saw_how(token: Token) -> None:
    assert decide(token).name == NOT_OBSERVED
    assert decide(token._replace(proved=True)) == Outcome(SAVED, grade=Grade.PROVED)


@pytest.mark.parametrize("token", _LOST.values(), ids=_LOST.keys())
def test_what_came_back_by_another_save_is_no_save(token: Token) -> None:
    """Another request with the same tokens may have stored them; how this one lost its own is seen."""
    assert decide(token._replace(proved=True)) == decide(token)
