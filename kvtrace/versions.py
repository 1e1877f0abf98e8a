"""The versions of vLLM that kvtrace covers.

Standard library only: this module is imported inside vLLM's processes.
"""

from __future__ import annotations

OLDEST = "0.8.5"
NEWEST = "0.33.0"
"""The newest version whose sources were read; the end of every range that is still open."""


def since(first: str, last: str = NEWEST) -> str:
    """``first .. last``, as targets and causes say where something holds."""
    return f"{first} .. {last}"
