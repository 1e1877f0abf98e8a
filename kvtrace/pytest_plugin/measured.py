"""A number of a report that knows what it measures and which finding is behind it."""

from __future__ import annotations

from collections.abc import Callable


class Measured(float):
    """A plain float to everybody; a failing ``assert`` with it prints ``what`` and ``because()``."""

    what: str
    because: Callable[[], list[str]]

    def __new__(cls, value: float, what: str, because: Callable[[], list[str]]) -> Measured:
        self = super().__new__(cls, value)
        self.what, self.because = what, because
        return self

    def __repr__(self) -> str:
        return f"{float(self):.10g}"

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)  # the reason stays with the report
