"""agent-not-loaded: an engine or worker process without a spool."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, NotObserved, RuledOut
from kvtrace.ledger.values import integer
from kvtrace.words import count, listed

ID = "agent-not-loaded"


def rule(case: Case) -> Iterator[Finding | RuledOut | NotObserved]:
    traced_pids = {process.pid for process in case.run.processes if process.agent}
    forks = _forks_before_exec(case.run.run.get("processes"), traced_pids)
    seen = [process for process in case.run.processes if process.vllm and process.pid not in forks]
    dark = [process for process in seen if not process.agent and process.role in ("scheduler", "worker")]
    short = [
        (engine, ranks)
        for engine in case.run.engines
        if len(engine.workers) < (ranks := integer(engine.facts, "tp", 1) * integer(engine.facts, "pp", 1))
    ]
    if dark or short:
        evidence = [f"no spool: {process.name}, pid {process.pid}" for process in dark[:4]]
        evidence += [
            f"{engine.process}: {len(engine.workers)} of {ranks} workers wrote a spool"
            for engine, ranks in short
        ]
        lost = len(dark) or sum(ranks - len(engine.workers) for engine, ranks in short)
        what = listed(process.name for process in dark) if dark else "workers"
        yield case.finding(
            ID,
            f"{count(lost)} vLLM processes of this run never loaded the agent: {what}."
            if lost != 1
            else f"One vLLM process of this run never loaded the agent: {what}.",
            evidence=evidence,
            headline="a part of the engine was not traced",
        )
        return
    other = [process for process in seen if not process.agent]
    if other:
        yield NotObserved(
            ID, f"without a spool, and not needed for the books: {listed(p.name for p in other)}"
        )
    if case.run.run.get("processes"):
        traced = sum(process.agent for process in seen)
        yield RuledOut(ID, f"{traced} of {len(seen)} vLLM processes wrote a spool, every engine and worker")


def _forks_before_exec(processes: object, traced: set[int]) -> set[int]:
    """Children of a traced process that still bear its title: starting a program (a compiler, say)
    forks first, and the fork looks like the engine or worker for a moment. No process of vLLM's:
    those take a title of their own."""
    rows = [row for row in processes if isinstance(row, dict)] if isinstance(processes, list) else []
    titles = {row.get("pid"): (row.get("name"), row.get("command")) for row in rows}
    return {
        row["pid"]
        for row in rows
        if isinstance(row.get("pid"), int)
        and row["pid"] not in traced
        and row.get("ppid") in traced
        and titles.get(row.get("ppid")) == (row.get("name"), row.get("command"))
    }
