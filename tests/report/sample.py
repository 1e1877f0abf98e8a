"""A report by hand: the flagship case."""

from __future__ import annotations

import copy
from typing import Any

from kvtrace.report.model import Report
from kvtrace.words import count

UNIT = 2048
LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(4)]
RANKS = [0, 1]
PAIRS = len(LAYERS) * len(RANKS)
STEPS = 212
PROMPTS = [180, 910, *[1914] * 26, *[1913] * 4, 2210, 2100]
OUTPUTS = [119] * 32 + [118] * 2  # the last token made has no KV

PROMPT = sum(PROMPTS)
SAVED = sum(prompt // UNIT * UNIT for prompt in PROMPTS)
DECODE = sum(output - 1 for output in OUTPUTS)
BELOW = PROMPT - SAVED
TOTAL = PROMPT + DECODE

WORKER_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "clear_connector_metadata",
)


def _counts(process: str, rank: int | None, layer: str | None, **more: Any) -> dict[str, Any]:
    """Of a hook or an operation that came in every step."""
    return {"process": process, "rank": rank, "layer": layer, "eligible": STEPS, "fired": STEPS, **more}


def _hooks() -> list[dict[str, Any]]:
    rows = [_counts("engine core", None, None, hook="build_connector_meta", with_work=2, raised=0)]
    for hook in (*WORKER_HOOKS, "wait_for_layer_load", "save_kv_layer"):
        stores = hook in ("bind_connector_metadata", "wait_for_save", "save_kv_layer")
        rows += [
            _counts(f"worker {rank}", rank, layer, hook=hook, with_work=2 if stores else 0, raised=0)
            for rank in RANKS
            for layer in ([None] if hook in WORKER_HOOKS else LAYERS)
        ]
    return rows


def _ops() -> list[dict[str, Any]]:
    return [
        _counts(f"worker {rank}", rank, layer, op=op, direct=0)
        for op in ("unified_attention_with_output", "unified_kv_cache_update")
        for rank in RANKS
        for layer in LAYERS
    ]


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = out.setdefault(
            row["hook"],
            {"hook": row["hook"], "eligible": 0, "fired": 0, "with_work": 0, "share": 1.0, "idle": False},
        )
        for name in ("eligible", "fired", "with_work"):
            one[name] += row[name]
    return list(out.values())


def _requests() -> list[dict[str, Any]]:
    rows = []
    for number, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        saved = prompt // UNIT * UNIT
        rows.append(
            {
                "id": f"cmpl-{number:04x}-0-a1b2",
                "client": f"cmpl-{number:04x}",
                "engine": 1,
                "prompt": prompt,
                "computed": prompt + output - 1,
                "output": output,
                "local": 0,
                "external": 0,
                "chunks": 1 + (prompt > UNIT),
                "chunk_tokens": [min(prompt, UNIT), *([prompt - UNIT] if prompt > UNIT else [])],
                "saved": float(saved),
                "not_saved": float(prompt + output - 1 - saved),
                "verdict": "below-save-granularity",
                "status": "FINISHED_LENGTH_CAPPED",
                "first_step": 1 + number * 2,
                "last_step": min(STEPS, 1 + number * 2 + output),
                "block": 32,
                "sent": 0.0,
                "grade": None,
                "not_observed": 0.0,
            }
        )
    return sorted(rows, key=lambda row: -row["not_saved"])


def _book(tokens: dict[str, int], trust: str, trust_note: str, **more: Any) -> dict[str, Any]:
    """A ledger of tokens that came to the same in each layer and on each rank."""
    total = sum(tokens.values())
    return {
        "unit": "token-layers",
        "total": total * PAIRS,
        "accounts": {name: amount * PAIRS for name, amount in tokens.items()},
        "pairs": PAIRS,
        "tokens": {name: float(amount) for name, amount in tokens.items()},
        "total_tokens": float(total),
        "trust": trust,
        "trust_note": trust_note,
        "sent": [],
        "grades": {},
        "prompts": {},
        **more,
    }


def _time(hook: str, calls: int, p50: int, p99: int, total: int, share: float) -> dict[str, Any]:
    times = {"p50_ns": p50, "p99_ns": p99, "total_ns": total, "share_of_steps": share}
    return {"hook": hook, "clock": "host", "count": calls, **times}


def _target(name: str, module: str, attr: str, processes: int, missing: str = "") -> dict[str, Any]:
    """``missing``: why it is."""
    status = "missing" if missing else "found"
    where = {"id": name, "module": module, "attr": attr}
    return {**where, "status": status, "processes": processes, "detail": missing}


def _stage(number: int, name: str, note: str) -> dict[str, Any]:
    return {
        "stage": number,
        "name": name,
        "in": PROMPT if number <= 1 else SAVED,
        "out": PROMPT if number == 0 else SAVED,
        "note": note,
    }


def _finding(id: str, severity: str, stage: int, tokens: int, requests: int, **words: Any) -> dict[str, Any]:
    return {
        "id": id,
        "severity": severity,
        "stage": stage,
        "tokens": float(tokens),
        "share": tokens / TOTAL,
        "requests": requests,
        "evidence": [],
        "events": [],
        "remedy": [],
        "versions": "0.8.5 .. 0.33.0",
        "docs": f"docs/causes/{id}.md",
        "headline": "",
        "pattern": "",
        "connector": "",
        "grade": None,
        **words,
    }


def _process(pid: int, name: str, role: str, rank: int | None, records: int) -> dict[str, Any]:
    """``records`` 0: of one that is not traced."""
    return {
        "pid": pid,
        "name": name,
        "role": role,
        "rank": rank,
        "spool": f"spool/{role}-{pid}.kvt" if records else None,
        "records": records,
        "end": "open" if records else "",
        "agent": bool(records),
    }


def sample() -> Report:
    """The flagship report; a fresh copy each time."""
    hooks = _hooks()
    report: dict[str, Any] = {
        "schema": "kvtrace.report/2",
        "run": {
            "name": "vua",
            "command": ["vllm", "serve", "tiny", "--max-num-batched-tokens", "2048", "--api-key", "***"],
            "started": "2026-11-20T18:15:00+00:00",
            "seconds": 61.2,
            "exit_code": 0,
            "signal": None,
            "kvtrace": "0.1.0",
            "vllm": "0.32.0",
            "torch": "2.13.0+cpu",
            "python": "3.11.7",
            "host": "laptop",
            "processes": [
                _process(101, "engine core", "scheduler", None, 2210),
                _process(102, "worker 0", "worker", 0, 5830),
                _process(103, "worker 1", "worker", 1, 5830),
            ],
            "engines": [
                {
                    "tag": 1,
                    "dp_rank": 0,
                    "platform": "cpu",
                    "model": "tiny",
                    "connector": {
                        "name": "ChunkStore",
                        "class": "ChunkStore",
                        "module": "my_store.connector",
                        "file": "my_store/connector.py",
                        "role": "kv_both",
                    },
                    "tp": 2,
                    "pp": 1,
                    "block_size": 32,
                    "prefix_caching": False,
                    "max_num_batched_tokens": UNIT,
                    "chunked_prefill": True,
                    "enforce_eager": True,
                    "cudagraph_mode": "NONE",
                    "kv_layers": len(LAYERS),
                    "pairs": PAIRS,
                    "ranks": RANKS,
                    "steps": STEPS,
                    "real_steps": STEPS,
                    "requests": len(PROMPTS),
                    "dp": 1,
                    "attention": ["CPU_ATTN"],
                    "runner": "V1",
                    "graphs_asked": "default",
                    "graphs_used": "NONE",
                    "direct_calls": 0,
                    "kv_groups": [],
                }
            ],
        },
        "verdict": f"{count(SAVED)} of {count(PROMPT)} prompt tokens computed here (6.5 %) were read by "
        "the connector, and whether they come back is not known; "
        f"{count(PROMPT - SAVED)} were not saved: 32 of 34 "
        f"prompts are shorter than this connector's unit of {UNIT} tokens.",
        "instrumentation": {
            "targets": [
                _target(
                    "connector-factory",
                    "vllm.distributed.kv_transfer.kv_connector.factory",
                    "KVConnectorFactory.create_connector",
                    3,
                ),
                _target(
                    "op-unified-attention", "vllm.attention.layer", "unified_attention", 2, "gone from 0.20.0"
                ),
            ],
            "found": 1,
            "missing": 1,
            "failed": 0,
        },
        "coverage": {"hooks": hooks, "ops": _ops(), "summary": _summary(hooks)},
        "stages": [
            _stage(0, "wiring", "connector live in the scheduler and in 2/2 workers"),
            _stage(1, "schedule", ""),
            _stage(2, "bind", ""),
            _stage(3, "forward", "op body ran in 1 696/1 696 layer-steps (4 layers x 2 ranks x 212 steps)"),
            _stage(4, "hook", "save_kv_layer called 1 696 times, 16 times with work"),
            _stage(5, "effect", "measured: slots read from the KV tensors"),
            _stage(6, "completion", ""),
        ],
        "ledger": {
            "saves": _book(
                {
                    "saved": SAVED,
                    "loaded": 0,
                    "not-saved:below-save-granularity": BELOW,
                    "not-saved:decode-not-offered": DECODE,
                },
                "measured",
                "read: seen at the KV cache (its slots were read, or were not); its further "
                "way was not seen; declared: the connector's metadata says so, and nothing else does",
                grades={
                    "saved": {"read": SAVED * PAIRS},
                    "not-saved:below-save-granularity": {
                        "read": BELOW * PAIRS - 512 * PAIRS,
                        "declared": 512 * PAIRS,
                    },
                    "not-saved:decode-not-offered": {"declared": DECODE * PAIRS},
                },
                prompts={
                    "saved": {"read": SAVED},
                    "not-saved:below-save-granularity": {"declared": BELOW},
                },
            ),
            "loads": _book({}, "none", "34 of 34 lookups answered 0"),
        },
        "places": [{"kind": "directory", "name": "/mnt/kv", "files": 16, "size": 4404019, "older": 0}],
        "findings": [
            _finding(
                "below-save-granularity",
                "fault",
                1,
                BELOW,
                34,
                title=f"This connector stores whole units of {UNIT} tokens only: 32 of 34 prompts are "
                "shorter, 2 lose their tail. Prompts here have 180 to 2 210 tokens, median 1 914.",
                evidence=[
                    f"store sizes in the metadata: 0 (32 requests), 2 048 (2), and nothing in between; "
                    f"{UNIT} = max_num_batched_tokens, set by --max-num-batched-tokens"
                ],
                events=[
                    {
                        "request": "cmpl-0001-0-a1b2",
                        "step": 3,
                        "rank": None,
                        "layer": None,
                        "text": "910 prompt tokens scheduled, a store of 0 slots in the metadata",
                    }
                ],
                remedy=[
                    "change the rounding in my_store/connector.py",
                    "or lower --max-num-batched-tokens (for the whole engine: long prompts take more steps)",
                ],
            ),
            _finding(
                "decode-not-offered",
                "limit",
                1,
                DECODE,
                34,
                title="this connector never offers tokens made in decode.",
            ),
        ],
        "ruled_out": [
            {"id": "full-cudagraph-replay", "evidence": "graph mode NONE in 212/212 steps (enforce_eager)"},
            {
                "id": "direct-call-bypass",
                "evidence": "every op went through the hooked body; use_direct_call is False on all layers",
            },
            {
                "id": "connector-not-created",
                "evidence": "created in the scheduler and in 2/2 workers, from my_store/connector.py",
            },
            {
                "id": "local-hit",
                "evidence": "prefix caching is off; 0 tokens reused. With it on, fewer tokens would be "
                "offered, not more",
            },
            {"id": "ranks-diverge", "evidence": "both ranks saved the same tokens"},
        ],
        "not_observed": [{"id": "device-time", "why": "CPU build of vLLM: there is no device clock"}],
        "requests": {"total": len(PROMPTS), "shown": len(PROMPTS), "rows": _requests()},
        "timing": [
            _time("save_kv_layer", STEPS * PAIRS, 2100, 412_000, 18_000_000, 0.0041),
            _time("wait_for_save", STEPS * len(RANKS), 900, 4_100, 600_000, 0.0001),
        ],
        "limits": {
            "notes": ["completion is declared by wait_for_save: writes of background threads are not seen"],
            "lost_records": 0,
            "damaged": [],
            "tracer": {"spool_bytes": 13870 * 64, "records": 13870, "in_c": 3},
        },
    }
    return copy.deepcopy(report)  # type: ignore[return-value]


def with_loads() -> Report:
    """The same engine with a loads ledger, uneven layers and things that went wrong."""
    report = sample()
    report["run"]["exit_code"] = 1
    loaded = {"loaded": 992, "clamped:lookup-clamped": 32}
    note = "slots named in the connector's metadata"
    report["ledger"]["loads"] = _book(loaded, "declared", note)  # type: ignore[typeddict-item]
    for row in report["coverage"]["hooks"]:
        if row["hook"] == "save_kv_layer" and row["layer"] == LAYERS[3]:
            row["fired"] = row["with_work"] = 0
    report["findings"].append(
        _finding(  # type: ignore[arg-type]
            "save-blocks-step",
            "note",
            6,
            0,
            0,
            title="wait_for_save takes 12.0 % of the step.",
            evidence=["median 1.2 ms in steps of 10 ms"],
            remedy=["write in the background, and wait in get_finished"],
        )
    )
    report["limits"]["lost_records"] = 12
    report["limits"]["damaged"] = [{"spool": "spool/worker-103.kvt", "detail": "cut at record 5830"}]
    report["run"]["processes"].append(_process(104, "API server", "front", None, 0))  # type: ignore[arg-type]
    return report


def with_device() -> Report:
    """The same on CUDA: graphs and device times."""
    report = sample()
    mode = {"mode": "FULL", "steps": 4, "tokens": 4, "padded": 8, "layer_steps": 16, "bodies": 0, "saves": 0}
    report["graphs"] = [
        {
            "process": f"worker {rank}", "rank": rank, "runner": "V1", "asked": "default",
            "configured": "FULL_AND_PIECEWISE", "used": "FULL_AND_PIECEWISE", "why": ["a reason"],
            "breakable": False, "captured": 7, "capturing_steps": 0, "modes": [mode],
        }
        for rank in RANKS
    ]  # type: ignore[typeddict-item]  # fmt: skip
    report["device"] = {
        "steps": 2, "calls": 3, "untimed": 1, "lost": 0, "own_ns": 5, "busy_ns": 900,
        "rows": [
            {
                "name": "save_kv_layer", "kind": "hook", "count": 3, "host_p50_ns": 9, "host_p99_ns": 9,
                "host_total_ns": 27, "device_p50_ns": 8, "device_p99_ns": 8, "device_total_ns": 24,
                "other_stream": 1, "behind": 2, "waited": 1,
            }
        ],
    }  # fmt: skip
    return report
