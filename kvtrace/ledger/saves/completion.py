"""Asynchronous saves: which began, and which never came back.

``OPEN`` says that a finished request's blocks are kept for a transfer, ``DONE`` that a worker, or
the scheduler, heard of its end. A save is called unfinished only where the engine went on long
enough to have heard of it; what the end of the trace cuts off is pending.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtrace.grouped import grouped
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.loads.asynchronous import ASKED
from kvtrace.ledger.requests import Request, Transfer
from kvtrace.ledger.run import AsyncSave, Engine, Worker
from kvtrace.ledger.saves.watched import Watched

OVERTAKEN = 3
"""So many saves that began later and are done: this one will not come any more."""
LONG_NS = 60 * 10**9
AFTER_NS = 2 * 10**8
"""So long, and once more as long as the longest copy took, an engine may take to hear of a copy's end: it
hears of it in a later step that asks, and the last bytes may come to rest after what was seen of the copy."""
PARTLY_NS = 5 * 10**9
"""As long after some ranks were done, the others will not follow."""
SHORT_NS, _TIMES = 5 * 10**8, 10
"""So long, and so many times as long as the longest save of its engine took: by then one that is on its way
has begun to read."""


@dataclass(frozen=True)
class _Save:
    """One request's save, with the reports of its end."""

    row: int
    engine: int
    opened: int
    reports: tuple[Transfer, ...]

    @property
    def done(self) -> int:
        """When the scheduler last heard of its end, 0 never."""
        return max((report.t for report in self.reports if not report.spool), default=0)

    @property
    def ranks(self) -> dict[str, int]:
        """Worker's spool -> when it last reported the end."""
        found: dict[str, int] = {}
        for report in self.reports:
            if report.spool:
                found[report.spool] = max(report.t, found.get(report.spool, report.t))
        return found

    @property
    def failed(self) -> set[str]:
        """Spools of the workers that called it failed, "" for the scheduler's word."""
        return {report.spool for report in self.reports if report.failed}


def settle(
    requests: Sequence[Request],
    engines: Sequence[Engine],
    watched: Mapping[tuple[int, str], Watched],
) -> list[AsyncSave]:
    """All asynchronous saves, in the order in which they began.

    Args:
        watched: what was seen of each worker, by Worker.key.
    """
    saves = [save for row, request in enumerate(requests) if (save := _save(row, request)) is not None]
    saves.sort(key=lambda save: save.opened)
    ends: dict[int, int] = defaultdict(int, {engine.tag: engine.t_last for engine in engines})
    finished: dict[int, list[int]] = defaultdict(list)  # engine -> begin of the saves that are done
    for save in saves:
        ends[save.engine] = max(ends[save.engine], save.opened, save.done, *save.ranks.values(), 0)
        if save.done:
            finished[save.engine].append(save.opened)
    workers = {engine.tag: engine.workers for engine in engines}
    untold, early = _untold(saves, workers, watched), _told_early(saves, workers, watched)
    mute = {engine.tag for engine in engines if engine.mute}
    untold |= {save.row for save in saves if save.engine in mute}
    found = [
        _ended(save, workers.get(save.engine, ()), ends[save.engine], finished[save.engine], untold)
        for save in saves
    ]
    idle = _idle(saves, workers, watched)
    return [replace(one, early=one.request in early, idle=one.request in idle) for one in found]


def _told_early(
    saves: Sequence[_Save],
    workers: Mapping[int, Sequence[Worker]],
    watched: Mapping[tuple[int, str], Watched],
) -> set[int]:
    """Rows of the requests whose end a worker told before it read any of them, or that it read once their
    blocks were another's. What it read of several at once may be another's, with the same blocks."""
    found: set[int] = set()
    for engine, own in grouped(saves, lambda save: save.engine):
        for worker in workers.get(engine, ()):
            slots = watched[worker.key].slots
            times = Counter(touch.t for touches in slots.reads.values() for touch in touches)
            for save in own:
                told = save.ranks.get(worker.spool, 0)
                read = [touch.t for touch in slots.reads.get(save.row, ())]
                after = bool(read) and min(read) > told and all(times[t] == 1 for t in read)
                if told and (after or save.row in slots.late):
                    found.add(save.row)
    return found


def _untold(
    saves: Sequence[_Save],
    workers: Mapping[int, Sequence[Worker]],
    watched: Mapping[tuple[int, str], Watched],
) -> set[int]:
    """Rows of the requests whose KV was copied long ago: longer than any save of that engine took, its steps
    asked again and again since. Where it heard of ends, twice as long: they do not all take the same time."""
    found: set[int] = set()
    for engine, own in grouped(saves, lambda save: save.engine):
        ranks = workers.get(engine, ())
        copied: dict[int, int] = {}  # row -> when the copy was over
        longest = 0
        for save in own:
            seen = [watched[one.key].slots.reads.get(save.row, ()) for one in ranks]
            last = [max(touch.t for touch in touches) for touches in seen if touches]
            over = max(last) if last and len(last) == len(seen) else 0
            longest = max(longest, max(over, save.done) - save.opened)
            if over and not save.done and not save.ranks:
                copied[save.row] = max(save.opened, over)
        patience = longest * (2 if any(save.done for save in own) else 1) + AFTER_NS
        steps = [watched[one.key].ran.began_t for one in ranks]
        for row, over in copied.items():
            if all(int((begun > over + patience).sum()) >= ASKED for begun in steps):
                found.add(row)
    return found


def _idle(
    saves: Sequence[_Save],
    workers: Mapping[int, Sequence[Worker]],
    watched: Mapping[tuple[int, str], Watched],
) -> set[int]:
    """Rows of the requests of which nothing was read and no end told, much longer after they began than any
    save of that engine took; its steps asked again and again since."""
    found: set[int] = set()
    for engine, own in grouped(saves, lambda save: save.engine):
        ranks = [watched[worker.key] for worker in workers.get(engine, ())]
        longest = max((save.done - save.opened for save in own if save.done), default=0)
        patience = max(SHORT_NS, _TIMES * longest) if longest else PARTLY_NS
        for save in own:
            told = save.done or save.ranks or any(one.slots.reads.get(save.row) for one in ranks)
            since = [int((one.ran.began_t > save.opened + patience).sum()) for one in ranks]
            if not told and min(since, default=0) >= ASKED:
                found.add(save.row)
    return found


def _save(row: int, request: Request) -> _Save | None:
    begun = [transfer for transfer in request.transfers if transfer.store and transfer.begun]
    if not begun:
        return None
    reports = tuple(transfer for transfer in request.transfers if transfer.store and not transfer.begun)
    return _Save(row, request.engine, begun[0].t, reports)


def _ended(
    save: _Save, workers: Sequence[Worker], now: int, finished: Sequence[int], untold: Collection[int]
) -> AsyncSave:
    """How a save ended.

    Args:
        now: the last that was seen of its engine.
        finished: when the saves began that are done.
        untold: rows of the requests whose copies were over long before the trace ends, or of which nobody can
            tell an end.
    """
    ranks = save.ranks
    reported = tuple(worker.rank for worker in workers if worker.spool in ranks)
    absent = [worker for worker in workers if worker.spool not in ranks]
    missing = tuple(worker.rank for worker in absent)
    if save.done or save.failed:
        end = SaveEnd.FAILED if save.failed else SaveEnd.SAVED
        failed = dict.fromkeys(save.failed, SaveEnd.FAILED)
        told = max(save.done, *ranks.values(), 0)
        return AsyncSave(save.row, end, reported, () if save.done else missing, failed, told=told)
    overdue = sum(opened > save.opened for opened in finished) >= OVERTAKEN
    overdue = overdue or now - save.opened >= LONG_NS or save.row in untold
    overdue = overdue or (bool(ranks) and now - max(ranks.values()) >= PARTLY_NS)
    end = SaveEnd.NOT_FINISHED if overdue else SaveEnd.PENDING
    unfinished = [worker.spool for worker in absent] if ranks else [""]
    return AsyncSave(save.row, end, reported, missing, dict.fromkeys(unfinished, end))
