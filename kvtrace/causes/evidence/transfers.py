"""Between a prefill and a decode engine a request says itself whether its KV is to go from one to the other:
in its ``kv_transfer_params``. One that came past the proxy says nothing, and nothing is done for it."""

from __future__ import annotations

from collections.abc import Collection

from kvtrace.causes.rule import Case
from kvtrace.ledger.run import Engine
from kvtrace.words import count

_TAKERS = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
)
"""vLLM's connectors that serve such requests alone (0.32.0: nixl/base_scheduler.py,
mooncake/mooncake_connector.py, moriio/moriio_connector.py)."""
REMEDY = (
    "Send these requests through the proxy of the prefill and the decode engine: it sets do_remote_decode in "
    "the kv_transfer_params of the one that saves, and do_remote_prefill in those of the one that loads."
)


def not_asked(case: Case, engine: Engine, left_out: Collection[str], served: Collection[str] = ()) -> str:
    """What shows that requests (their ids) were left out because they ask for no transfer; "" where nothing
    does. ``served``: the others."""
    asking = case.run.asking
    cls = engine.connector.cls if engine.connector else ""
    ordered = asking.issuperset(served) if served else cls in _TAKERS
    if not left_out or not ordered or not asking.isdisjoint(left_out):
        return ""
    others = f"; those that were served ({count(len(served))}) do" if served else ""
    return (
        "none of these requests asks for a transfer: their kv_transfer_params set neither do_remote_decode "
        f"nor do_remote_prefill{others}"
    )
