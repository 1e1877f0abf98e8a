"""What tells the requests that a finding is about from those that fared well: facts, no cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import comb

from kvtrace.causes.case import Case, CaseRequest
from kvtrace.causes.cause import Cause
from kvtrace.causes.evidence.numbers import between
from kvtrace.causes.evidence.prompts import ABORTED
from kvtrace.words import count

LOADS = "begun with tokens that the connector was to load"
LONG, LARGE, WHOLE_BLOCKS = "long prompts", "large loads", "prompts of whole blocks"
BEHIND_HIT = "begun behind a hit in the GPU's own prefix cache"
REPEATED = "prompts that came before"
CHUNKED, TOGETHER = "computed in several prefill chunks", "begun in one step with others"
PREEMPTED, CUT_OFF = "preempted", "aborted"
NOT_FIRST, NOT_FIRST_LOAD = "not the first that began in its step", "not the first that loads in its step"
FLAGGED = "with kv_transfer_params"
SAVED, CAME, FOUND = "of which some was saved", "that came whole", "that found something"
"""How the others fared."""
_LEAST = 10
"""Ways to choose so many requests of all: one of them by chance is the one that a property tells."""
_MOST = 2
_MOST_FLAGS = 16

_PROPERTIES: dict[str, Callable[[Case, CaseRequest], bool]] = {
    CHUNKED: lambda _, one: one.chunks > 1 and one.first_end < one.prompt,
    BEHIND_HIT: lambda _, one: one.local > 0,
    LOADS: lambda _, one: one.external > 0,
    PREEMPTED: lambda _, one: one.preemptions > 0,
    CUT_OFF: lambda _, one: one.status == ABORTED,
    TOGETHER: lambda case, one: len(_begun(case)[one.engine, one.chunk_step]) > 1,
    NOT_FIRST_LOAD: lambda case, one: _others_first(case, one, _loads),
    NOT_FIRST: lambda case, one: _others_first(case, one, lambda _: True),
    "begun in one step with the same prompt": lambda case, one: any(
        other.row != one.row and other.digest == one.digest != 0
        for other in _begun(case)[one.engine, one.chunk_step]
    ),
    WHOLE_BLOCKS: lambda _, one: one.block > 1 and one.prompt % one.block == 0,
    REPEATED: lambda case, one: case.alike(one.engine, one.digest)[:1] not in ([], [one]),
}


_BY_ITS_LACK = (WHOLE_BLOCKS, REPEATED, FLAGGED)
"""What explains something also where it is not so."""
_AFTER_LOOKUP = (CHUNKED, TOGETHER, PREEMPTED, CUT_OFF)
"""What is so only once the connector has answered: it explains no answer."""

Apart = Mapping[tuple[str, bool], str]
"""(a property, whether it is these requests' or that of all others) -> what is said of it."""


def of_saves(case: Case, cause: Cause) -> Apart:
    """Of the requests that lost tokens by this cause, beside those of the same engines that were saved."""
    return case.once(("saved apart", cause.id), lambda: _of_saves(case, cause))


def _of_saves(case: Case, cause: Cause) -> Apart:
    mine = {one.row for one in case.affected(cause)}
    engines = {case.requests[row].engine for row in mine}
    others = [
        one.row
        for one in case.requests
        if one.row not in mine and one.saved and not one.unseen and one.engine in engines
    ]
    return told_apart(case, mine, others, SAVED)


def told_apart(case: Case, mine: Collection[int], others: Collection[int], fared: str) -> Apart:
    """What holds for all of these requests and for none of the others, or for none of these and all others.

    Args:
        mine, others: rows of Case.requests. Where these are few nothing is said: it would hold by chance.
        fared: how the others did, :data:`SAVED` or one of its kind.
    """
    ways = comb(len(mine) + len(others), len(mine))
    if not mine or not others or ways < _LEAST:
        return {}
    these, those = ([case.requests[row] for row in rows] for rows in (mine, others))
    here = f"all {count(len(these))} of these" if len(these) > 1 else "this one"
    not_here = f"none of these {count(len(these))}" if len(these) > 1 else "not this one"
    there = f"of the {count(len(those))} others {fared}"

    def of_length(words: str) -> dict[tuple[str, bool], str]:
        told = _by_length(case, words, these, those, here, there)
        # By length a few may stand apart either way: that tells something beside a number in between alone.
        return told if ways >= 2 * _LEAST or numbers_between(told) else {}

    found = of_length(LONG)
    for words, has in (*_PROPERTIES.items(), *_flagged(case)):
        ours, theirs = ({has(case, one) for one in requests} for requests in (these, those))
        told = words == NOT_FIRST and (NOT_FIRST_LOAD, True) in found
        if told or (fared == FOUND and words in _AFTER_LOOKUP):
            continue
        if ours == {True} and theirs == {False}:
            found[words, True] = f"{words}: {here}, none {there}"
        elif ours == {False} and theirs == {True} and words.startswith(_BY_ITS_LACK):
            found[words, False] = f"{words}: {not_here}, all {there}"
    found = found or of_length(LARGE)
    return dict(list(found.items())[:_MOST])


def _by_length(
    case: Case, words: str, these: Sequence[CaseRequest], those: Sequence[CaseRequest], here: str, there: str
) -> dict[tuple[str, bool], str]:
    """Where all of these are longer than all others, or shorter, and which of the connector's numbers lies
    between. here, there: what is said of whom."""
    what, of = _LENGTHS[words]
    mine, others = list(map(of, these)), list(map(of, those))
    engine = case.engines[these[0].engine]
    if min(mine) > max(others) > 0:
        said = f"{count(min(mine))} tokens or more: {here}; {there} the longest has {count(max(others))}"
        limit = between(engine, max(others), min(mine) - 1)
    elif 0 < max(mine) < min(others):
        said = f"{count(max(mine))} tokens at most: {here}; {there} the shortest has {count(min(others))}"
        limit = between(engine, max(mine) + 1, min(others))
    else:
        return {}
    holds = f"; {_HOLDS} {limit}" if limit else ""
    return {(words, min(mine) > max(others)): f"{what} {said}{holds}"}


_HOLDS = "the connector holds"


def numbers_between(told: Apart) -> str:
    """The connector's numbers that lie between the lengths of these requests and of the others; ""."""
    named = [said.partition(f"; {_HOLDS} ")[2] for said in told.values()]
    return next(filter(None, named), "")


def words_of(told: Apart) -> list[str]:
    """What these requests have in common, the first of it first: ``prompts of 200 tokens or more``."""
    return [said.partition(": ")[0] for (words, has), said in told.items() if has or words in _LENGTHS]


def _flagged(case: Case) -> Iterator[tuple[str, Callable[[Case, CaseRequest], bool]]]:
    """Whether a request tells its connector something by a flag."""
    every = dict.fromkeys(flag for told in case.run.flags.values() for flag in sorted(told))
    for flag in list(every)[:_MOST_FLAGS]:
        yield f"{FLAGGED} {flag}", partial(_has_flag, flag)


def _has_flag(flag: str, case: Case, request: CaseRequest) -> bool:
    return flag in case.run.flags.get(request.id, ())


def flags_of(told: Apart, said: bool) -> list[str]:
    """``'skip_save' = true``: what these requests say in their kv_transfer_params, and no other does; or what
    all others say, and none of these (``said`` False)."""
    flagged = [words for words, has in told if words.startswith(FLAGGED) and has is said]
    return [words.removeprefix(f"{FLAGGED} ") for words in flagged]


def _begun(case: Case) -> Mapping[tuple[int, int], list[CaseRequest]]:
    """(engine, step) -> the requests that had their first chunk in it, in the order in which they came."""

    def gather() -> dict[tuple[int, int], list[CaseRequest]]:
        found: dict[tuple[int, int], list[CaseRequest]] = defaultdict(list)
        for one in case.requests:
            if one.chunk_step:
                found[one.engine, one.chunk_step].append(one)
        return found

    return case.once("begun", gather)


def _loads(request: CaseRequest) -> bool:
    return request.external > 0


def _others_first(case: Case, request: CaseRequest, counts: Callable[[CaseRequest], bool]) -> bool:
    """Whether another request that counts came before this one, and began in the same step."""
    here = _begun(case)[request.engine, request.chunk_step]
    return counts(request) and any(counts(other) for other in here if other.row < request.row)


_LENGTHS: dict[str, tuple[str, Callable[[CaseRequest], int]]] = {
    LONG: ("prompts of", lambda one: one.prompt),
    LARGE: ("loads of", lambda one: one.external),
}
