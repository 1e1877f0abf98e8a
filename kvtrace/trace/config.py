"""What ``kvtrace run`` and the pytest plugin hand down to the agent, in one environment variable.

Standard library only: this module is imported inside vLLM's processes.
"""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

STORE_VARIABLE = "KVTRACE_VERIFY_STORE"
"""Set by ``kvtrace verify --store`` alone: a link that tells how the store is to be, and its directory."""
STORE_CONDITIONS = STORE_SLOW, STORE_FULL, STORE_READ_ONLY = "slow", "full", "read-only"

TIMINGS = ("off", "sampled", "full")
WATCHES = ("first", "sampled", "full")


@dataclass(frozen=True)
class AgentConfig:
    """How one run is recorded. Its text has a member for each field; what has a default may be missing.

    Attributes:
        dir: the run directory; spools go to its folder ``spool``.
        salt: key of the run's digests. It goes into the variable and nowhere else, least of all to disk.
        run: the run's name.
        limit_bytes: size of one process's spool from which quiet steps are recorded as sums.
        device_timing: one of TIMINGS; without effect where there is no CUDA device.
        budget: share of the steps' time that device timing may take; the watch as much again.
        credit: seconds of processor time that watch and fingerprints may each take before they keep to the
            budget; 0: the budget is for both together and holds from the first step on.
        watch: one of WATCHES: which steps with something to see are watched call by call.
        metadata_adapter: ``module:function`` that says what the connector's metadata declares, "" for none.
        keep_messages: record messages of exceptions and logs with the values in them.
        as_device: for tests: treat KV in host memory as if it lay on a device.
        copies: blocks of computed KV that are kept, to say how far loads are from them; of verify alone.
        keep_settings: record settings as they are, credentials masked (``trace/mask.py``).
        compiled: for tests: False where the recorder in C must not be used.
    """

    dir: Path
    salt: bytes
    run: str = ""
    limit_bytes: int = 1 << 30
    device_timing: str = "sampled"
    budget: float = 0.01
    watch: str = "full"
    metadata_adapter: str = ""
    keep_messages: bool = False
    keep_settings: bool = False
    as_device: bool = False
    copies: int = 0
    compiled: bool = True
    credit: float = 2.0

    @property
    def watching(self) -> str:
        """How the accounts of watch and fingerprints are kept: where verify asks, no step is left out."""
        return "full" if self.copies else "sampled"

    @property
    def share(self) -> float:
        """Of the steps' time: what the watch may take, and fingerprints as much again."""
        return self.budget if self.credit else self.budget / 2

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
        given = {
            field.name: type(field.default)(value[field.name])
            for field in fields(cls)
            if field.default is not MISSING and value.get(field.name) is not None
        }
        config = cls(Path(value["dir"]), bytes.fromhex(value.get("salt") or new_salt().hex()), **given)
        for name, known in (("device_timing", TIMINGS), ("watch", WATCHES)):
            if getattr(config, name) not in known:
                raise ValueError(f"{name!r} is none of {', '.join(known)}")
        return config

    def to_text(self) -> str:
        """The text of the variable (:data:`kvtrace.CONFIG_VARIABLE`)."""
        return json.dumps({**vars(self), "dir": str(self.dir), "salt": self.salt.hex()})


def new_salt() -> bytes:
    """A key for one run."""
    return os.urandom(16)
