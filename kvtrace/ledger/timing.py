"""Durations in log buckets: bounded memory, quantiles within 1 %, exact counts and sums.

A bucket is the exponent and the first six bits of the mantissa of the duration as a
double: 64 buckets an octave, each 1.6 % wide at most; its middle is at most 0.8 % off.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SHIFT = 52 - 6
_BASE = 1023 << 6  # the bucket of 1.0
BUCKETS = 63 << 6


def buckets(durations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bucket of each duration (ns); what is below 1 ns counts as 1."""
    bits: NDArray[np.int64] = np.maximum(durations, 1).astype(np.float64).view(np.int64)
    found: NDArray[np.int64] = np.clip((bits >> _SHIFT) - _BASE, 0, BUCKETS - 1)
    return found


def middle(bucket: int) -> float:
    """The duration (ns) in the middle of a bucket."""
    edges = np.array([bucket + _BASE, bucket + _BASE + 1], dtype=np.int64) << _SHIFT
    low, high = edges.view(np.float64)
    return float(low + high) / 2


class Histograms:
    """One histogram per small integer code. Only those that occur take memory: a run of hundreds of spools
    has some for each."""

    def __init__(self, codes: int) -> None:
        self._codes = codes
        self._counts: dict[int, NDArray[np.int64]] = {}
        self.totals = [0] * codes

    def _of(self, code: int) -> NDArray[np.int64]:
        if code not in self._counts:
            self._counts[code] = np.zeros(BUCKETS, dtype=np.int64)
        return self._counts[code]

    def add(self, codes: NDArray[np.int64], spans: NDArray[np.int64]) -> None:
        """Calls by their code and duration (ns); codes out of range are left out."""
        # A corrupt record can hold any pair of times: the difference is bounded, not trusted.
        spans = np.clip(spans, 0, 1 << 62)
        for code in np.flatnonzero(np.bincount(codes)[: self._codes]).tolist():
            mine = spans[codes == code]
            self._of(code)[:] += np.bincount(buckets(mine), minlength=BUCKETS)
            self.totals[code] += int(mine.sum(dtype=float))

    def merge(self, other: Histograms) -> None:
        """Add another one of the same codes."""
        for code, counts in other._counts.items():
            self._of(code)[:] += counts
        self.totals = [here + more for here, more in zip(self.totals, other.totals, strict=True)]

    def add_summed(self, code: int, count: int, total: int, low: int, high: int) -> None:
        """Collapsed calls of which only count, sum, least and greatest are known."""
        if not 0 <= code < self._codes or count <= 0:
            return
        ends = [low, high][:count]
        rest = count - len(ends)
        middle_ns = max(0, total - sum(ends)) // rest if rest else 0
        for value, n in ((low, 1), (high, 1 if count > 1 else 0), (middle_ns, rest)):
            if n:
                self._of(code)[int(buckets(np.array([max(0, value)]))[0])] += n
        self.totals[code] += max(0, total)

    def count(self, code: int) -> int:
        return int(self._counts[code].sum()) if code in self._counts else 0

    def quantile(self, code: int, q: float) -> int:
        """The q-quantile (ns) of a code's durations; 0 where there are none."""
        total = self.count(code)
        if not total:
            return 0
        counts = self._counts[code]
        rank = min(total - 1, int(q * total))
        bucket = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
        return round(middle(bucket))
