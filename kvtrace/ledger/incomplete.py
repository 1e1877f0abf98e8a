"""What the recording of a run lacks: processes that stopped recording; damaged, cut and missing spools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Run
from kvtrace.ledger.scan import SpoolScan
from kvtrace.trace.format import STEP_MASK, Stop
from kvtrace.trace.reader import SpoolInfo
from kvtrace.words import of_all, plural

_STOPS: Mapping[int, str] = {
    Stop.SIZE_LIMIT: "its spool reached twice the limit (--limit)",
    Stop.WRITE_FAILED: "a write failed (disk full, quota)",
    Stop.AGENT_ERROR: "the agent failed there",
}


def incomplete(run: Run) -> Sequence[str]:
    """A line for each process whose recording is not whole; nothing was seen of it from there on.

    That vLLM kills its processes at the end of a run is no such case.
    """
    names = {process.spool: process.name for process in run.processes if process.spool}
    last = {worker.spool: worker.last_step & STEP_MASK for worker in run.workers() if worker.last_step}
    found = []
    for spool in run.spools:
        why = _why(spool)
        if why:
            after = f" after step {last[spool.name]}" if spool.stop and spool.name in last else ""
            lost = spool.lost + spool.left_out
            missing = f"; {plural(lost, 'record')} missing" if lost else ""
            found.append(f"{names.get(spool.name, spool.name)}{after}: {why}{missing}")
    there = {spool.name for spool in run.spools}
    found += [f"{name}: its spool is missing" for name in sorted(run.run.spools) if name not in there]
    return tuple(found)


def cut_off(requests: Sequence[Request]) -> set[int]:
    """Steps of requests that had not ended when their scheduler's recording did (the run still goes on, was
    killed, or stopped recording): what later steps would have stored of them is not known."""
    return {chunk.step for request in requests if request.finish is None for chunk in request.chunks}


def unfinished(requests: Sequence[Request]) -> Sequence[str]:
    """A line where requests had not ended when the recording did, else none."""
    count = sum(request.finish is None for request in requests)
    if not count:
        return ()
    which = of_all(count, len(requests), "request")
    return (
        f"{which} had not ended when the recording did (it still goes on, or the engine was stopped or "
        "killed): what later steps would have saved of them is not observed",
    )


def in_the_open(scans: Sequence[SpoolScan]) -> Sequence[str]:
    """A line where records were read that no checksum protects: those of the step in which a process was
    killed (or is, where it still runs). Of a command that ended well they are of its last calls."""
    found = [one.info for one in scans if one.info.open]
    if not found:
        return ()
    number = plural(sum(spool.open for spool in found), "record")
    return (f"the last step was not over when the recording ended: {number} of it without a checksum",)


def _why(spool: SpoolInfo) -> str:
    cut = f"its spool is {spool.end}" if spool.end in ("cut", "damaged") else ""
    return _STOPS.get(spool.stop or Stop.CLEAN, cut)
