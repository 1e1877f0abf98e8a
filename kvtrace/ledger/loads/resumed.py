"""Loads of requests that were preempted and let in anew. The ledger of loads counts a prompt once, by its
first admission: what a later one was to bring, and did not, stands beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.loads.accepted import Accepted, with_connector
from kvtrace.ledger.loads.book import gather
from kvtrace.ledger.loads.decide import LoadContents, judge
from kvtrace.ledger.loads.outcome import AskedLoad, LostResumed
from kvtrace.ledger.loads.seen import Failed, LoadsSeen
from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Engine
from kvtrace.ledger.values import replace

_NEVER_CAME = (LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY)


def ask_resumed(requests: Sequence[Request], engines: Sequence[Engine]) -> list[Accepted]:
    """The loads of later admissions, of engines with a connector: each of its request from then on."""
    tags = with_connector(engines).keys()
    return [
        one
        for row, request in enumerate(requests)
        if request.preemptions and request.engine in tags
        for one in _of_request(row, request)
    ]


def _of_request(row: int, request: Request) -> Iterator[Accepted]:
    counted = request.looked_up
    for one in request.lookups:
        chunk = next((chunk for chunk in request.chunks if chunk.step >= one.step), None)
        if counted is None or one.t <= counted.t or chunk is None:
            continue
        taken = min(one.accepted or 0, chunk.start - one.local)
        if taken > 0:
            asked = AskedLoad(
                row, request.id, request.engine, one.local + taken, one.step, one.local, one.answer, taken,
                one.asynchronous,
            )  # fmt: skip
            chunks = tuple(chunk for chunk in request.chunks if chunk.step >= one.step)
            yield Accepted(asked, replace(request, lookups=(one,), chunks=chunks))


def follow_resumed(
    accepted: Sequence[Accepted], engines: Sequence[Engine], seen: LoadsSeen
) -> list[LostResumed]:
    """What of these loads was seen not to be written, but for steps in which blocks were reported as failed:
    vLLM computes those anew."""
    reported = {report.step for reports in seen.found.errors.values() for report in reports}
    by_tag = with_connector(engines)
    found = []
    for one in accepted:
        asked, engine = one.asked, by_tag[one.asked.engine]
        gathered = gather(one, engine, seen, Failed())
        if asked.step in reported or not gathered.measured:
            continue
        arrived = judge(asked.positions, gathered, LoadContents(), engine)
        ends = Counter[LoadEnd]()
        for parts, pairs in arrived.lost.items():
            for start, stop, end in parts:
                ends[end] += (stop - start) * pairs.bit_count() if end in _NEVER_CAME else 0
        if +ends:
            found.append(
                LostResumed(asked.request, asked.engine, asked.step, asked.accepted, +ends, arrived.reasons)
            )
    return found
