"""What a request hands over from one engine to another, or tells a connector: its ``kv_transfer_params``.

A prefill engine returns them with its answer, a proxy puts them into the request to the decode engine. Ids
and flags alone are kept: no address, no block numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from kvtrace.agent.state import AGENT
from kvtrace.trace.facts import HandOverFact
from kvtrace.trace.format import Role

_ID = re.compile(r"(?:^|_)(?:req|request|transfer|xfer|engine)_?id$")
_VLLM_S = re.compile(r"(?:chat)?cmpl-[0-9a-f-]{8,}\Z")
"""An id of a request as vLLM's server makes it, whatever its key is called."""
_ASKS = ("do_remote_prefill", "do_remote_decode")
_MOST_IDS = 16
_MOST_FLAGS = 8
_LONGEST = 200
_DEEPEST = 2


def record(req_id: str, params: Any, returned: bool = False) -> None:
    """Write the ids that a request brings, or that the connector returned when it had finished."""
    if not isinstance(params, dict) or not params:
        return
    ids = dict(islice(_ids(params), _MOST_IDS))
    asks = tuple(name for name in _ASKS if params.get(name) is True)
    told = ((key, value) for key, value in _entries(params) if type(value) is bool and key not in _ASKS)
    flags = {} if returned else dict(islice(told, _MOST_FLAGS))
    if ids or asks or flags:
        AGENT.fact(HandOverFact(req_id, returned, ids, asks, flags), Role.SCHEDULER, flush=False)


def _entries(params: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Those with a text as their key, cut to its length."""
    return ((key[:_LONGEST], value) for key, value in list(params.items())[:200] if isinstance(key, str))


def _ids(params: dict[Any, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """(path of the key, id) of what names a request, a transfer or an engine."""
    for key, value in _entries(params):
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from _ids(value, f"{path}{key}.", depth + 1)
        elif type(value) in (str, int) and len(text := str(value)) <= _LONGEST and _is_id(key, text):
            yield f"{path}{key}", text


def _is_id(key: str, text: str) -> bool:
    return bool(text and (_ID.search(key) or _VLLM_S.match(text)))
