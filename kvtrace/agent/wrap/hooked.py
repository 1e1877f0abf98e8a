"""One hook of one connector: what its wrapper, its records and its watch are made from."""

from __future__ import annotations

from dataclasses import dataclass

from kvtrace.trace.format import Role
from kvtrace.trace.hooks import Hook


@dataclass(frozen=True)
class Hooked:
    hook: Hook
    role: Role
    """The side of vLLM that the connector was made for; all hooks of its class are wrapped."""
    index: int
    """Of the connector, in this process."""
    child: bool = False
    """Whether the connector is inside another one (MultiConnector's): its calls are recorded, but the
    state of the step is kept by the outermost one alone."""
    timed: bool = False
    """Whether device times of this connector may be taken."""
