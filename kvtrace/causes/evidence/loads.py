"""What the rules about loads have in common: their requests, tokens and events."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from kvtrace.causes.case import MAX_EVENTS, Case, CaseRequest, kept_end
from kvtrace.causes.cause import Cause
from kvtrace.causes.diagnosis import Event, Fields, Finding
from kvtrace.causes.evidence import measured, unlike
from kvtrace.causes.evidence.logs import error
from kvtrace.causes.evidence.part import LOADS, part_of_each
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.outcome import LoadOf, Place
from kvtrace.ledger.loads.seen import ELSEWHERE, OF_HIT, OF_NOBODY, OTHERS_REPORTED
from kvtrace.ledger.reported import CAUGHT, LOAD_HOOKS
from kvtrace.ledger.run import Engine, Swallowed
from kvtrace.ledger.whole import of_load
from kvtrace.terms import LIMIT, Grade
from kvtrace.words import count, listed, of_all, plural

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MOST_REASONS = 4


def lost_by(row: LoadOf, cause: Cause) -> int:
    """Token-layers of a request that this cause took, 0 where it took none."""
    return sum(row.ends.get(end, 0) for end in cause.load_ends)


def places_of(row: LoadOf, cause: Cause) -> list[Place]:
    """A few (rank, layer) pairs in which a request lost tokens by this cause."""
    return [place for end in cause.load_ends for place in row.places.get(end, ())]


def missed_elsewhere(case: Case) -> list[LoadOf]:
    """Lookups that found nothing of a prompt that begins like an earlier one of another engine. Whether
    these engines have one store, and the same keys in it, is not compared."""
    return [
        row
        for row in case.run.load_rows
        if row.answer == 0 and row.local < case.elsewhere.get(row.request, 0)
    ]


class KeptBefore(NamedTuple):
    """A lookup that found less, and the request that was over by then of which ``tokens`` of the same ones
    had been kept, the most of any. ``place``: to which its engine writes, and another one that asks."""

    row: LoadOf
    by: CaseRequest
    tokens: int
    place: str = ""


def kept_by_then(case: Case, row: LoadOf) -> KeptBefore | None:
    """Of the same engine; None where no more was kept than what the GPU had and the lookup found."""
    return _most_kept(case, row, {row.engine: ""}, Grade.DECLARED)


def kept_elsewhere(case: Case, row: LoadOf) -> KeptBefore | None:
    """Of any other engine of the run, seen to be read for a save at the least."""
    return _most_kept(case, row, dict.fromkeys(case.engines.keys() - {row.engine}, ""), Grade.READ)


def saved_elsewhere(case: Case) -> list[KeptBefore]:
    """Of :func:`missed_elsewhere` those that another engine had saved, at a place to which both write. That
    is not seen in all bytes there: who does not find them writes the same files anew."""
    near = _writes_to_same(case)
    asked = (row for row in missed_elsewhere(case) if row.engine in near)
    known = (_most_kept(case, row, near[row.engine], Grade.READ) for row in asked)
    return [one for one in known if one is not None]


def _most_kept(case: Case, row: LoadOf, engines: Mapping[int, str], least: Grade) -> KeptBefore | None:
    over = case.once(("over", least), partial(_over, case, least))
    known = []
    for digest, alike in case.run.in_common.get(row.request, ()):
        for engine, place in engines.items():
            times, most = over.get((engine, digest), ((), ()))
            if before := bisect_left(times, row.t):
                by = most[before - 1]
                known.append(KeptBefore(row, by, findable(case, row, min(alike, _known_kept(by))), place))
    best = max(known, key=lambda one: one.tokens, default=None)
    return best if best is not None and best.tokens > row.local + row.offered else None


def _over(case: Case, least: Grade) -> dict[tuple[int, int], tuple[Sequence[int], Sequence[CaseRequest]]]:
    """(engine, digest of a beginning) -> when requests with that beginning of which something was kept, at
    this grade or better, were over, and their asynchronous saves told to be, in order; and the one of which
    most was by then."""
    told = {save.request: save.told for save in case.run.async_saves}
    later = {entry.request for entry in case.run.entries if entry.asynchronous} - told.keys()
    found: dict[tuple[int, int], list[tuple[int, CaseRequest]]] = defaultdict(list)
    for at, beginnings in case.run.in_common.items():
        request, end = case.requests[at], case.run.requests[at].t_end
        kept = request.saved and (request.grade or Grade.DECLARED) >= least and at not in later
        if end and kept and (at not in told or told[at]):
            end = max(end, told.get(at, 0))
            for digest, _ in beginnings:
                found[request.engine, digest].append((end, request))
    return {key: _running_most(ends) for key, ends in found.items()}


def _known_kept(request: CaseRequest) -> int:
    """How many of its first tokens were kept: by the metadata only where nothing was seen of it."""
    seen = request.taken is not None
    return kept_end(request) if seen or (request.grade or Grade.DECLARED) == Grade.DECLARED else 0


def _running_most(ends: list[tuple[int, CaseRequest]]) -> tuple[Sequence[int], Sequence[CaseRequest]]:
    ends.sort(key=lambda end: end[0])
    most: list[CaseRequest] = []
    for _, one in ends:
        most.append(max([*most[-1:], one], key=_known_kept))
    return [t for t, _ in ends], most


def _writes_to_same(case: Case) -> dict[int, dict[int, str]]:
    """Engine -> other engines that write to a place to which it writes, and which that is."""
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for place in case.run.places:
        for one, other in permutations(place.engines, 2):
            found[one].setdefault(other, place.name)
    return found


def sent_alone(case: Case, savers: Iterable[CaseRequest]) -> tuple[list[str], list[str]]:
    """Evidence and remedy where of these saves, or a part of them, nothing but their leaving for a peer was
    seen."""
    rows = {one.row for one in savers}
    sent = Counter(one.sent_to for one in case.run.base if one.sent_to and one.request in rows)
    peers = measured.peers(sent)
    seen = f"these saves were sent to {peers}, {measured.kept_unseen(sent)}"
    first = f"First see whether {peers} took what was sent: its answers' status, a quota, a limit of size."
    return ([seen], [first]) if sent else ([], [])


NEVER_FOUND = (
    "No lookup found anything: see that get_num_new_matched_tokens asks the store (no role, no flag stops "
    "it), the one that the save hooks fill (each side has a connector object of its own), for the same key "
    "(hash seed, request id, base, unit, salt, order), and before it expires."
)
NOT_COMPARED = (
    "{lookups} found nothing of a prompt that begins like an earlier one of another engine: whether these "
    "engines share a store, and its keys, is not compared (vLLM's own keys may differ by engine where "
    "PYTHONHASHSEED is not set)"
)


def findable(case: Case, row: LoadOf | CaseRequest, tokens: int) -> int:
    """How many of a prompt's first tokens a lookup can find: whole units, or blocks, and never all of it."""
    _, size = whole_size(case, row)
    return min(tokens, row.prompt - 1) // size * size


def whole_size(case: Case, row: LoadOf | CaseRequest) -> tuple[str, int]:
    """What lookups find in whole, and how many tokens it has: a unit; a block, where no unit is known."""
    unit = case.units.get(row.engine)
    return ("unit", unit.value) if unit else ("block", max(1, case.engines[row.engine].block_size))


def due(case: Case, row: LoadOf) -> bool:
    """Whether a prompt begins like an earlier one, by a whole unit or more than the GPU has."""
    return findable(case, row, row.shared) > row.local


def what_misses(case: Case, engines: Collection[int]) -> unlike.Apart:
    """What tells the lookups that found nothing where KV was due from those that found some."""
    rows = [row for row in case.run.load_rows if row.engine in engines]
    missed = [row.request for row in rows if row.answer == 0 and due(case, row)]
    return unlike.told_apart(case, missed, [row.request for row in rows if row.offered], unlike.FOUND)


def affected(case: Case, cause: Cause) -> list[LoadOf]:
    """The requests that lost tokens by this cause."""
    return [row for row in case.run.load_rows if lost_by(row, cause)]


def tokens(case: Case, rows: Iterable[LoadOf], cause: Cause) -> int:
    """Tokens that these requests lost by this cause."""
    return sum(
        whole
        for row in rows
        for end, whole in of_load(row, case.engines[row.engine].pairs).items()
        if end in cause.load_ends
    )


def came_whole(case: Case, row: LoadOf) -> int:
    """Tokens of a request that were loaded into every pair."""
    return of_load(row, case.engines[row.engine].pairs).get(LoadEnd.LOADED, 0)


def accepted(case: Case) -> list[LoadOf]:
    """The requests of which the scheduler accepted tokens from the connector."""
    return [row for row in case.run.load_rows if row.accepted > 0]


def came(case: Case, row: LoadOf) -> bool:
    """Whether all that the scheduler accepted came into all layers."""
    return row.ends.get(LoadEnd.LOADED, 0) >= row.accepted * case.engines[row.engine].pairs


def windows(case: Case, rows: Iterable[LoadOf]) -> str:
    """What to say of layers that need only what lies in their window; "" there are none."""
    engines = {row.engine for row in rows}
    windowed = any(group.window for tag in engines for group in case.engines[tag].token_groups)
    return "; of layers with a window what it holds" if windowed else ""


def finding(
    case: Case, cause: Cause, title: str, rows: Sequence[LoadOf] | None = None, **given: Unpack[Fields]
) -> Finding:
    """A finding with the numbers of the ledger of loads, where none are given.

    Args:
        rows: whose it is; None: of those that lost tokens by this cause.
    """
    rows = affected(case, cause) if rows is None else rows
    lost = given["tokens"] if "tokens" in given else tokens(case, rows, cause)
    total = case.run.loads.total_tokens
    values: Fields = {
        "tokens": lost,
        "share": min(1.0, lost / total) if total else 0.0,
        "requests": len(rows),
        "events": _events(rows, cause),
        "grade": min(
            (g for end in cause.load_ends for g in case.run.loads.grades.get(end, ())), default=None
        ),
        **given,
    }
    return case.finding(cause, title, **values)


def _events(rows: Sequence[LoadOf], cause: Cause) -> list[Event]:
    """The largest losses first, with a pair where one is known."""
    found = []
    for row in sorted(rows, key=lambda row: -lost_by(row, cause))[:MAX_EVENTS]:
        places = places_of(row, cause)
        rank, layer = places[0] if places else (None, None)
        answer = "no answer" if row.answer is None else f"{count(row.offered)} offered"
        text = (
            f"lookup: {count(row.local)} local, {answer}, {count(row.accepted)} accepted of "
            f"{count(row.prompt)} prompt tokens"
        )
        found.append(Event(row.id, row.step, text, rank=rank, layer=layer))
    return found


def of_another_engine(
    case: Case, cause: Cause, title: str, missed: Sequence[KeptBefore], **given: Unpack[Fields]
) -> Finding:
    """A choice to confirm: lookups found nothing of what another engine had saved."""
    first = missed[0]
    at = f" at or below {first.place}, where both write," if first.place else ""
    values: Fields = {
        "severity": LIMIT,
        "tokens": float(sum(one.tokens - one.row.local for one in missed)),
        "grade": min((one.by.grade for one in missed if one.by.grade is not None), default=None),
        **given,
    }
    values["evidence"] = [
        *given.get("evidence", ()),
        f"{first.by.id} of another engine had saved {count(first.tokens)} tokens{at} and was over; the "
        f"lookup of {first.row.id}, which begins alike, answered 0",
    ]
    return finding(case, cause, title, [one.row for one in missed], **values)


def reasons(rows: Iterable[LoadOf], cause: Cause) -> list[str]:
    """What was seen, each once, with how many requests it concerns."""
    seen = Counter(_each_reason(rows, cause)).most_common(_MOST_REASONS)
    return [f"{reason} ({'each of ' if n > 1 else ''}{plural(n, 'request')})" for reason, n in seen]


def _each_reason(rows: Iterable[LoadOf], cause: Cause) -> Iterator[str]:
    return (reason for row in rows for end in cause.load_ends for reason in row.reasons.get(end, ()))


FROM_ZERO = (
    "get_num_new_matched_tokens must answer how many tokens are found behind num_computed_tokens, not from "
    "the first one on"
)
"""vllm/distributed/kv_transfer/kv_connector/v1/base.py, 0.32.0."""
_AS_MANY = f"As many tokens did not come as the GPU's own prefix cache had: {FROM_ZERO}."
_BEFORE = (
    "Begin behind num_computed_tokens (of the lookup) in the request's block table, too: the blocks before "
    "were written."
)
_OTHERS = (
    "Compare the blocks that the load hooks write with those that the scheduler gave the request (block ids, "
    "not their places in the table; in a type that is wide enough): other requests' were written."
)
_NOT_THEIRS = (
    "Let get_block_ids_with_load_errors return the ids of the request's own blocks that were not loaded, not "
    "their places in its table or in the store: vLLM computes those anew."
)
_SOME_RANKS = (
    "See whether every rank loads, and finds what it looks for: the lookup speaks for all ranks, so let it "
    "answer what each of them has."
)
_SOME_LAYERS = (
    "See whether start_load_kv goes through all layers, and whether the lookup answers what is still being "
    "written: give it its name once all layers are there."
)


_LOGGED = re.compile(r'\w+ logged ".*?" \(\w+\)')
"""A line of the connector's own, of the step that was to load."""
_CAUGHT = (
    "Mend what raised at {}: {}; what can't be loaded is to be reported (get_block_ids_with_load_errors), "
    "not passed over."
)
_TOLD_EARLY = "In get_finished, name a load only once its last slot is written, in every layer."
_BY_ADDRESS = (
    "Where native code writes, compare the base address, strides (in bytes) and number of blocks that "
    "it was given for each layer, of every KV cache group, with those of the registered tensor."
)
_STORED_SO = (
    "See what the store holds for these tokens: zeroes, as nothing came into it, or what these blocks held "
    "when it read them (after they went to another request, or of a table from before a preemption)."
)
OF_ITS_GROUP = (
    "Give each layer the blocks of its own KV cache group: the block ids are a list for each group, and "
    "those of the first are no other's."
)


def handled(case: Case) -> list[Swallowed]:
    """Exceptions that the connector caught where it loads, its work in the background included."""
    loading = [one for one in case.run.swallowed if (one.asked_by or one.hook) in LOAD_HOOKS]
    return [one for one in loading if not one.harmless and not one.broad]


def _ended(case: Case, rows: Sequence[LoadOf]) -> list[str]:
    """What to look at first where in the step of each of these loads a job of it ended in an exception."""
    steps = {row.step for row in rows}
    ended = [fact for fact in handled(case) if fact.ended and steps <= {step for step, _ in fact.places}]
    return [_CAUGHT.format(fact.where, error(fact)) for fact in ended[:1]]


def told_itself(case: Case, said: Iterable[str]) -> list[str]:
    """What to look at first where the connector itself caught or logged why a load did not come, going by
    the reasons of the ledger."""
    lines = sorted(said)
    if any(CAUGHT in line for line in lines) and (caught := handled(case)):
        return [_CAUGHT.format(caught[0].where, error(caught[0]))]
    return [f"See why {found[0]}" for found in map(_LOGGED.search, lines) if found][:1]


def remedy(case: Case, rows: Sequence[LoadOf], cause: Cause, of_cause: Sequence[str] = ()) -> list[str]:
    """Of what was not written: first what its blocks were reported as, then what the connector said itself,
    then what the reasons, the amounts or the pairs point at. ``of_cause``: in place of the cause's."""
    said = set(_each_reason(rows, cause))
    before = any(OF_HIT in reason for reason in said)
    from_zero = all(row.local and tokens(case, [row], cause) == row.local for row in rows)
    ranks, layers = _missing_in(case, rows, cause)
    reported = any(OF_NOBODY in reason or OTHERS_REPORTED in reason for reason in said)
    pointed_at = {
        _BEFORE: before,
        _OTHERS: any(ELSEWHERE in reason for reason in said),
        _AS_MANY: from_zero and not before,
        _SOME_RANKS: bool(ranks),
        OF_ITS_GROUP: of_several_groups(case, rows),
        _SOME_LAYERS: bool(layers),
    }
    return [
        *([_NOT_THEIRS] if reported else []),
        *(told_itself(case, said) or _ended(case, rows)),
        *(one for one, holds in pointed_at.items() if holds),
        *where_unseen(rows, of_cause or [cause.remedy], [_STORED_SO]),
    ]


def where_unseen(rows: Sequence[LoadOf], always: Sequence[str], unseen: Sequence[str] = ()) -> list[str]:
    """Remedies, with others where no write of these loads was watched: something behind the load hooks may be
    what writes. ``unseen``: also then."""
    if any(row.measured for row in rows):
        return [*always]
    return [*told_early(rows), *always, *unseen, _BY_ADDRESS]


def told_early(rows: Iterable[LoadOf]) -> list[str]:
    return [_TOLD_EARLY] if all(row.asynchronous for row in rows) else []


def of_several_groups(case: Case, rows: Iterable[LoadOf | CaseRequest]) -> bool:
    """Whether an engine of these has several KV cache groups."""
    return any(len(case.engines[row.engine].token_groups) > 1 for row in rows)


def where(case: Case, rows: Sequence[LoadOf], cause: Cause) -> str:
    """In which layers and ranks tokens did not come: ``the layers``, ``2 of 4 layers on rank 1``."""
    ranks, layers = _missing_in(case, rows, cause)
    on = f" on rank {listed(map(str, sorted(ranks)))}" if ranks else ""
    return f"{layers or 'the layers'}{on}"


def _pairs(engine: Engine) -> list[tuple[int, str]]:
    """(rank, layer) of every pair, in the order of the bits of :attr:`LoadOf.lost`."""
    return [(worker.rank, layer) for worker in engine.workers for layer in worker.kv_layers]


def _pairs_of(engine: Engine, rows: Sequence[LoadOf], ends: Collection[LoadEnd]) -> list[tuple[int, str]]:
    """Those in which tokens of these loads ended so."""
    mask = 0
    for parts, of in (one for row in rows for one in row.lost.items()):
        mask |= of if any(end in ends for _, _, end in parts) else 0
    return [pair for at, pair in enumerate(_pairs(engine)) if mask >> at & 1]


def _missing_in(case: Case, rows: Sequence[LoadOf], cause: Cause) -> tuple[set[int], str]:
    """The ranks and how many of the layers that a cause took tokens of, where not all, and the others are
    known to have got theirs: else none, and ""."""
    engine = case.engines[rows[0].engine]
    hit, unknown = (_pairs_of(engine, rows, ends) for ends in (cause.load_ends, (LoadEnd.NOT_OBSERVED,)))
    if (
        not set(unknown) <= set(hit)
        or not hit
        or len({row.engine for row in rows}) > 1
        or windows(case, rows)
    ):
        return set(), ""
    ranks, layers = {rank for rank, _ in hit}, {layer for _, layer in hit}
    every = _pairs(engine)
    of_ranks, of_layers = {rank for rank, _ in every}, {layer for _, layer in every}
    some = of_all(len(layers), len(of_layers), "layer") if layers < of_layers else ""
    return (ranks if ranks < of_ranks else set()), some


def what_fails(case: Case, rows: list[LoadOf]) -> unlike.Apart:
    """What tells these loads from those that came whole."""
    mine = frozenset(row.request for row in rows)
    return case.once(("came apart", mine), lambda: _what_fails(case, mine))


def _what_fails(case: Case, mine: frozenset[int]) -> unlike.Apart:
    rows = accepted(case)
    others = [row for row in rows if row.request not in mine and came(case, row)]
    if any(row.ends.get(end) for row in rows if row.request in mine for end in _OTHER_KV):
        others = [row for row in others if row.proved]  # what was compared with nothing may be wrong as well
    return unlike.told_apart(case, mine, [row.request for row in others], unlike.CAME)


_OTHER_KV = (LoadEnd.WRONG, LoadEnd.ALTERED)


def part_of_loads(rows: Sequence[LoadOf], cause: Cause) -> list[str]:
    """Which part of each load a cause took, where it is the same of all, in whichever layer."""
    lost = (
        [(start, end) for parts in row.lost for start, end, how in parts if how in cause.load_ends]
        for row in rows
    )
    return part_of_each(zip(lost, (row.positions for row in rows), strict=True), LOADS)


def reasons_and_places(case: Case, rows: list[LoadOf], cause: Cause) -> list[str]:
    """:func:`what_fails`, which part of each, then :func:`reasons`, and then in which pairs:
    ``in 8 layers on rank 0, 1``."""
    places = {place for row in rows for place in places_of(row, cause)}
    found = [*what_fails(case, rows).values(), *part_of_loads(rows, cause), *reasons(rows, cause)]
    if places:
        layers = len({layer for _, layer in places})
        ranks = listed(map(str, sorted({rank for rank, _ in places})))
        found.append(f"in {plural(layers, 'layer')} on rank {ranks}")
    return found
