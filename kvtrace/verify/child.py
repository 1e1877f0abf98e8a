"""The server as a traced command: ``python -m kvtrace.verify.child DIR COMMAND...``.

What ``kvtrace run`` does, in a process of its own, as verify itself asks the server meanwhile: with every
step watched, and copies of computed blocks kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SALT = "KVTRACE_VERIFY_SALT"
"""Key of the digests, in hex: of all runs that are read as one the same."""
_COPIES = 1024
"""Blocks of which copies are kept."""


def words(directory: Path, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` so."""
    return [sys.executable, "-m", __name__, str(directory), *command]


def main() -> int:
    from kvtrace.errors import KvtraceError
    from kvtrace.launch.say import say
    from kvtrace.launch.session import RunOptions, run
    from kvtrace.trace.config import AgentConfig

    directory, *command = sys.argv[1:]
    salt = bytes.fromhex(os.environ.pop(SALT))
    agent = AgentConfig(Path(directory), salt, budget=1.0, watch="full", copies=_COPIES)
    try:
        return run(RunOptions(command, agent, Path(directory), "verify", stuck_after=0.0))
    except KvtraceError as error:
        say(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
