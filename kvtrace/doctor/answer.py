"""What ``kvtrace doctor`` says: lines, each with a level and a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

SCHEMA = "kvtrace.doctor/1"


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_KNOWN = "not known"


OK, WARNING, PROBLEM, NOT_KNOWN = Level


@dataclass(frozen=True)
class Line:
    """``check``: what was looked at, in a word or two; ``remedy``: "" where there is nothing to do."""

    check: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorAnswer:
    lines: tuple[Line, ...]
    connectors: tuple[Mapping[str, Any], ...] = ()
    """The facts of each connector's class, for programs."""

    @property
    def failed(self) -> bool:
        return self.number(Level.PROBLEM) > 0

    def number(self, level: Level) -> int:
        return sum(line.level is level for line in self.lines)

    def document(self) -> dict[str, Any]:
        lines = [{**asdict(line), "level": line.level.value} for line in self.lines]
        numbers = {level.value.replace(" ", "_"): self.number(level) for level in Level}
        return {"schema": SCHEMA, **numbers, "lines": lines, "connectors": list(self.connectors)}
