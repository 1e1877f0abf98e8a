"""Layer names of one spool as small numbers, so that they fit into the key of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvtrace.ledger.steps import Array
from kvtrace.trace.reader import layer_ids

_NEW = -2
MOST = 1 << 16
"""Layers with a number; what comes after them has the number -1."""


class Layers:
    """Numbers are given in the order in which layers are met."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts
        self._numbers: dict[int, int] = {}  # id of the name -> number
        self._known: Array = np.empty(0, np.int64)  # the same by small ids, _NEW where there is none
        self._sets: dict[int, Array] = {}
        self._indices: dict[tuple[str, ...], Array] = {}
        self.names: list[str] = []

    def numbers(self, ids: Array) -> Array:
        """The number of each id of a NAME record."""
        if len(ids) and ids.min() >= 0 and ids.max() < len(self._known):
            known = self._known[ids]
            if (known != _NEW).all():
                return known
        unique, inverse = np.unique(ids, return_inverse=True)
        found: Array = np.array([self._number(ident) for ident in unique.tolist()], dtype=np.int64)
        few = unique[(unique >= 0) & (unique < MOST)]
        if len(few):
            size = max(len(self._known), int(few[-1]) + 1)
            more: Array = np.full(size, _NEW, np.int64)
            more[: len(self._known)] = self._known
            more[few] = found[(unique >= 0) & (unique < MOST)]
            self._known = more
        return found[inverse]

    def _number(self, ident: int) -> int:
        number = self._numbers.get(ident)
        if number is not None:
            return number
        if len(self.names) >= MOST - 1:
            return -1
        self._numbers[ident] = len(self.names)
        self.names.append(self._texts.get(ident, "") if ident else "")
        return self._numbers[ident]

    def of_set(self, ident: int) -> Array:
        """The numbers of a set of layers: the id names a JSON list of ids."""
        if ident not in self._sets:
            ids = layer_ids(self._texts.get(ident, ""))
            self._sets[ident] = np.unique(self.numbers(np.array(ids[:MOST] or [0], dtype=np.int64)))
        return self._sets[ident]

    def index_in(self, kv_layers: Sequence[str], numbers: Array) -> Array:
        """Index of each layer in a worker's KV layers, -1 where it is none of these."""
        key = tuple(kv_layers)
        known = self._indices.get(key)
        if known is None or len(known) < len(self.names):
            at = {name: index for index, name in enumerate(kv_layers)}
            known = np.array([at.get(name, -1) for name in self.names], dtype=np.int64)
            self._indices[key] = known
        result: Array = np.where(numbers >= 0, known[np.maximum(numbers, 0)], -1)
        return result
