"""One workload on one engine, as any user's script would run it: ``python work.py SPEC.json``.

Knows nothing of kvtrace. SPEC: ``llm`` (keyword arguments of ``LLM(...)``), ``rounds`` (``prompts``: token
ids, ``together``, ``max_tokens``), ``outcome`` (file that gets the answers, in the order of the prompts).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from vllm import LLM, SamplingParams

    llm = LLM(**spec["llm"], disable_log_stats=True)
    answers: list[list[int]] = []
    error = ""
    try:
        for part in spec["rounds"]:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=part["max_tokens"], ignore_eos=True, detokenize=False
            )
            prompts = [{"prompt_token_ids": prompt} for prompt in part["prompts"]]
            for batch in [prompts] if part["together"] else [[prompt] for prompt in prompts]:
                for output in llm.generate(batch, sampling, use_tqdm=False):
                    answers.append(list(output.outputs[0].token_ids))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    Path(spec["outcome"]).write_text(json.dumps({"answers": answers, "error": error}), encoding="utf-8")
    llm.llm_engine.engine_core.shutdown()
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
