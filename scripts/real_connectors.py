#!/usr/bin/env python3
"""Real connectors under kvtrace, each with a truth of its own: what they stored is read from their stores.

    python scripts/real_connectors.py --out DIR [--vua SOURCE] [--only WORD ...] [--again] [--report FILE]

Connectors come from the package registry into an environment below DIR, beside this clone's vLLM. SOURCE: a
checkout of VUA (its folder ``src`` is used as it is; scripts/real/vua_here.py lets it run on this vLLM);
without it those runs are left out, and the report says so. ``--only``: runs whose name holds one of the
words. ``--again``: no engine; the recorded runs in DIR are explained anew.

Exit codes: 0 every run went through and was right, 1 not, 2 usage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "scripts" / "real"
for place in (ROOT, ROOT / "scripts"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from vllm_env import CACHE, vllm_env  # noqa: E402

from kvtrace.report.build import build_report  # noqa: E402

PACKAGES = (
    "kvblockd==0.1.0", "vllm-kvblockd==0.1.0", "semblend-vllm-connector==0.2.8", "blake3", "xxhash",
    # LMCache, and what it imports on its way to a store in files
    "lmcache==0.5.6", "aiofile", "caio", "aiofiles", "sortedcontainers", "nvtx", "redis",
    "nixl==1.5.1", "nixl-cu12==1.5.1", "avp==0.6.2", "zstandard",
)  # fmt: skip
BLOCK = 32
LAYERS = 4
BYTES = LAYERS * 2 * 128 * 4
"""Of a token's KV: layers x (K and V) x (heads x size) x float32."""

ENGINE: dict[str, Any] = {
    "block_size": BLOCK, "max_model_len": 2304, "max_num_seqs": 16, "enforce_eager": True,
    "enable_prefix_caching": False, "kv_cache_memory_bytes": 64 << 20, "seed": 0, "dtype": "float32",
    "async_scheduling": False,
}  # fmt: skip


@dataclass(frozen=True)
class Round:
    prompts: list[list[int]]
    together: bool = False
    max_tokens: int = 2


@dataclass
class Truth:
    """What lies in the store, and how that is known.

    Attributes:
        tokens: at rest in all layers and ranks; None where it could not be established.
        how: in words.
    """

    tokens: int | None
    how: str


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        first: ids that are right as the first finding; empty: there must be no fault.
        limit: what is found works as built: there must be no fault beside it.
        script: the workload, in scripts/real.
        truth: (case, its folder, all requests' tokens) -> Truth.
        about: what is true of the run, in words.
    """

    name: str
    title: str
    about: str
    connector: str
    module: str
    rounds: list[Round]
    truth: Callable[[Case, Path, list[list[int]]], Truth]
    first: frozenset[str] = frozenset()
    extra: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    server: str = ""
    limit: bool = False
    script: str = "work.py"

    @property
    def ranks(self) -> int:
        return int(self.engine.get("tensor_parallel_size", 1))


@dataclass
class Result:
    case: Case
    problem: str = ""
    truth: Truth | None = None
    saved: float = 0.0
    grades: dict[str, float] = field(default_factory=dict)
    accounts: dict[str, float] = field(default_factory=dict)
    first: str = "none"
    faults: int = 0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, report: Mapping[str, Any]) -> None:
        """What a report says of the run."""
        saves = report["ledger"]["saves"]
        pairs = saves["pairs"] or 1
        grades = saves.get("grades", {}).get("saved")
        if grades is None:
            grades = {"read": saves["accounts"].get("saved", 0)}
        self.grades = {name: count / pairs for name, count in grades.items()}
        self.accounts = {name: count / pairs for name, count in saves["accounts"].items() if count}
        self.saved = self.accounts.get("saved", 0.0)
        self.findings = [f"{f['id']} ({f['severity']})" for f in report["findings"]]
        faults = [f["id"] for f in report["findings"] if f["severity"] == "fault"]
        everything = [f["id"] for f in report["findings"]]
        self.faults = len(faults)
        counting = everything if self.case.limit or not self.case.first else faults
        self.first = ([*faults, *counting] or ["none"])[0]

    @property
    def first_right(self) -> bool:
        if not self.case.first:
            return not self.faults
        return self.first in self.case.first and not (self.case.limit and self.faults)

    @property
    def number(self) -> str:
        """What is called saved against what is at rest: no more may be proved or written, and no less seen.

        What was read and never came to rest is called read, and no more is said of it.
        """
        if self.truth is None or self.truth.tokens is None:
            return "unknown"
        read = self.grades.get("read", 0.0)
        resting = sum(self.grades.get(grade, 0.0) for grade in ("proved", "written"))
        if resting > self.truth.tokens:
            return "too many"
        if resting + read < self.truth.tokens:
            return "fewer"
        return "right" if resting + read == self.truth.tokens else "read, and not at rest"

    @property
    def right(self) -> bool:
        return not self.problem and self.first_right and self.number not in ("too many", "fewer")


def prompts(seed: str, *lengths: int) -> list[list[int]]:
    source = random.Random(f"real connectors: {seed}")
    return [[source.randrange(3, 500) for _ in range(length)] for length in lengths]


# --- truths ---------------------------------------------------------------------------------------


def vua_truth(case: Case, folder: Path, requests: list[list[int]]) -> Truth:
    """A record lies under the hash of all tokens before its end and holds the last rows before it."""
    total, files = 0, list((folder / "store").rglob("*.safetensors"))
    for tokens in requests:
        found = [True] * len(tokens)
        for rank in range(case.ranks):
            for layer in range(LAYERS):
                here = [False] * len(tokens)
                for end in range(BLOCK, len(tokens) + 1, BLOCK):
                    name = hashlib.sha1(b"".join(t.to_bytes(8, "little") for t in tokens[:end])).hexdigest()
                    file = (
                        folder
                        / "store"
                        / f"{rank}%{name}"
                        / f"model.layers.{layer}.self_attn.attn.safetensors"
                    )
                    if file.exists():
                        here[end - _rows(file) : end] = [True] * _rows(file)
                found = [a and b for a, b in zip(found, here, strict=True)]
        total += sum(found)
    empty = sum(_rows(file) == 0 for file in files)
    return Truth(total, f"rows of its {len(files)} files ({empty} of them empty), by prefix")


def _shape(file: Path) -> list[int]:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [int(size) for size in next(iter(header.values()))["shape"]]


def _rows(file: Path) -> int:
    return _shape(file)[1]


def _first(file: Path) -> int:
    return _shape(file)[0]


def kvblockd_truth(case: Case, folder: Path, requests: list[list[int]]) -> Truth:
    """Blobs that the stand-in for its daemon holds at the end: a block of all layers each."""
    if case.server == "down":
        return Truth(0, "nothing listens on the port")
    blobs = json.loads((folder / "blobs.json").read_text(encoding="utf-8"))
    return Truth(len(blobs) * BLOCK, f"{len(blobs)} blobs in the server, a block of {BLOCK} tokens each")


DECLINED = "materialization_rejected_no_safe_plan"


def semblend_truth(case: Case, folder: Path, requests: list[list[int]]) -> Truth:
    """A folder for each request that it captured, a file for each layer in it."""
    captured = [path for path in (folder / "store").iterdir() if path.is_dir()]
    counts = []
    for path in captured:
        files = list(path.glob("*.safetensors"))
        counts.append(min(map(_rows, files)) if len(files) == LAYERS else 0)
    how = f"rows of the files of {len(captured)} captured prompts"
    audit = folder / "store.audit"
    said = audit.read_text(encoding="utf-8").splitlines() if audit.exists() else []
    declined = [one["reason"] for one in map(json.loads, said) if one["event"] == DECLINED]
    return Truth(sum(counts), how + (f"; declined in its audit file: {', '.join(declined)}" if said else ""))


def example_truth(case: Case, folder: Path, requests: list[list[int]]) -> Truth:
    """A folder for each prompt, under the hash of its whole blocks; a file for each layer in it."""
    folders = [path for path in (folder / "store").iterdir() if path.is_dir()]
    counts = []
    for path in folders:
        files = list(path.glob("*.safetensors"))
        counts.append(min(_first(file) for file in files) if len(files) == LAYERS else 0)
    return Truth(sum(counts), f"rows of the files of {len(folders)} prompts")


def avp_truth(case: Case, folder: Path, requests: list[list[int]]) -> Truth:
    """A folder for each prompt, with the number of its tokens, and a file for each layer."""
    told = sorted((folder / "store").glob("*/meta.txt"))
    whole = [meta for meta in told if len(list(meta.parent.glob("layer_*.pt"))) == LAYERS]
    tokens = sum(int(meta.read_text(encoding="utf-8").split()[0]) for meta in whole)
    return Truth(tokens, f"what the {len(told)} folders of its store say of their layers' files")


def nothing_truth(case: Case, folder: Path, requests: list[list[int]]) -> Truth:
    return Truth(0, "it has no store")


def lmcache_truth(case: Case, folder: Path, requests: list[list[int]]) -> Truth:
    """A file for each chunk, of all layers, without a header."""
    files = [path for path in (folder / "store").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return Truth(size // BYTES, f"{size:,} bytes in {len(files)} files, {BYTES:,} a token")


def offload_truth(case: Case, folder: Path, requests: list[list[int]]) -> Truth:
    """Blocks of its host memory that hold something at the end, in all layers."""
    count = json.loads((folder / "count.json").read_text(encoding="utf-8"))
    return Truth(count * BLOCK, f"{count} blocks of {BLOCK} tokens in its host memory are not zero")


# --- runs -----------------------------------------------------------------------------------------

VUA_ABOVE = (700, 1100, 600, 2000, 1536, 900)
VUA: dict[str, Any] = {
    "connector": "VUAHere", "module": "vua_here", "truth": vua_truth,
    "extra": {"shared_storage_path": "@PLACE@"},
}  # fmt: skip
UNIT = {"max_num_batched_tokens": 512}
GRANULARITY = frozenset({"below-save-granularity"})
KVBLOCKD: dict[str, Any] = {
    "connector": "KvblockdConnector", "module": "vllm_kvblockd.connector", "truth": kvblockd_truth,
    "extra": {"kvblockd_endpoint": "@PLACE@"},
    "env": {"PYTHONHASHSEED": "0"}, "engine": {"disable_hybrid_kv_cache_manager": True},
}  # fmt: skip
SEMBLEND: dict[str, Any] = {
    "connector": "SemBlendVllmConnector", "module": "semblend_vllm_connector.connector",
    "truth": semblend_truth,
}  # fmt: skip


EXAMPLE: dict[str, Any] = {
    "connector": "ExampleConnector", "module": "", "truth": example_truth,
    "extra": {"shared_storage_path": "@PLACE@"},
}  # fmt: skip
OFFLOADING = {"spec_name": "HostSpec", "spec_module_path": "offloading_here", "cpu_bytes_to_use": 64 << 20}


def cases() -> list[Case]:
    return [*_vua_cases(), *_others(), *_of_vllm(), *_avp_cases(), *_lmcache_cases(), *_nixl_cases()]


def _vua_cases() -> list[Case]:
    above, five = prompts("above", *VUA_ABOVE), prompts("in one step", 300, 700, 400, 1100, 600)
    twice = prompts("twice", 700, 1100, 600)
    return [
        Case("vua-below", "VUA, all prompts below the unit of 512",
             "nothing is stored but empty files under the key of the empty prefix",
             first=GRANULARITY, limit=True,
             rounds=[Round(prompts("below", 100, 300, 200, 450, 120, 380))], engine=UNIT, **VUA),
        Case("vua-one-by-one", "VUA, prompts above the unit, one after another",
             "whole units are stored; each prompt's remainder is not",
             first=GRANULARITY, limit=True, rounds=[Round(above)], engine=UNIT, **VUA),
        Case("vua-repeated", "VUA, the same prompts again",
             "the second time the units are loaded; each prompt's remainder is not stored",
             first=GRANULARITY, limit=True, rounds=[Round(twice), Round(twice)], engine=UNIT, **VUA),
        Case("vua-in-one-step", "VUA, several prompts in one step",
             "most is lost by rounding (two prompts below the unit, three remainders: 1,052 tokens); futures "
             "are kept by layer, so one request's copy replaces another's",
             first=frozenset({"slots-short", "save-lost"}),
             rounds=[Round(five, together=True, max_tokens=1)], engine=UNIT, **VUA),
        Case("vua-exact", "VUA, prompts of exactly one unit",
             "everything is stored",
             rounds=[Round(prompts("exact", 512, 512, 512), max_tokens=1)], engine=UNIT, **VUA),
        Case("vua-tp2", "VUA, tensor parallel size 2",
             "whole units are stored by both ranks; each prompt's remainder is not",
             first=GRANULARITY, limit=True, rounds=[Round(prompts("two ranks", 700, 1100, 600))],
             engine={**UNIT, "tensor_parallel_size": 2}, **VUA),
    ]  # fmt: skip


def _others() -> list[Case]:
    few = prompts("few", 300, 130, 500, 96)
    return [
        Case("kvblockd-up", "vllm-kvblockd 0.1.0, its server answers",
             "every whole block before a prompt's last token is stored, and loaded again",
             rounds=[Round(few), Round(few[:2])], server="up", **KVBLOCKD),
        Case("kvblockd-down", "vllm-kvblockd 0.1.0, nothing answers",
             "every put fails with ConnectionRefusedError, which is swallowed",
             first=frozenset({"store-failed", "exception-swallowed"}), rounds=[Round(few)], server="down",
             **KVBLOCKD),
        Case("semblend-default", "semblend-vllm-connector 0.2.8 as it comes",
             "it looks for similar prompts and stores nothing",
             first=frozenset({"metadata-has-no-store", "connector-disabled-itself"}), limit=True,
             rounds=[Round(prompts("long", 600, 700))], extra={"kv_storage_path": "@PLACE@"}, **SEMBLEND),
        Case("semblend-exact", "semblend-vllm-connector 0.2.8, mode exact_prefix",
             "prompts are captured; the lookup finds the one with the same tokens, and declines it "
             "(no_block_refs): nothing is ever loaded",
             first=frozenset({"key-mismatch"}),
             rounds=[Round(prompts("long", 600, 700)), Round(prompts("long", 600))],
             extra={"kv_storage_path": "@PLACE@", "mode": "exact_prefix", "min_prompt_tokens": 128,
                    "audit_path": "@PLACE@.audit"},
             **SEMBLEND),
        Case("offload", "vLLM's SimpleCPUOffloadConnector, its device copy replaced",
             "every full block is stored in host memory, by another thread",
             connector="OffloadHere", module="offload_here", truth=offload_truth,
             rounds=[Round(few), Round(few[:2])], engine={"enable_prefix_caching": True},
             extra={"cpu_bytes_to_use": 64 << 20, "count_file": "@COUNT@"}),
    ]  # fmt: skip


def _of_vllm() -> list[Case]:
    few = prompts("few", 300, 130, 500, 96)
    children = [
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
         "kv_connector_extra_config": EXAMPLE["extra"]},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
         "kv_connector_extra_config": {**OFFLOADING, "count_file": "@COUNT@"}},
    ]  # fmt: skip
    return [
        Case("example", "vLLM's ExampleConnector",
             "every whole block before a prompt's last token is stored, and loaded again",
             first=GRANULARITY, limit=True, rounds=[Round(few), Round(few[:2])], **EXAMPLE),
        Case("example-in-one-step", "vLLM's ExampleConnector, several prompts in one step",
             "every whole block before a prompt's last token is stored",
             first=GRANULARITY, limit=True, rounds=[Round(few, together=True)], **EXAMPLE),
        Case("example-chunked", "vLLM's ExampleConnector, prompts above the chunk of 256",
             "of a prompt that comes in chunks the first one is stored",
             first=frozenset({"first-chunk-only"}), limit=True,
             rounds=[Round(prompts("chunked", 700, 500, 130))],
             engine={"max_num_batched_tokens": 256}, **EXAMPLE),
        Case("offloading", "vLLM's OffloadingConnector, its device copy replaced",
             "every full block is stored in host memory, by address, and loaded again",
             connector="OffloadingConnector", module="", truth=offload_truth,
             first=GRANULARITY, limit=True, rounds=[Round(few), Round(few[:2])],
             extra={**OFFLOADING, "count_file": "@COUNT@"}),
        Case("multi", "vLLM's MultiConnector of ExampleConnector and OffloadingConnector",
             "both store every full block, the first one without the block of a prompt's last token",
             connector="MultiConnector", module="", truth=offload_truth,
             first=GRANULARITY, limit=True, rounds=[Round(few), Round(few[:2])],
             extra={"connectors": children}),
        Case("decode-bench", "vLLM's DecodeBenchConnector",
             "it fills the cache of every prompt with a constant, and stores nothing by design",
             connector="DecodeBenchConnector", module="", truth=nothing_truth, rounds=[Round(few)],
             limit=True, first=frozenset({"kv-load-wrong"})),
    ]  # fmt: skip


def _avp_cases() -> list[Case]:
    few = prompts("few", 300, 130, 500, 96)
    avp: dict[str, Any] = {
        "connector": "AvpHere", "module": "avp_here", "truth": avp_truth,
        "extra": {"avp_store_dir": "@PLACE@"}, "first": frozenset({"save-never-finished"}),
    }  # fmt: skip
    return [
        Case("avp", "avp 0.6.2, its layout adapted",
             "every prompt is stored; request_finished keeps its blocks, and nothing ever gives them back: "
             "the class has no get_finished",
             rounds=[Round(few)], **avp),
        Case("avp-in-one-step", "avp 0.6.2, the same, several prompts in one step",
             "each prompt is stored, all but the first of a step under a key made of its blocks' numbers; "
             "their blocks as above", rounds=[Round(few, together=True)], **avp),
    ]  # fmt: skip


def _lmcache_cases() -> list[Case]:
    few = prompts("few", 300, 130, 500, 96)
    files = {
        "lmcache.chunk_size": 64, "lmcache.local_cpu": False, "lmcache.max_local_cpu_size": 0.25,
        "lmcache.local_disk": "@PLACE@", "lmcache.max_local_disk_size": 1,
    }  # fmt: skip
    lmcache: dict[str, Any] = {
        "connector": "LMCacheHere", "module": "lmcache_here", "truth": lmcache_truth, "extra": files,
        "env": {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}, "limit": True,
        "first": GRANULARITY,
    }  # fmt: skip
    return [
        Case("lmcache", "LMCache 0.5.6, its device copy replaced, chunks of 64 in files",
             "whole chunks are stored, and loaded again",
             rounds=[Round(few), Round(few[:2])], **lmcache),
        Case("lmcache-in-one-step", "LMCache 0.5.6, the same, several prompts in one step",
             "whole chunks are stored", rounds=[Round(few, together=True)],
             **{**lmcache, "engine": {"max_num_batched_tokens": 512}}),
    ]  # fmt: skip


def _nixl_cases() -> list[Case]:
    return [
        Case("nixl", "NIXL 1.5.1, vLLM's NixlConnector between two engines, by UCX on this machine",
             "the first engine computes each prompt, the second one fetches its KV; nothing is stored",
             connector="NixlConnector", module="", truth=nothing_truth, script="pair.py",
             rounds=[Round(prompts("few", 300, 130, 500, 96), max_tokens=4)]),
    ]  # fmt: skip


class Runs:
    """Makes the runs, each in processes of its own."""

    def __init__(self, out: Path, vua: Path | None) -> None:
        self.out, self.vua = out, vua
        self.python = out / "environment" / "bin" / "python"
        self.model = CACHE / "tiny-model"

    def prepare(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        _call([sys.executable, str(ROOT / "scripts" / "tiny_model.py"), str(self.model)])
        if not self.python.exists():
            _call([sys.executable, "-m", "venv", str(self.out / "environment")])
            # vLLM and kvtrace are those of this clone
            site = next(path for path in sys.path if path.endswith("site-packages"))
            target = next((self.out / "environment" / "lib").glob("python*/site-packages"))
            (target / "clone.pth").write_text(f"import site; site.addsitedir({site!r})\n", encoding="utf-8")
            _call([str(self.python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES])

    def run(self, case: Case, again: bool) -> Result:
        """Runs a case (not so ``again``) and compares what was said of it with its truth."""
        began = time.monotonic()
        folder = self.out / case.name
        result = Result(case)
        try:
            if not again:
                shutil.rmtree(folder, ignore_errors=True)
                (folder / "store").mkdir(parents=True)
                with self._served(case, folder) as place:
                    self._trace(case, folder, place)
            self._judge(case, folder, result)
        except Exception as error:
            result.problem = f"{type(error).__name__}: {error}"[:300]
        result.seconds = time.monotonic() - began
        return result

    @contextmanager
    def _served(self, case: Case, folder: Path) -> Iterator[str]:
        """What the connector is told of its store."""
        if not case.server:
            yield str(folder / "store")
        elif case.server == "down":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            yield f"kvblockd://127.0.0.1:{port}"
        else:
            command = [str(self.python), str(HERE / "kvb_server.py"), str(folder / "blobs.json")]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            try:
                yield f"kvblockd://127.0.0.1:{int(server.stdout.readline())}"
            finally:
                server.communicate()

    def _trace(self, case: Case, folder: Path, place: str) -> None:
        extra = _filled(case.extra, {"@PLACE@": place, "@COUNT@": str(folder / "count.json")})
        transfer = {
            "kv_connector": case.connector, "kv_role": "kv_both", "kv_connector_extra_config": extra,
            **({"kv_connector_module_path": case.module} if case.module else {}),
        }  # fmt: skip
        spec = {
            "llm": {**ENGINE, **case.engine, "model": str(self.model), "kv_transfer_config": transfer},
            "rounds": [vars(part) for part in case.rounds],
            "outcome": str(folder / "outcome.json"),
        }
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        env = {**vllm_env(), **case.env, "OMP_NUM_THREADS": "1"}
        env["PATH"] = os.pathsep.join([str(self.python.parent), env["PATH"]])
        modules = [str(HERE), *([str(self.vua / "src")] if self.vua else [])]
        env["PYTHONPATH"] = os.pathsep.join([*modules, env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        if case.ranks == 1 and case.script == "work.py":
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        command = [str(self.python), "-m", "kvtrace", "run", "-o", str(folder / "trace"), "--name", case.name]
        command += ["--", str(self.python), str(HERE / case.script), str(folder / "spec.json")]
        with (folder / "log").open("w") as log:
            subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=540)

    def _judge(self, case: Case, folder: Path, result: Result) -> None:
        outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
        if outcome["error"]:
            raise RuntimeError(f"the engine ended: {outcome['error']}")
        sent = [prompt for part in case.rounds for prompt in part.prompts]
        whole = [prompt + answer[:-1] for prompt, answer in zip(sent, outcome["answers"], strict=True)]
        seen: set[tuple[int, ...]] = set()
        once = [one for one in whole if not (tuple(one) in seen or seen.add(tuple(one)))]
        result.truth = case.truth(case, folder, once)
        result.take(build_report(folder / "trace"))


def _filled(value: Any, words: dict[str, str]) -> Any:
    """An option with the places of this run in it."""
    if isinstance(value, dict):
        return {name: _filled(one, words) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, words) for one in value]
    for word, place in words.items() if isinstance(value, str) else ():
        value = value.replace(word, place)
    return value


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, env=vllm_env(), stdout=subprocess.DEVNULL)


# --- report ---------------------------------------------------------------------------------------


def tokens(count: float | None) -> str:
    return "unknown" if count is None else f"{count:,.10g}"


def _recorded(out: Path, results: list[Result]) -> str:
    """When the runs of a page that is made anew were recorded."""
    days = set()
    for one in results:
        run = json.loads((out / one.case.name / "trace" / "run.json").read_text(encoding="utf-8"))
        days.add(time.strftime("%Y-%m-%d", time.gmtime(run["started_wall_ns"] / 1e9)))
    return f"They were recorded on {', '.join(sorted(days))}, and are explained by this commit."


def page(results: list[Result], left_out: list[Case], recorded: str = "") -> str:
    """The report, as Markdown."""
    right = sum(result.right for result in results)
    lines = [
        "# Real connectors",
        "",
        "<!-- written by python scripts/real_connectors.py -->",
        "",
        "Connectors that kvtrace was not written for, on vLLM's CPU build, each with a truth of its own:",
        "what lies in its store after the run, read without kvtrace. A run is right if the first finding is",
        "one that an engineer would name (no fault where there is none), if no more than the tokens at rest",
        "are called written or proved, and no less were seen.",
        "",
        f"**{right} of {len(results)} runs are right.**" + (f" {recorded}" if recorded else ""),
        "",
        "| run | what is true | tokens at rest | called saved | first finding | right |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        if one.problem:
            lines.append(f"| {one.case.title} | {one.case.about} | | | did not run: {one.problem} | no |")
            continue
        assert one.truth is not None
        grades = ", ".join(f"{tokens(n)} {name}" for name, n in one.grades.items()) or "0"
        lines.append(
            f"| {one.case.title} | {one.case.about} | {tokens(one.truth.tokens)}: {one.truth.how} | {grades} "
            f"({one.number}) | {one.first} | {'yes' if one.right else 'no'} |"
        )
    lines += ["", "## What was said", ""]
    for one in results:
        if not one.problem:
            book = ", ".join(f"{name} {tokens(n)}" for name, n in one.accounts.items())
            lines += [f"- **{one.case.title}**: {', '.join(one.findings) or 'no finding'}. Tokens: {book}."]
    lines += ["", "## What was not run", ""]
    lines += [f"- {case.title}: no source was given (--vua)." for case in left_out]
    lines += [f"- {text}" for text in NOT_RUN]
    lines += ["", "## What is known beside it", "", *(f"- {text}" for text in NOTED)]
    return "\n".join(lines) + "\n"


NOT_RUN = (
    "vllm-marconi-offload 0.2.2: its connector imports here; its worker asks for CUDA streams and for "
    "`cudaHostRegister` and was not started. Its copy thread is that of SimpleCPUOffloadConnector, "
    "above.",
    "LMCache as it comes: `lmcache.v1.gpu_connector.CreateGPUConnector` raises `RuntimeError: No "
    "supported cpu connector found.`, so its copy is replaced above. Its package must be imported after "
    "the worker began (`AttributeError: '_lib_fn_wrapper' object has no attribute 'get'` in "
    "`vllm/triton_utils/dispatcher.py`). vLLM's LMCacheConnectorV1 does not pass `shutdown` on: with "
    "the engine in its own process, that process never ended until it did.",
    "LMCacheMPConnector with `lmcache server`, which is said to work on a CPU: `lmcache server --help` "
    "runs; no engine was tried with it.",
    "MooncakeConnector and MooncakeStore: mooncake-transfer-engine-non-cuda 0.3.13.post1 imports once "
    "Debian's libibverbs1, librdmacm1 and libnuma1 are there (`ImportError: libibverbs.so.1` before); "
    "no engine was tried with it.",
    "NIXL with a host buffer: vLLM turns it off where the device is the CPU (`use_host_buffer = "
    "False`); the run above hands over the KV cache itself. What the second engine fetched is no part "
    "of the table: its four loads had no fault.",
)
NOTED = (
    "LMCache's lookup client may end its ZeroMQ context and never come back, so that `shutdown` hangs until "
    "it is killed: on 2026-11-22 it did, twice, and hook-stuck said so. In the run above it did not. Started "
    "by hand, the same script aborted at that place then (`Assertion failed: _term_acks > 0`), without "
    "kvtrace (4 of 4 times) as with it (2 of 2).",
    "VUA, tensor parallel size 2, once on a busy machine: the second rank's background write of a unit "
    "was not done when the next step stored the same key again, with 0 rows; that empty record's header "
    "went over the first one's. The bytes of the KV stand in the file, and kvtrace calls 2,048 tokens "
    "proved; read as a safetensors file it has no rows: 1,536. In the run above it did not happen.",
    "VUA, several prompts in one step: the tokens that were read and are not at rest are the first ones of "
    "requests that began in the rest of a step, in one of four layers: the three others are said to be lost "
    "(save-lost). In the first layer KV depends on token and position alone, and a few of these rows stand "
    "in another prompt's file, too.",
    "vllm-kvblockd without a server: the 672 tokens are said to be read, and no more: its thread, which "
    "began in the first step, caught the same ConnectionError for them; kvtrace counts an exception of "
    "a thread for the step that the thread began in.",
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="environment, stores and traces; kept")
    parser.add_argument("--vua", type=Path, metavar="SOURCE", help="a checkout of VUA")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--report", type=Path, metavar="FILE", help="[reports/real-connectors.md of DIR]")
    parser.add_argument("--again", action="store_true", help="no engine: explain what DIR holds anew")
    args = parser.parse_args()
    if args.vua is not None and not (args.vua / "src" / "vua").is_dir():
        parser.error(f"{args.vua} holds no src/vua")
    return args


def main() -> int:
    args = options()
    wanted = [case for case in cases() if not args.only or any(word in case.name for word in args.only)]
    left_out = [
        case for case in wanted if case.connector == "VUAHere" and args.vua is None and not args.again
    ]
    runs = Runs(args.out.resolve(), args.vua.resolve() if args.vua else None)
    if not args.again:
        runs.prepare()
    results = []
    for case in (case for case in wanted if case not in left_out):
        result = runs.run(case, args.again)
        results.append(result)
        rest = result.truth.tokens if result.truth else None
        print(
            f"{case.name:<18}{'right' if result.right else 'WRONG':<7}first {result.first:<26}"
            f"saved {result.grades} at rest {tokens(rest)} {result.problem} ({result.seconds:.0f} s)",
            flush=True,
        )
    recorded = _recorded(runs.out, results) if args.again else ""
    file = args.report or runs.out / "real-connectors.md"
    file.write_text(page(results, left_out, recorded), encoding="utf-8")
    print(f"real connectors: runs={len(results)} right={sum(result.right for result in results)}")
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
