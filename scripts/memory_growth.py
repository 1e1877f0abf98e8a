#!/usr/bin/env python3
"""How the memory of an engine's process grows over many requests, traced and untraced.

    python scripts/memory_growth.py [--rounds N] [--page FILE]

A real vLLM in one process (scheduler and worker), with vLLM's ExampleConnector and a tiny model, serves
rounds of 250 short prompts, 500 different ones in turn: the first two rounds store, the others load. Its
resident memory is read after a quarter of the rounds, when all that is made once has been made, and at the
end; once as it is, and once under `kvtrace run`. What grows more when traced is kept by kvtrace.

Exit codes: 0 done, 1 an engine failed. The last line of the output has both growths.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "scripts") not in sys.path:
    sys.path.insert(0, str(ROOT / "scripts"))

from tiny_model import make_tiny_model  # noqa: E402
from vllm_env import CACHE, vllm_env  # noqa: E402

PER_ROUND = 250
DIFFERENT = 500


def resident_kb() -> int:
    """Of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def serve(rounds: int, store: str, out: Path) -> None:
    """In the engine's own process: serve, and write what the memory was."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        str(make_tiny_model(CACHE / "tiny-model")), enforce_eager=True, max_model_len=256, block_size=32,
        max_num_batched_tokens=70 * PER_ROUND, max_num_seqs=PER_ROUND,  # this connector knows no chunks

        enable_prefix_caching=False, disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector", kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": store},
        ),
    )  # fmt: skip
    found = []
    for number in range(rounds):
        first = number * PER_ROUND % DIFFERENT
        prompts = [
            {"prompt_token_ids": [5 + (at * 7 + place) % 500 for place in range(70)]}
            for at in range(first, first + PER_ROUND)
        ]
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
        found.append(resident_kb())
    out.write_text(json.dumps(found), encoding="ascii")


def measured(rounds: int, traced: bool) -> list[int]:
    """Resident memory after each round, in KiB.

    Raises:
        subprocess.CalledProcessError: the engine failed.
    """
    env = {**vllm_env(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        out = Path(folder, "kb.json")
        command = [sys.executable, __file__, "--serve", str(out), "--rounds", str(rounds)]
        if traced:
            command = [sys.executable, "-m", "kvtrace", "run", "-o", str(Path(folder, "run")), "--", *command]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        found: list[int] = json.loads(out.read_text(encoding="ascii"))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 250 requests")
    parser.add_argument("--page", type=Path, help="write the table there, as Markdown")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.rounds, str(args.serve.parent / "store"), args.serve)
        return 0
    quarter = max(1, args.rounds // 4)
    lines = [
        "# Memory of an engine over many requests", "",
        f"Resident memory of the engine's process after {quarter * PER_ROUND:,} and after "
        f"{args.rounds * PER_ROUND:,} requests (`python scripts/memory_growth.py`).", "",
        "| | then, MiB | at the end, MiB | grown by, MiB |", "|---|---|---|---|",
    ]  # fmt: skip
    growths = {}
    try:
        for name, traced in (("untraced", False), ("traced", True)):
            found = measured(args.rounds, traced)
            then, end = found[quarter - 1] / 1024, found[-1] / 1024
            growths[name] = end - then
            lines.append(f"| {name} | {then:.1f} | {end:.1f} | {end - then:.1f} |")
    except subprocess.CalledProcessError as error:
        print(f"memory_growth.py: the engine ended with {error.returncode}", file=sys.stderr)
        return 1
    text = "\n".join(lines) + "\n"
    if args.page:
        args.page.write_text(text, encoding="utf-8")
    print(text)
    print(f"memory: untraced={growths['untraced']:.1f}MiB traced={growths['traced']:.1f}MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
