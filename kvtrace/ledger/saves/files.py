"""KV whose files are written again: by another rank or prompt, and it is gone; by the same tokens, and it is
there."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvtrace.ledger.beginnings import beginnings
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import subtract
from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Trust
from kvtrace.ledger.saves.calls import At, Call, WorkerCalls
from kvtrace.ledger.saves.measured import WHOLE, Cell
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.slots.accounts import Account
from kvtrace.ledger.slots.reads import Touch, covered


def rewritten(
    reads: Mapping[int, Sequence[Touch]], requests: Mapping[int, Request]
) -> Iterator[tuple[int, Touch]]:
    """(row of a request, touch) of all that was read of them, with what became of what was written over: it
    is there where the same tokens, read for another request, are. It is gone where all its files hold prompts
    that do not even share its first block: those that were saved next had the same key if older KV stays; a
    store that drops what is oldest, and uses its place again, would have dropped that first."""
    later: dict[int, list[tuple[int, Touch]]] = defaultdict(list)
    every = [(row, touch) for row, touches in reads.items() for touch in touches]
    if not any(touch.over for _, touch in every):
        yield from every
        return
    stays = [touch.step for _, touch in every if touch.account == Account.WRITTEN and not touch.over]
    oldest = min(stays, default=sys.maxsize)
    following, now = 0, 0  # the step with reads that came next, and this one
    for row, touch in sorted(every, key=lambda one: one[1].step, reverse=True):
        if touch.step != now:
            following, now = now, touch.step
        if touch.over:
            over = [(one, other) for one, other in later[touch.over] if not touch.columns & ~other.columns]
            alike = [other for one, other in over if _alike(requests[row], requests[one], touch)]
            there = [other for other in alike if other.account == Account.WRITTEN]
            account = Account.WRITTEN_OVER
            if not subtract(list(touch.positions), covered(there)):
                account = Account.WRITTEN
            elif touch.account == Account.OVERWRITTEN and all(
                _apart(requests[row], requests[one]) for one, _ in over
            ):
                one_key = touch.over == following and oldest < touch.step
                account = Account.OVERWRITTEN if one_key else Account.LOST_LATER
            touch = replace(touch, account=account if over else Account.WRITTEN_OVER)
        later[touch.step].append((row, touch))
        yield row, touch


def _alike(one: Request, other: Request, touch: Touch) -> bool:
    """Whether two prompts begin with the same tokens, as far as a touch of one of them goes."""
    theirs = beginnings(other)
    common = (tokens for digest, tokens in beginnings(one).items() if theirs.get(digest) == tokens)
    return max(common, default=0) >= max((end for _, end in touch.positions), default=0)


def _apart(one: Request, other: Request) -> bool:
    """Whether two prompts differ in their first block already: known where both have digests of it."""
    firsts = [min(prompt.prefixes.values(), default=0) for prompt in (one, other)]
    return firsts[0] == firsts[1] > 0 and not one.prefixes.keys() & other.prefixes.keys()


def overwritten_by_rank(
    workers: Sequence[WorkerCalls], calls: Sequence[Mapping[At, Call]]
) -> tuple[set[tuple[int, At]], Trust]:
    """Ranks that write one file for the same layer in the same step: the last one's KV stays.

    Args:
        calls: of each worker.

    Returns:
        (worker's index, call) of those whose files did not stay.
    """
    trust, found, apart = Trust(), set[tuple[int, At]](), 0
    if len(workers) < 2:
        return found, trust
    common = [_common(one.watched) for one in workers]
    for row, step in enumerate(workers[0].stores.steps.tolist()):
        writers: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
        """(file, layer) -> (time, worker, column) of those that wrote it."""
        for index, one in enumerate(workers):
            cells = one.watched.table.steps.get(step, {})
            # a hook of the whole step writes for all layers that it read
            whole = {} if one.watched.worker.saves_per_layer else _latest(cells.values())
            for column, cell in cells.items():
                if column != WHOLE and calls[index][row, column].end[0] == SaveEnd.SAVED:
                    layer = one.watched.worker.kv_layers[column]
                    targets = whole or cell.targets
                    for target in targets.keys() - common[index]:
                        writers[target, layer].append((targets[target], index, column))
        for (_, layer), wrote in writers.items():
            ranks = tuple(sorted({workers[index].watched.worker.rank for _, index, _ in wrote}))
            if len({index for _, index, _ in wrote}) < 2:
                apart += 1
                continue
            trust += Trust(shared=((step, layer, ranks),), shared_files=1)
            for _, index, column in sorted(wrote)[:-1]:
                found.add((index, (row, column)))
    return found, trust + Trust(files_apart=apart)


def _latest(cells: Iterable[Cell]) -> dict[int, int]:
    """The files of several cells -> when each was written last."""
    found: dict[int, int] = {}
    for target, t in (one for cell in cells for one in cell.targets.items()):
        found[target] = max(t, found.get(target, t))
    return found


def _common(watched: Watched) -> set[int]:
    """Files that one rank writes for several layers (an index, a container): no layer's own. Or in several
    steps, where it writes for all layers at once."""
    uses: dict[int, set[int]] = defaultdict(set)
    for step, cells in watched.table.steps.items():
        for column, cell in cells.items():
            for target in cell.targets:
                uses[target].add(column if watched.worker.saves_per_layer else step)
    return {target for target, several in uses.items() if len(several) > 1}
