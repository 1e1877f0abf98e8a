"""What ``kvtrace verify`` answers for a generated connector with an empty store, in the words of the
catalogue of faults (kvgen/catalogue.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GROUPS = {
    "transfer": ("transfers",),
    "returns-equal": ("comes-back-equal",),
    "whole-units": ("whole-units",),
    "right-asker": (
        "nobody-else", "other-salt", "other-adapter", "other-model", "other-image", "ranks-apart",
    ),
    "outputs": ("outputs",),
    "lookups-agree": ("lookups-agree",),
    "workloads": (
        "chunked", "concurrent", "repeated", "shared-prefix", "extended", "blocks-reused",
        "preempted", "aborted", "nothing-hangs",
    ),
    "lengths": ("lengths",),
    "restart": ("restart",),
    "store-conditions": (
        "store-gone", "store-cut", "store-garbage", "store-read-only", "store-full", "store-slow",
    ),
    "finishes-told": ("finish-told", "blocks-given-back"),
    "step-time": ("hook-share",),
    "flat": ("flat",),
}  # fmt: skip
"""Property of the catalogue -> those of kvtrace.verify."""
ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""0: the worker lives in the scheduler's process, as where the truth was found. Salted hashes differ already
between a scheduler and a worker that live apart: nothing would be loaded before the restart either."""
_WORST = ("failed", "proved", "not observed", "does not apply")


def grouped(answers: Mapping[str, str]) -> dict[str, str]:
    """Of each group the worst answer that one of its properties got."""
    found = {}
    for name, members in GROUPS.items():
        given = [answers[one] for one in members if one in answers]
        if given:
            found[name] = min(given, key=_WORST.index)
    return found


def verify_generated(part: Any, folder: Path, model: str, suite: str) -> dict[str, dict[str, Any]]:
    """``verified``: {property: answer}; ``says``: what verify itself says of each of its own properties.

    Args:
        part: the connector, with a store of its own that is empty.
        folder: the run directory that the agent is to write to; it is made.
    """
    from harness import engine, verify
    from kvtrace.agent.plugin import retarget

    transfer = engine.transfer_config(part.plan, part.made, part.view.place)
    folder.mkdir(mode=0o700)
    retarget(str(folder))
    try:
        arguments = engine.engine_arguments(part.plan, [transfer], model)
        salted = part.plan.keys.chain == "vllm" or part.plan.work == "salted"
        says = verify.verify_generated(arguments, folder, suite, part.plan.seed, salted, part.plan.all_units)
        return {"verified": grouped({name: said[0] for name, said in says.items()}), "says": says}
    finally:
        retarget(None)


def restarted(part: Any, folder: Path, model: str) -> tuple[str, ...]:
    """What ``kvtrace verify`` itself answers on ``restart`` of a served engine: only in another process are
    hashes other ones, and buffers empty.

    Args:
        part: the connector, with a directory of its own that is empty.
        folder: where the traced runs go.
    """
    from harness import engine, verify
    from kvtrace import CONFIG_VARIABLE
    from kvtrace.verify.connector import free_port

    transfer = engine.transfer_config(part.plan, part.made, part.view.place)
    arguments = verify.fit(engine.engine_arguments(part.plan, [transfer], model))
    del arguments["model"], arguments["disable_log_stats"]
    words = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--port", str(free_port())]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    length = 3 * part.plan.unit + part.plan.block // 2
    case = f"restart: a{length} b{length} ; a{length} b{length} ; restart a{length} b{length}"
    command = [
        sys.executable, "-m", "kvtrace", "verify", "--case", case, "--suite", "full",
        "--store", part.view.place, "--no-reference", "--shrink", "0", "--format", "json",
        "--output", str(folder), "--", *words,
    ]  # fmt: skip
    left_out = {CONFIG_VARIABLE, *engine.ENV} - {ONE_PROCESS}
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    path = os.pathsep.join(filter(None, (str(folder.parent / "src"), environ.get("PYTHONPATH"))))
    environ |= {"PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=False)
    (said,) = (one for one in json.loads(done.stdout)["properties"] if one["id"] == "restart")
    return said["answer"], said["says"], *said["evidence"]
