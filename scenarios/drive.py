"""Runs one scenario's workload as any user's script would: ``python scenarios/drive.py NAME``.

Knows nothing of kvtrace: the several-process scenarios run it under ``kvtrace run``, and
without kvtrace it shows what a scenario does by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import sessions
from spec import MODULE_DIRS, Scenario, ScenarioError, load

ENV = {
    # two workers on one NUMA node are refused otherwise
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


LATER = ("scheduler_reserve_full_isl",)
"""Settings that an older vLLM has not, and that turn off what it does not do."""


def prepare_environment(scenario: Scenario | None = None) -> None:
    """Sets what vLLM reads at import, and makes the connectors importable here and in workers."""
    for key, value in ENV.items():
        os.environ.setdefault(key, value)
    if scenario is not None:
        os.environ.update(scenario.env)
    for folder in map(str, MODULE_DIRS):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, MODULE_DIRS), *([known] if known else [])])


def start(scenario: Scenario, model: str, store: Path) -> Any:
    from vllm import LLM

    return LLM(**arguments(scenario, model, store), disable_log_stats=True)


def arguments(scenario: Scenario, model: str, store: Path) -> dict[str, Any]:
    """Of its engine, as far as this vLLM has them."""
    from vllm.engine.arg_utils import EngineArgs

    store.mkdir(parents=True, exist_ok=True)
    args = scenario.engine_args(model, store)
    for name in LATER:
        if name not in {field.name for field in fields(EngineArgs)}:
            args.pop(name, None)
    return args


def stream(scenario: Scenario, model: str, store: Path) -> list[list[int]]:
    """Runs all rounds of a scenario whose prompts come in parts."""
    asked = [
        sessions.Sessions(part.prompts, part.part, part.max_tokens) for part in scenario.rounds if part.part
    ]
    return sessions.run(arguments(scenario, model, store), asked)


def work(llm: Any, scenario: Scenario) -> list[list[int]]:
    """Runs all rounds. Returns the output tokens of each prompt, in order."""
    from vllm import SamplingParams

    answers: list[list[int]] = []
    for part in scenario.rounds:
        if part.forget:
            llm.reset_prefix_cache(reset_connector=True)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=part.max_tokens,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=part.prompt_logprobs,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in part.prompts]
        if part.abort_after is not None:
            answers.extend(give_up(llm, prompts, params, part.abort_after))
            continue
        if part.abort_steps is not None:
            answers.extend(leave(llm, prompts, params, part.abort_steps))
            continue
        batches = [prompts] if part.together else [[prompt] for prompt in prompts]
        for batch in batches:
            for output in llm.generate(batch, params, use_tqdm=False):
                answers.append(list(output.outputs[0].token_ids))
            for _ in range(part.idle_steps):
                llm.llm_engine.step()
    return answers


def give_up(llm: Any, prompts: list[Any], params: Any, seconds: float) -> list[list[int]]:
    """Aborts after some seconds what has no answer by then: an empty answer each."""
    engine = llm.llm_engine
    answers: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        answers[f"impatient-{i}"] = []
        engine.add_request(f"impatient-{i}", prompt, params)
    until = time.monotonic() + seconds
    while engine.has_unfinished_requests() and time.monotonic() < until:
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        time.sleep(0.01)  # an engine with nothing to run would step as fast as it can
    engine.abort_request([name for name, answer in answers.items() if not answer])
    while engine.has_unfinished_requests():
        engine.step()
    return list(answers.values())


def leave(llm: Any, prompts: list[Any], params: Any, steps: int) -> list[list[int]]:
    """Aborts all requests after some engine steps; returns what was answered by then."""
    engine = llm.llm_engine
    answers: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        answers[f"leaving-{i}"] = []
        engine.add_request(f"leaving-{i}", prompt, params)
    for _ in range(steps):
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
    engine.abort_request(list(answers))
    while engine.has_unfinished_requests():
        engine.step()
    return list(answers.values())


def stop(llm: Any) -> None:
    """Ends an engine so that the next one in this process starts clean."""
    llm.llm_engine.engine_core.shutdown()
    del llm
    clean()


def clean() -> None:
    """What an engine of this process leaves behind, also one that did not start."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    gc.collect()
    # a worker that failed half way leaves its connector behind, and the next would reuse it
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def write_outcome(path: Path, answers: list[list[int]], store: Path, seconds: float) -> None:
    """What the run did, seen from outside: answers, files in the store, token-layers in them."""
    files = sorted(p for p in store.rglob("*") if p.is_file())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "answers": answers,
                "files": len(files),
                "bytes": sum(p.stat().st_size for p in files),
                "rows": sum(_rows(p) for p in files),
                "seconds": round(seconds, 2),
            }
        ),
        encoding="utf-8",
    )


def _rows(path: Path) -> int:
    """Tokens in one file of a store: the first dimension of its tensor. A state is none of tokens."""
    if path.suffix not in (".npy", ".safetensors", ".part"):
        return 0
    if path.suffix == ".npy":
        import numpy

        return int(numpy.load(path, mmap_mode="r").shape[0])
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(
        entry["shape"][0] for name, entry in header.items() if not name.startswith(("__metadata__", "state"))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--store", type=Path, required=True, help="where the connector stores")
    parser.add_argument("--outcome", type=Path, help="write answers and file counts there")
    args = parser.parse_args()
    try:
        scenario = load(args.name)
    except ScenarioError as error:
        print(f"drive.py: {error}", file=sys.stderr)
        return 2
    if scenario.one_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    prepare_environment(scenario)
    began = time.monotonic()
    store = args.store.resolve()
    if scenario.streams:
        answers = stream(scenario, args.model, store)
    else:
        answers = work(start(scenario, args.model, store), scenario)
    if args.outcome is not None:
        write_outcome(args.outcome, answers, store, time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
