"""A row's workload as any user's script would run it: ``python -m matrix_rows.play SPEC.json``.

Knows nothing of kvtrace. SPEC: ``engines`` (keyword arguments of ``LLM(...)`` of each), ``acts`` (what is
done, in order: ``do`` names a function of acts.py), ``store`` (folder), ``outcome`` (file that gets the
answers: the tokens of each sequence, in the order in which they were asked for, and the error that ended the
run).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
if str(SCENARIOS) not in sys.path:
    sys.path.insert(0, str(SCENARIOS))

import drive  # noqa: E402

from matrix_rows.acts import ACTS, Answers  # noqa: E402


def read_spec() -> dict[str, Any]:
    """The spec that the command line names, in a process that is ready for vLLM."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    drive.prepare_environment()
    return spec


def work(spec: dict[str, Any]) -> Answers:
    """Each act on its engine (``engine``: the first one)."""
    from vllm import LLM

    answers: Answers = []
    engines: list[Any] = []
    try:
        engines += [LLM(**options, disable_log_stats=True) for options in spec["engines"]]
        for act in spec["acts"]:
            answers += ACTS[act["do"]](engines[act.get("engine", 0)], act)
    finally:
        while engines:
            engines.pop().llm_engine.engine_core.shutdown()
    return answers


def record(spec: dict[str, Any], work: Callable[[], Answers]) -> str:
    """Does the work and writes its outcome. Returns the error that ended it, or ""."""
    began = time.monotonic()
    Path(spec["store"]).mkdir(parents=True, exist_ok=True)
    answers: Answers = []
    error = ""
    try:
        answers = work()
    except Exception as caught:
        traceback.print_exc()
        error = f"{type(caught).__name__}: {caught}"
    write(spec, answers, error, time.monotonic() - began)
    return error


def write(spec: dict[str, Any], answers: Answers, error: str, seconds: float) -> None:
    """The outcome: that of scenarios, and the error."""
    path = Path(spec["outcome"])
    drive.write_outcome(path, answers, Path(spec["store"]), seconds)
    outcome = {**json.loads(path.read_text(encoding="utf-8")), "error": error}
    path.write_text(json.dumps(outcome), encoding="utf-8")


def main() -> int:
    spec = read_spec()
    if rank := os.environ.get("RANK"):  # one of several scripts, a rank each
        spec["outcome"] += f".{rank}" if rank != "0" else ""
    return 1 if record(spec, lambda: work(spec)) else 0


if __name__ == "__main__":
    sys.exit(main())
