"""run.json of a run that is recorded in its own process, which ``kvtrace run`` did not start."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from kvtrace.launch.record import RunRecord
from kvtrace.launch.rundir import RUN_FILE
from kvtrace.regular import write_json


def write_run(run_dir: Path, name: str, started_wall_ns: int, **more: Any) -> None:
    """Write what ``kvtrace run`` would have left beside the spools, up to now.

    Args:
        run_dir: the run directory; it exists.
        started_wall_ns: when this run began.
        more: other fields of :class:`RunRecord`.

    Raises:
        OSError: it cannot be written.
    """
    command = [sys.executable, *sys.argv]
    of_this_process: dict[str, Any] = {
        "command": command,
        "ended_wall_ns": time.time_ns(),
        "processes": [
            {
                "pid": os.getpid(),
                "ppid": os.getppid(),
                "name": "python",
                "command": " ".join(command)[:200],
                "vllm": True,
            }
        ],
    }
    record = RunRecord(name=name, started_wall_ns=started_wall_ns, **{**of_this_process, **more})
    write_json(run_dir / RUN_FILE, record.document())
