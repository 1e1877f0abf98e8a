"""sync-in-hook: needs a device clock."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import NotObserved

ID = "sync-in-hook"


def rule(case: Case) -> Iterator[NotObserved]:
    if any(worker.steps for worker in case.run.workers()):
        yield NotObserved(ID, "whether a hook waits for the device shows on a device clock only")
