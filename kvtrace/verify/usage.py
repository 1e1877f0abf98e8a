"""What the processes of a server use, from /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
MEMORY, DESCRIPTORS, THREADS = "memory", "descriptors", "threads"


def usage(session: int, proc: Path = Path("/proc")) -> Mapping[str, int]:
    """Sums over the processes of that session: bytes in memory, descriptors, threads. Empty: none seen."""
    found = {MEMORY: 0, DESCRIPTORS: 0, THREADS: 0}
    seen = False
    for folder in proc.glob("[0-9]*"):
        try:
            # behind the name, which may hold anything
            words = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(words[3]) != session:
                continue
            found[DESCRIPTORS] += len(os.listdir(folder / "fd"))
            found[THREADS] += int(words[17])
            found[MEMORY] += int(words[21]) * _PAGE
            seen = True
        except (OSError, ValueError, IndexError):
            continue
    return found if seen else {}
