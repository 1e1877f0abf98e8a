"""Asynchronous saves: which began, and which never came back.

``OPEN`` says that a finished request's blocks are kept for a transfer, ``DONE`` that a worker, or
the scheduler, heard of its end. A save is called unfinished only where the engine went on long
enough to have heard of it; what the end of the trace cuts off is pending.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field

from kvtrace.ledger.model import AsyncSave, Engine
from kvtrace.ledger.requests import Request
from kvtrace.ledger.scan import SpoolScan
from kvtrace.trace.format import STEP_SHIFT, Flag, Kind, Role

NEVER, PENDING, LOST = "never", "pending", "lost"

OVERTAKEN = 3
"""So many saves that began later and are done: this one will not come any more."""
LONG_NS = 60 * 10**9
PARTLY_NS = 5 * 10**9
"""As long after some ranks were done, the others will not follow."""


@dataclass
class _Save:
    opened: int
    done: int = 0  # time at which the scheduler heard of it
    ranks: dict[str, int] = field(default_factory=dict)  # worker's spool -> time
    failed: set[str] = field(default_factory=set)  # worker's spool, "" the scheduler's word


def settle(requests: list[Request], engines: list[Engine], scans: list[SpoolScan]) -> list[AsyncSave]:
    """All asynchronous saves; ``Request.saves`` is filled where one did not end well."""
    by_id: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_id[request.id].append(request)
    saves = _read(scans, by_id)
    if not saves:
        return []
    end: dict[int, int] = defaultdict(int)
    for engine in engines:
        end[engine.tag] = engine.t_last
    for request, save in saves:
        end[request.engine] = max(end[request.engine], save.opened, save.done, *save.ranks.values(), 0)
    finished: dict[int, list[int]] = defaultdict(list)  # engine -> begin of the saves that are done
    for request, save in saves:
        if save.done:
            insort(finished[request.engine], save.opened)
    workers = {engine.tag: engine.workers for engine in engines}
    rows = {id(request): row for row, request in enumerate(requests)}
    result: list[AsyncSave] = []
    for request, save in saves:
        mine = workers.get(request.engine, [])
        reported = tuple(worker.rank for worker in mine if worker.spool in save.ranks)
        absent = tuple(worker.rank for worker in mine if worker.spool not in save.ranks)
        row = rows[id(request)]
        ended = LOST if save.failed else "done"
        for spool in save.failed:
            request.saves[spool] = LOST
        if save.done or save.failed:
            result.append(AsyncSave(row, ended, save.opened, reported, () if save.done else absent))
            continue
        later = sum(opened > save.opened for opened in finished[request.engine])
        now = end[request.engine]
        overdue = later >= OVERTAKEN or now - save.opened >= LONG_NS
        if save.ranks:
            overdue = overdue or now - max(save.ranks.values()) >= PARTLY_NS
        state = NEVER if overdue else PENDING
        result.append(AsyncSave(row, state, save.opened, reported, absent))
        if save.ranks:
            for worker in mine:
                if worker.spool not in save.ranks:
                    request.saves[worker.spool] = state
        else:
            request.saves[""] = state
    return result


def _read(scans: list[SpoolScan], by_id: dict[str, list[Request]]) -> list[tuple[Request, _Save]]:
    found: dict[int, tuple[Request, _Save]] = {}
    done: list[tuple[Request, int, bool, str]] = []  # request, time, failed, worker's spool or ""

    def owner(name: str, step: int, t: int) -> Request | None:
        mine = [r for r in by_id.get(name, ()) if not step >> STEP_SHIFT or r.engine == step >> STEP_SHIFT]
        before = [r for r in mine if r.t_first <= t]
        return before[-1] if before else (mine[0] if mine else None)

    for scan in scans:
        kinds = scan.rows[:, 0] & 0xFF
        for w0, t, req, step, failed, *_ in scan.rows[(kinds == Kind.OPEN) | (kinds == Kind.DONE)].tolist():
            if not (w0 >> 32) & Flag.STORE:
                continue
            request = owner(scan.names.get(req, ""), step, t)
            if request is None:
                continue
            if w0 & 0xFF == Kind.OPEN:
                found.setdefault(id(request), (request, _Save(t)))
            else:
                spool = scan.path.name if (w0 >> 8) & 0xFF == Role.WORKER else ""
                done.append((request, t, failed > 0, spool))
    for request, t, failed, spool in done:
        pair = found.get(id(request))
        if pair is None:
            continue
        save = pair[1]
        if failed:
            save.failed.add(spool)
        if spool:
            save.ranks[spool] = max(t, save.ranks.get(spool, t))
        else:
            save.done = max(t, save.done)
    return list(found.values())
