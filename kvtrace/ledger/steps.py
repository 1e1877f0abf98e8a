"""Sets of steps, and how a step went on a worker. A step is ``engine tag << 32 | number``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvtrace.trace.format import STEP_MASK, STEP_SHIFT, Stop

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]

_EMPTY: Array = np.empty(0, dtype=np.int64)
_SHORT = 64
NEVER = (1 << 62) - 1
"""The time, or the step, of what did not happen."""


def real_step(step: Array) -> Mask:
    """Steps that are steps: 0 and what has no number within its engine are not."""
    result: Mask = (step > 0) & ((step & STEP_MASK) > 0)
    return result


def spent(t0: Array, t1: Array) -> Array:
    """Nanoseconds from `t0` to `t1`. A corrupt record can hold any pair of times: the difference is bounded,
    not trusted."""
    result: Array = np.clip(t1.astype(float) - t0.astype(float), 0, 2.0**62).astype(np.int64)
    return result


def of_engine(steps: Array, tag: int) -> Array:
    """Those of one engine."""
    result: Array = steps[(steps >> STEP_SHIFT) == tag]
    return result


def locate(known: Array, wanted: Array) -> tuple[Array, Mask]:
    """Where each wanted step stands among the sorted known ones, and whether it does."""
    if len(wanted) > _SHORT:  # records stand step by step: each step is looked for once
        starts = np.concatenate([[0], np.flatnonzero(wanted[1:] != wanted[:-1]) + 1])
        if 2 * len(starts) < len(wanted):
            lengths = np.diff(starts, append=len(wanted))
            of_run, has_run = locate(known, wanted[starts])
            return np.repeat(of_run, lengths), np.repeat(has_run, lengths)
    at = np.searchsorted(known, wanted)
    inside: Mask = at < len(known)
    inside[inside] = known[at[inside]] == wanted[inside]
    return at, inside


def holds(known: Array, step: int) -> bool:
    """Whether a step is among the sorted known ones: of one step, a tenth of what `locate` takes."""
    at = int(known.searchsorted(step))
    return at < len(known) and int(known[at]) == step


class Steps:
    """A set of steps, eight bytes each."""

    def __init__(self, steps: Array | Iterable[int] = ()) -> None:
        given = steps if isinstance(steps, np.ndarray) else np.array(list(steps), dtype=np.int64)
        self.sorted: Array = np.unique(given)

    def __contains__(self, step: int) -> bool:
        return self.any_within(step, step)

    def __len__(self) -> int:
        return len(self.sorted)

    def any_within(self, low: int, high: int) -> bool:
        """Whether a step of the set lies in [low, high]."""
        if not len(self.sorted):
            return False
        at = int(np.searchsorted(self.sorted, low))
        return at < len(self.sorted) and int(self.sorted[at]) <= high


class StepState(IntEnum):
    """How a step went on a worker; the values are codes in arrays of int8."""

    RAN = 0
    NOT_RECORDED = 1
    """Later steps are in its trace, or it stopped recording."""
    NOT_REACHED = 2
    """Its trace ends before it."""


@dataclass(frozen=True)
class Executed:
    """What the worker of one engine in a spool executed. Steps are sorted and distinct."""

    steps: Array  # real forward steps
    mode_of: NDArray[np.int8]  # graph mode of each of these steps
    full: Array  # of these, with graph mode FULL
    idle: Array  # executed without a token
    modes: dict[int, int]  # graph mode -> real steps
    batches: dict[int, tuple[int, int]]  # graph mode -> (tokens, padded tokens), where both are known
    capturing: int  # steps in which a graph was captured
    nanoseconds: int
    first_t: int
    last: int  # greatest step executed
    failed: Array = field(default_factory=lambda: _EMPTY)  # steps that an exception ended
    watched: Array = field(default_factory=lambda: _EMPTY)  # steps that were watched for what they store
    watched_loads: Array = field(default_factory=lambda: _EMPTY)  # ... for what they load
    began_steps: Array = field(default_factory=lambda: _EMPTY)  # steps in the order of their begins ...
    began_t: Array = field(default_factory=lambda: _EMPTY)  # ... and these, in host time


NEVER_RAN = Executed(_EMPTY, np.empty(0, dtype=np.int8), _EMPTY, _EMPTY, {}, {}, 0, 0, 0, 0)


def step_states(ran: Executed, stop: int | None, steps: Array) -> NDArray[np.int8]:
    """How each of these steps went on a worker.

    Args:
        stop: why it stopped recording (Stop), None where it did not.
    """
    state = np.where(steps <= ran.last, StepState.NOT_RECORDED, StepState.NOT_REACHED).astype(np.int8)
    state[locate(ran.steps, steps)[1] | locate(ran.idle, steps)[1]] = StepState.RAN
    if stop not in (None, Stop.CLEAN):
        state[state == StepState.NOT_REACHED] = StepState.NOT_RECORDED
    return state
