"""What a run directory says of the requests that verify made: the ledger's books, request by request."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtrace.grouped import grouped
from kvtrace.ledger.ends import LoadEnd, SaveEnd
from kvtrace.ledger.loads.outcome import LoadOf, LostResumed
from kvtrace.ledger.read import read_run
from kvtrace.ledger.run import Engine, Run
from kvtrace.terms import NOT_OBSERVED
from kvtrace.trace import hooks
from kvtrace.trace.facts import LoadErrorsFact
from kvtrace.trace.format import SPOOL_DIR
from kvtrace.trace.reader import Spool, SpoolError, of_type, spool_paths

IDENT = "kvverify"
_NUMBER = re.compile(rf"{IDENT}-(\d+)(?!\d)")


@dataclass(frozen=True)
class LayerError:
    """Of one layer: how far blocks are from those that the same tokens computed to."""

    largest: float
    mean: float


@dataclass(frozen=True)
class RequestSeen:
    """One request as its engine's spools tell it. Counts are tokens, unless they say token-layers.

    Attributes:
        local: in the engine's own prefix cache; offered: by the connector (None: not asked, or never said);
            accepted: of these, by the scheduler, at first or as it was let in anew.
        ends: token-layers of what was accepted, by how they ended; once more of what a preempted request was
            to load anew, and did not.
        proved: token-layers that came back as they were computed.
        reasons: what was seen of those that did not, by their end.
        saved: token-layers that the connector stored, those included that it removed since; in_hand: that it
            lost after it had them in hand; unseen: of the prompt, of which neither is known.
        errors: of loaded blocks; noise: of blocks that the engine computed twice; by layer.
        compared, differing: loaded blocks that were compared number by number, and those not the same.
        beginnings: digests of those of its beginnings that another request has, too -> their tokens; images
            count as such. There is one for each block.
    """

    id: str
    prompt: int
    local: int
    offered: int | None
    accepted: int
    asynchronous: bool
    pairs: int
    ends: Mapping[LoadEnd, int]
    proved: int
    reasons: Mapping[LoadEnd, tuple[str, ...]]
    saved: int
    preemptions: int
    status: str
    errors: Mapping[str, LayerError] = field(default_factory=dict)
    noise: Mapping[str, LayerError] = field(default_factory=dict)
    compared: int = 0
    differing: int = 0
    in_hand: int = 0
    unseen: int = 0
    beginnings: Mapping[int, int] = field(default_factory=dict)

    @property
    def taken(self) -> int:
        """Tokens that it took, in every layer, whatever became of them since."""
        return (self.saved + self.in_hand) // max(1, self.pairs)

    def lost(self, *ends: LoadEnd) -> int:
        """Token-layers that ended in one of these ways."""
        return sum(self.ends.get(end, 0) for end in ends)


@dataclass(frozen=True)
class Evidence:
    """Of one or more runs that are read as one. ``engine``: the one that has the connector."""

    engine: Engine | None
    seen: Mapping[int, Sequence[RequestSeen]]
    """Number of a request -> as each engine saw it (of a prefill and a decode server two)."""
    run: Run | None = None
    hook_shares: Mapping[str, float] = field(default_factory=dict)
    """Hook -> the part that it takes of a worker's steps, by their time."""

    def of(self, number: int) -> RequestSeen | None:
        """As the engine saw it that answered it, the last one; saved by any of them."""
        found = self.seen.get(number)
        if not found:
            return None
        saved, in_hand = sum(one.saved for one in found), sum(one.in_hand for one in found)
        return replace(found[-1], saved=saved, in_hand=in_hand)

    @property
    def pair(self) -> bool:
        """Whether one engine saves and another one loads."""
        engines = self.run.engines if self.run is not None else ()
        return {"kv_producer", "kv_consumer"} <= {engine.role for engine in engines}


def read(directories: Sequence[Path]) -> Evidence:
    """What is there now; the runs may still go on.

    Raises:
        RunError: nothing can be read.
    """
    if len(directories) == 1:
        return _read(directories[0])
    with tempfile.TemporaryDirectory(prefix="kvtrace-verify-", dir=directories[0].parent) as folder:
        spools = Path(folder) / SPOOL_DIR
        spools.mkdir(mode=0o700)
        for directory in directories:
            for path in spool_paths(directory):
                with suppress(FileExistsError):
                    os.link(path, spools / path.name)
        return _read(Path(folder))


def _read(directory: Path) -> Evidence:
    run = read_run(directory)
    errors = _errors(directory)
    loads = {load.request: load for load in run.load_rows}
    resumed = dict(grouped(run.lost_resumed, lambda one: one.request))
    in_hand, gone = _ended(run, _IN_HAND), _ended(run, (SaveEnd.LOST_LATER,))
    unseen: Counter[int] = Counter()
    for amount in run.base:
        if amount.outcome == NOT_OBSERVED:
            unseen[amount.request] += amount.prompt
    seen: dict[int, list[RequestSeen]] = defaultdict(list)
    by_tag = {engine.tag: engine for engine in run.engines}
    producers = {engine.tag for engine in run.engines if engine.role == "kv_producer"}
    for row, one in sorted(enumerate(run.requests), key=lambda at: at[1].engine not in producers):
        number = _NUMBER.search(one.client) or _NUMBER.search(one.id)
        load = loads.get(row)
        if number is None:
            continue
        ends, reasons = _ends_of(load, *resumed.get(row, ()))
        of_blocks = errors.get(one.id, ())
        engine = by_tag.get(one.engine)
        seen[int(number[1])].append(
            RequestSeen(
                one.id, one.prompt,
                load.local if load else 0,
                load.answer if load else None,
                max([load.accepted if load else 0, *(again.tokens for again in resumed.get(row, ()))]),
                load.asynchronous if load else False,
                engine.pairs if engine else 0,
                ends,
                load.proved if load else 0,
                reasons,
                one.saved + gone[row], one.preemptions, one.status,
                _by_layer([fact for fact in of_blocks if fact.loaded]),
                _by_layer([fact for fact in of_blocks if not fact.loaded]),
                sum(len(fact.places) for fact in of_blocks if fact.loaded),
                sum(fact.differing for fact in of_blocks if fact.loaded),
                in_hand[row],
                unseen.get(row, 0),
                dict(run.in_common.get(row, ())),
            )
        )  # fmt: skip
    with_connector = [engine for engine in run.engines if engine.configured is not None]
    engines = with_connector or list(run.engines)
    engines.sort(key=lambda engine: engine.role != "kv_producer")
    return Evidence(engines[-1] if engines else None, dict(seen), run, _hook_shares(run))


def _ends_of(
    *loads: LoadOf | LostResumed | None,
) -> tuple[dict[LoadEnd, int], dict[LoadEnd, tuple[str, ...]]]:
    """The ends of a request's loads together, and what was seen of them."""
    ends, reasons = Counter[LoadEnd](), dict[LoadEnd, tuple[str, ...]]()
    for one in loads:
        if one is not None:
            ends.update(one.ends)
            reasons |= one.reasons
    return dict(ends), reasons


def _hook_shares(run: Run) -> dict[str, float]:
    """Of the worker that each hook takes most of, on the host's clock."""
    found: dict[str, float] = {}
    for worker in run.workers():
        for name, spent in worker.hook_ns.items():
            if hooks.BY_NAME[name].in_step and worker.exec_ns:
                found[name] = max(found.get(name, 0.0), spent / worker.exec_ns)
    return found


_IN_HAND = (
    SaveEnd.RAISED, SaveEnd.CAUGHT, SaveEnd.OVERWRITTEN, SaveEnd.OVERWRITTEN_BY_RANK, SaveEnd.FAILED,
    SaveEnd.NOT_FINISHED, SaveEnd.STALE, SaveEnd.MISPLACED, SaveEnd.READ_LATE, SaveEnd.PUT_FAILED,
    SaveEnd.NOT_AT_REST,
)  # fmt: skip
"""Of what the connector had in hand, and never stored."""


def _ended(run: Run, ends: Sequence[SaveEnd]) -> Mapping[int, int]:
    """Row of a request -> token-layers of its prompt that ended in one of these ways."""
    found: dict[int, int] = defaultdict(int)
    for one in run.lost:
        if one.ended in ends and one.phase == "prefill":
            found[one.request] += (one.end - one.start) * one.pairs
    return found


def _errors(directory: Path) -> dict[str, list[LoadErrorsFact]]:
    found: dict[str, list[LoadErrorsFact]] = defaultdict(list)
    for path in spool_paths(directory):
        with suppress(SpoolError):
            spool = Spool(path)
            for _ in spool.chunks():
                pass  # its facts come as it is read
            for _, fact in of_type(LoadErrorsFact, spool.documents()):
                found[fact.request].append(fact)
    return found


def _by_layer(facts: Sequence[LoadErrorsFact]) -> dict[str, LayerError]:
    largest: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    blocks: dict[str, int] = defaultdict(int)
    for fact in facts:
        for layer, most, mean in zip(fact.layers, fact.largest, fact.mean, strict=False):
            largest[layer] = max(largest[layer], most)
            total[layer] += mean * len(fact.places)
            blocks[layer] += len(fact.places)
    return {layer: LayerError(largest[layer], total[layer] / max(1, blocks[layer])) for layer in largest}


def bad_saves(run: Run) -> list[tuple[str, str]]:
    """Requests whose asynchronous save did not end well, or was told to be over before it was read; and
    which of these."""
    bad = (SaveEnd.NOT_FINISHED, SaveEnd.FAILED)
    said = {one.request: one.end.name.lower().replace("_", " ") for one in run.async_saves if one.end in bad}
    said |= {one.request: "told to be over before they were read" for one in run.async_saves if one.early}
    return [(run.requests[row].id, words) for row, words in said.items()]
