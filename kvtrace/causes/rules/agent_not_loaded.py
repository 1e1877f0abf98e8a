"""agent-not-loaded: an engine or worker process without a spool."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.causes.rule import FAULT, Case, Cause, Results, Stage
from kvtrace.ledger.run import Engine
from kvtrace.trace.run_file import ListedProcess
from kvtrace.words import count, listed

CAUSE = Cause(
    id="agent-not-loaded",
    stage=Stage.WIRING,
    severity=FAULT,
    meaning="A vLLM process of this run never loaded the agent: what happened in it is not in the report.",
    seen_as="A vLLM engine or worker process in the process tree, and no spool with its pid.",
    remedy=(
        "Start the whole command under 'kvtrace run'. If its environment is rebuilt on the way (ssh, sudo, "
        "containers), pass on KVTRACE_CONFIG, PYTHONPATH and VLLM_PLUGINS, and install kvtrace there."
    ),
)


def rule(case: Case) -> Results:
    traced_pids = {process.pid for process in case.run.processes if process.agent}
    forks = _forks_before_exec(case.run.run.processes, traced_pids)
    seen = [process for process in case.run.processes if process.pid not in forks]
    silent = [process for process in seen if not process.agent and process.role in ("scheduler", "worker")]
    short = [
        (engine, ranks)
        for engine in case.run.engines
        if len(engine.workers) < (ranks := engine.facts.ranks) and not _is_one_of_a_launchers(case, engine)
    ]
    if silent or short:
        evidence = [f"nothing was recorded of {process.name}, pid {process.pid}" for process in silent[:4]]
        evidence += [
            f"{engine.process}: {len(engine.workers)} of {ranks} workers recorded something"
            for engine, ranks in short
        ]
        lost = len(silent) or sum(ranks - len(engine.workers) for engine, ranks in short)
        what = listed(process.name for process in silent) if silent else "workers"
        noun = "vLLM process" if lost == 1 else "vLLM processes"
        yield case.finding(
            CAUSE,
            f"{count(lost)} {noun} of this run never loaded the agent: {what}.",
            evidence=evidence,
            headline="a part of the engine was not traced",
        )
        return
    if case.run.run.processes:
        other = [process.name for process in seen if not process.agent]
        rest = f"; without one, and not needed for the ledgers: {listed(other)}" if other else ""
        yield CAUSE.ruled_out(
            f"{len(seen) - len(other)} of {len(seen)} vLLM processes were recorded, every engine and worker"
            f"{rest}"
        )


def _is_one_of_a_launchers(case: Case, engine: Engine) -> bool:
    """Whether an engine runs its one worker in its own process. With several ranks it does so under an
    external launcher alone (vllm/v1/executor/uniproc_executor.py, 0.32.0): each has an engine of its own."""
    names = {process.spool: process.name for process in case.run.processes}
    return any(names.get(worker.spool) == engine.process for worker in engine.workers)


def _forks_before_exec(processes: Sequence[ListedProcess], traced: set[int]) -> set[int]:
    """Children of a traced process that still have its title: starting a program (a compiler, say)
    forks first, and the fork looks like the engine or worker for a moment. vLLM's own processes set
    another title."""
    titles = {row.pid: (row.name, row.command) for row in processes}
    return {
        row.pid
        for row in processes
        if row.pid not in traced and row.ppid in traced and titles.get(row.ppid) == (row.name, row.command)
    }
