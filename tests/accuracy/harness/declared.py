"""What generated connectors put into their metadata, heard where they do so: in the connector's own method
that notes tokens [lo, hi) of a request, for storing or for loading. kvtrace has no part in it."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvgen.plan import Plan
from kvgen.source import Generated


class Declarations:
    """What the connectors of a run declare.

    Attributes:
        rows: (time of ``perf_counter_ns``, ``put`` or ``get``, request id, first token, one after the last).
    """

    def __init__(self, connectors: Sequence[tuple[Plan, Generated]]) -> None:
        self.connectors = connectors
        self.rows: list[tuple[int, str, str, int, int]] = []

    def listen(self) -> None:
        """Wraps the methods of the connectors' classes, once they are imported."""
        for plan, made in self.connectors:
            for cls in _classes(made):
                for way, method in made.notes.items():
                    found = vars(cls).get(method)
                    if found is not None and not hasattr(found, "__wrapped__"):
                        setattr(cls, method, self._heard(plan, way, found))

    def _heard(self, plan: Plan, way: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(inner: Any, meta: Any, rid: str, *rest: Any) -> Any:
            lo, hi = rest[-2:]
            first = 0 if plan.shape.covers == "whole" else lo // plan.unit * plan.unit
            left = getattr(inner, "_left", None)
            if left is not None:
                hi = max(first, min(hi, first + left * plan.unit))  # no more than it still may store
            self.rows.append((time.perf_counter_ns(), way, rid, first, hi))
            return method(inner, meta, rid, *rest)

        return noted

    def document(self) -> dict[str, Any]:
        return {"shape": " + ".join(_shape(plan) for plan, _ in self.connectors), "rows": self.rows}


def _classes(made: Generated) -> Iterator[type]:
    package = made.module.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            yield from (one for one in vars(module).values() if isinstance(one, type))


def _shape(plan: Plan) -> str:
    shape = plan.shape
    if shape.form != "entries":
        return shape.form
    return "/".join((shape.record, shape.container, shape.what, shape.where, shape.covers))
