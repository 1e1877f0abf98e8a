"""What ``kvtrace run`` and the pytest plugin hand down to the agent, in one environment variable.

Standard library only: this module is imported inside vLLM's processes.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

TIMINGS = ("off", "sampled", "full")


@dataclass(frozen=True)
class AgentConfig:
    """How one run is recorded.

    Attributes:
        dir: the run directory; spools go to its folder ``spool``.
        salt: key of the run's digests. It goes into the variable and nowhere else, least of all to disk.
        run: the run's name.
        limit_bytes: size of one process's spool from which quiet steps are recorded as sums.
        device_timing: one of TIMINGS; without effect where there is no CUDA device.
        budget: share of the steps' time that device timing may take.
    """

    dir: Path
    salt: bytes
    run: str = ""
    limit_bytes: int = 1 << 30
    device_timing: str = "sampled"
    budget: float = 0.01

    @classmethod
    def from_text(cls, text: str) -> AgentConfig:
        """The configuration that :meth:`to_text` wrote; what is missing has its default.

        Raises:
            ValueError: no such document, or a field of another type.
            TypeError: the same.
        """
        value = json.loads(text)
        if not isinstance(value, dict) or not isinstance(value.get("dir"), str):
            raise ValueError("no object with a 'dir'")
        timing = str(value.get("device_timing") or cls.device_timing)
        if timing not in TIMINGS:
            raise ValueError(f"'device_timing' is none of {', '.join(TIMINGS)}")
        return cls(
            dir=Path(value["dir"]),
            salt=bytes.fromhex(value.get("salt") or new_salt().hex()),
            run=str(value.get("run") or ""),
            limit_bytes=int(value.get("limit_bytes") or cls.limit_bytes),
            device_timing=timing,
            budget=float(value.get("budget") or cls.budget),
        )

    def to_text(self) -> str:
        """The text of the variable (:data:`kvtrace.CONFIG_VARIABLE`)."""
        return json.dumps(
            {
                "dir": str(self.dir),
                "salt": self.salt.hex(),
                "run": self.run,
                "limit_bytes": self.limit_bytes,
                "device_timing": self.device_timing,
                "budget": self.budget,
            }
        )


def new_salt() -> bytes:
    """A key for one run."""
    return os.urandom(16)
