"""Runs of several rows in this process, engine after engine: ``python -m matrix_rows.several JOBS.json``.

JOBS: a list of ``{"spec": file, "trace": run directory or "", "name": text, "env": {...}}``, all traced or
none. One import of vLLM for all of them. A run that ends the process leaves the later ones without an
outcome: whoever started it starts those again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import drive
import run as scenarios

from kvtrace import CONFIG_VARIABLE
from kvtrace.launch.own_process import write_run
from kvtrace.trace.config import AgentConfig, new_salt
from matrix_rows import play


def prepare(jobs: list[dict[str, Any]]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    drive.prepare_environment()
    os.environ.pop(CONFIG_VARIABLE, None)
    if jobs[0]["trace"]:
        config = AgentConfig(Path(jobs[0]["trace"]), new_salt(), jobs[0]["name"], scenarios.LIMIT_BYTES)
        os.environ[CONFIG_VARIABLE] = config.to_text()


def run(job: dict[str, Any], first: bool) -> None:
    spec = json.loads(Path(job["spec"]).read_text(encoding="utf-8"))
    trace = Path(job["trace"]) if job["trace"] else None
    if trace is not None:
        trace.mkdir(mode=0o700)
        if not first:
            scenarios.retarget(str(trace))
    began = time.time_ns()
    with scenarios.more_environment(job["env"]), scenarios.one_collection():
        error = play.record(spec, lambda: play.work(spec))
        drive.clean()
    if trace is not None:
        scenarios.retarget(None)
        write_run(trace, job["name"], began, exit_code=1 if error else 0, notes=[scenarios.NOTE])
        scenarios.write_rest(trace)
    print(f"matrix: {job['name']}: {error or 'ran'} ({(time.time_ns() - began) / 1e9:.1f} s)", flush=True)


def main() -> int:
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    prepare(jobs)
    for at, job in enumerate(jobs):
        run(job, first=at == 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
