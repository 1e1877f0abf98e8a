#!/usr/bin/env python3
"""The page reports/verify.md: ``kvtrace verify`` on real connectors.

    python scripts/verify_report.py --out DIR [--packages DIR ...] [--only WORD ...] [--again] [--page FILE]

Connectors of vLLM run on its CPU build; where one has a copy for GPUs only, that copy is replaced
(scripts/real). Those of others are taken from folders of modules (``--packages``: the site-packages of the
environment that scripts/real_connectors.py makes, a checkout of VUA), and left out elsewhere. ``--again``:
no engine; the results in DIR are shown anew. What was found in a connector's source stands in its case here,
and is shown only where verify failed that property.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "scripts" / "real"
sys.path.insert(0, str(ROOT / "scripts"))

import real_connectors  # noqa: E402
from vllm_env import vllm_env  # noqa: E402


@dataclass(frozen=True)
class Case:
    """One run. ``config``: as ``--config``; ``@OUT@`` is its folder. ``found``: property -> what its source
    says to a failure, by hand. ``needs``: a module that has to be there. ``env``: of its server."""

    name: str
    title: str
    connector: str
    config: dict[str, Any]
    found: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    env: dict[str, str] = field(default_factory=dict)


EXAMPLE = {
    "chunked": (
        "`example_connector.py` 329-352: the blocks of a new request's first step are stored under "
        "the name of the whole prompt (`make_meta`, 50-59), and later steps add nothing. A later load"
        " asks for the slots of the whole prompt; line 156 has fewer rows for them: RuntimeError, and"
        " the engine ends."
    ),
    "nothing-hangs": "The same exceptions: each ends the engine.",
    "whole-units": "As `lengths`.",
    "lengths": (
        "`example_connector.py` 50 stores `align_to_block_size(len(prompt))` tokens, lines 408-412 "
        "look for `align_to_block_size(len(prompt) - 1)`: of prompts of 32 k + 1 tokens these are two"
        " names, and what was stored is never found."
        " A prompt of one token is worse: `align_to_block_size(0)` is -32 (455-457), the lookup "
        "answers -32, and the worker ends with an IndexError in `_prepare_inputs`."
    ),
    "repeated": (
        "`example_connector.py` 297-299 return `num_tokens_to_check - num_computed_tokens`: below 0 "
        "where the GPU's own prefix cache holds more. vLLM counts it (`Counters can only be "
        "incremented by non-negative amounts`), and the server ends."
    ),
    "other-salt": (
        "`example_connector.py` 418-440: the name of a prompt is a hash of its token ids and images; "
        "its `cache_salt` is left out."
    ),
}
OFFLOADING = {
    "preempted": (
        "`offloading/scheduler.py` 1857-1862: a request that was preempted by "
        "`reset_prefix_cache(reset_running_requests)` is let in again in the same `schedule()`, and "
        "begins to load; the assertion that a preempted request's jobs are stores fails, and the "
        "engine ends."
    ),
    "nothing-hangs": "The same assertion ends the engine.",
}
LMCACHE = {
    "other-salt": (
        "`lmcache/v1/token_database.py` 234-248 and 269-291: the key of a chunk is the model, the ranks, the "
        "data type, the request's configuration and a hash of its tokens. "
        "`lmcache/integration/vllm/vllm_v1_adapter.py` never looks at a request's `cache_salt`; only the "
        "connector for LMCache's own server does (`lmcache_mp_metadata.py` 85)."
    ),
}
_VUA_SHORT = (
    "`vua/vllm/kv_connector_v1.py` 436: one future a layer is kept, so in a step that saves several requests "
    "the last one's copy replaces the others'; and what one step computes of a prompt is written under the "
    "key of all tokens before its end (417-418), however few rows that are (428). A load takes a whole unit "
    "of each file (319-325): RuntimeError, and the engine ends."
)
VUA = {
    "comes-back-equal": "The loads that ended the engine under `concurrent`.",
    "lookups-agree": "The same loads.",
    "concurrent": _VUA_SHORT,
    "aborted": "As `concurrent`.",
    "preempted": (
        "`vua/vllm/kv_connector_v1.py` 317: what a load finds there already must be a whole number of units; "
        "of a request that was preempted it is not: AssertionError, and the engine ends."
    ),
    "nothing-hangs": "The same exceptions.",
}
DECODE_BENCH = dict.fromkeys(
    (
        "comes-back-equal", "outputs", "lengths", "chunked", "concurrent", "repeated", "shared-prefix",
        "extended", "blocks-reused", "preempted", "aborted", "nobody-else", "other-salt",
    ),
    "As it is meant: this connector of a benchmark offers KV for every prompt and fills it with constants.",
)  # fmt: skip
SEMBLEND = {
    "transfers": (
        "`semblend_vllm_connector/connector.py` 2352 and 2055-2058: the prompt that was captured is found "
        "and declined (`no_block_refs`): its record names no blocks. Nothing that it stores is ever loaded."
    ),
}


def _example(place: str) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": f"@OUT@/{place}"},
    }


def _of_another(name: str, run: str, title: str, found: dict[str, str]) -> Case:
    """A connector of others, set up as in that run of scripts/real_connectors.py."""
    one = next(case for case in real_connectors.cases() if case.name == run)
    config = json.loads(json.dumps(one.extra).replace("@PLACE@", "@OUT@/store"))
    return Case(name, title, f"{one.module}:{one.connector}", config, found, one.module, one.env)


CASES = (
    Case("example", "ExampleConnector", "ExampleConnector", {"shared_storage_path": "@OUT@/store"}, EXAMPLE),
    Case(
        "multi",
        "MultiConnector of two ExampleConnectors",
        "MultiConnector",
        {
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [_example("one"), _example("two")]},
        },
        EXAMPLE,
    ),
    Case(
        "offloading",
        "OffloadingConnector, its device copy replaced (scripts/real/offloading_here.py)",
        "OffloadingConnector",
        {
            "spec_name": "HostSpec", "spec_module_path": "offloading_here", "cpu_bytes_to_use": 64 << 20,
            "count_file": "@OUT@/count",
        },
        OFFLOADING,
    ),
    Case(
        "simple-offload",
        "SimpleCPUOffloadConnector, its device copy replaced (scripts/real/offload_here.py)",
        "offload_here:OffloadHere",
        {"cpu_bytes_to_use": 64 << 20, "count_file": "@OUT@/count"},
    ),
    Case("decode-bench", "DecodeBenchConnector", "DecodeBenchConnector", {}, DECODE_BENCH),
    _of_another(
        "lmcache",
        "lmcache",
        "LMCache 0.5.6, its device copy replaced (scripts/real/lmcache_here.py), chunks of 64 in files",
        LMCACHE,
    ),
    _of_another("vua", "vua-exact", "VUA (scripts/real/vua_here.py), units of 512 in files", VUA),
    _of_another("semblend", "semblend-exact", "semblend-vllm-connector 0.2.8, mode exact_prefix", SEMBLEND),
)  # fmt: skip


def run(case: Case, out: Path, modules: list[str]) -> bool:
    """Its result goes to ``out/<name>.json``, what it said to ``out/<name>.err``. False: it is not there."""
    folder = out / case.name
    environment = vllm_env() | case.env
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT), *modules])
    if case.needs:
        look = [sys.executable, "-c", f"import {case.needs}"]
        if subprocess.run(look, env=environment, capture_output=True, check=False).returncode:
            return False
    config = json.dumps(case.config).replace("@OUT@", str(folder))
    command = [
        sys.executable, "-m", "kvtrace", "verify", "--format", "json", "-o", str(folder / "run"),
        "--shrink", "0", "--connector", case.connector, "--config", config,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    (out / f"{case.name}.json").write_text(done.stdout, encoding="utf-8")
    (out / f"{case.name}.err").write_text(done.stderr, encoding="utf-8")
    return True


def page(out: Path) -> str:
    """The page, of the results that are there."""
    lines = [
        "# kvtrace verify on real connectors",
        "",
        f"`python scripts/verify_report.py`, vLLM {version('vllm')}, CPU build, a small model with grouped-"
        "query attention, suite quick. Each failure was looked up in the connector's source by hand.",
        "",
    ]
    for case in CASES:
        lines += _part(case, out)
    return "\n".join(lines).rstrip() + "\n"


def _part(case: Case, out: Path) -> list[str]:
    file = out / f"{case.name}.json"
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    if not text:
        said = (out / f"{case.name}.err").read_text(encoding="utf-8").strip().splitlines()
        return [f"## {case.title}", "", f"It did not start: {said[-1][:300] if said else ''}", ""]
    result = json.loads(text)
    lines = [f"## {case.title}", "", "| property | answer | |", "|---|---|---|"]
    for one in result["properties"]:
        says = " ".join(one["says"].replace("|", "\\|").replace(str(ROOT) + "/", "").split())
        lines.append(f"| {one['id']} | {one['answer']} | {says[:240]} |")
    failed = [one for one in result["properties"] if one["answer"] == "failed"]
    if failed:
        lines += ["", "Failures:", ""]
    for one in failed:
        why = case.found.get(one["id"], "")
        evidence = " ".join(one["evidence"][:1])
        small = next((line for line in one["evidence"] if line.startswith("the smallest case: ")), "")
        lines.append(f"- **{one['id']}**, case `{one['case']}`. {why or evidence} {small}".rstrip())
    return [*lines, ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--packages", nargs="*", default=[], metavar="DIR", help="with others' connectors")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="runs whose name holds one of these"
    )
    parser.add_argument("--again", action="store_true", help="no engine: show what is there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page there")
    args = parser.parse_args()
    out = args.out.resolve()
    for case in CASES:
        if not args.again and (not args.only or any(word in case.name for word in args.only)):
            there = run(case, out, [str(Path(one).resolve()) for one in args.packages])
            print(f"{case.name}: {'done' if there else f'left out, there is no {case.needs}'}", flush=True)
    text = page(out)
    if args.page is not None:
        args.page.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
