"""Targets under two ids: one place in vLLM that newer versions have in another module.

The agent has a row for each (``kvtrace/agent/targets.py``); where one of the two is found, the other is not
missed.
"""

from __future__ import annotations

# newer -> older
MOVED: dict[str, str] = {
    "attention-decorator": "attention-decorator-old",
    "attention-direct-call": "attention-direct-call-old",
}
_OTHER = {**MOVED, **{older: newer for newer, older in MOVED.items()}}


def other_id(target: str) -> str | None:
    """The id of the same place in the other versions of vLLM; None where it never moved."""
    return _OTHER.get(target)
