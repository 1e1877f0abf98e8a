"""The ledger of loads: from the connector's answer to what the scheduler took.

Total: the prompt tokens that were not in the GPU's own prefix cache, of every request of an
engine with a connector, times lanes. ``loaded``: taken from the connector; ``clamped``:
offered, not taken; ``missed``: not offered, or never asked for.
"""

from __future__ import annotations

from collections import Counter

from kvtrace.ledger.model import CLAMPED, LOADED, MISSED, PENDING, Book, Engine
from kvtrace.ledger.requests import Request

TRUST_NOTE = (
    "declared: what the scheduler accepted from the connector; the slots really written were not measured"
)


def book(requests: list[Request], engines: list[Engine]) -> Book:
    """The loads of a run; raises AssertionError where the books do not balance."""
    with_connector = {
        engine.tag: engine for engine in engines if engine.connector is not None and engine.lanes > 0
    }
    accounts: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    total = 0
    for request in requests:
        engine = with_connector.get(request.engine)
        if engine is None:
            continue
        for account, amount in _request(request).items():
            if amount:
                accounts[account] += amount * engine.lanes
                tokens[account] += amount
                total += amount * engine.lanes
    lanes = {engine.lanes for engine in with_connector.values()}
    result = Book(
        total=total,
        accounts=dict(accounts),
        lanes=lanes.pop() if len(lanes) == 1 else None,
        tokens={name: float(n) for name, n in tokens.items()},
        total_tokens=float(sum(tokens.values())),
        trust="declared" if total else "none",
        trust_note=TRUST_NOTE if total else "",
    )
    result.check()
    return result


def _request(request: Request) -> dict[str, int]:
    """Prompt tokens of one request by account; they sum to prompt - local."""
    lookup = request.looked_up
    if lookup is None:
        if request.lookups:  # asked, and told to wait, until the trace or the request ended
            return {PENDING: max(0, request.prompt - request.lookups[-1].local)}
        local = request.chunks[0].start if request.chunks else 0
        return {f"{MISSED}never-looked-up": max(0, request.prompt - local)}
    asked = max(0, request.prompt - lookup.local)
    offered = min(asked, max(0, lookup.answer or 0))
    taken = 0
    if request.external:
        start, end = request.external[0]
        taken = max(0, min(end, request.prompt) - max(start, lookup.local))
    elif lookup.accepted and not request.chunks:
        # Accepted, and still on its way when the trace ends.
        return {PENDING: min(offered, lookup.accepted),
                f"{CLAMPED}lookup-clamped": offered - min(offered, lookup.accepted),
                f"{MISSED}lookup-miss": asked - offered}  # fmt: skip
    taken = min(taken, offered)
    return {
        LOADED: taken,
        f"{CLAMPED}lookup-clamped": offered - taken,
        f"{MISSED}lookup-miss": asked - offered,
    }
