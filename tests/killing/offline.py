"""A user's script: engines in this process or in forked ones, prompts three at a time, answers on stdout.

python offline.py MODEL STORE PROMPTS [FORKS]

PROMPTS: a JSON list of [index, token ids]. Each answer is a line: ``answer FORK INDEX TOKEN ...``. With
FORKS, so many processes, one after the other, each have an engine of their own; each is forked when the one
before has ended, however that was. ``fork FORK PID`` and ``ended FORK CODE`` say so.
"""

import json
import os
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

from killing.settings import ENGINE, OUTPUT_TOKENS, kv_transfer


def serve(model: str, store: Path, prompts: Path, fork: int) -> None:
    engine = LLM(model=model, kv_transfer_config=kv_transfer(store), **ENGINE)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    todo = json.loads(prompts.read_text())
    for at in range(0, len(todo), 3):
        batch = todo[at : at + 3]
        answers = engine.generate([{"prompt_token_ids": ids} for _, ids in batch], params, use_tqdm=False)
        for (index, _), answer in zip(batch, answers, strict=True):
            print("answer", fork, index, *answer.outputs[0].token_ids, flush=True)


def main() -> None:
    model, store, prompts = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if len(sys.argv) == 4:
        return serve(model, store, prompts, 0)
    for fork in range(int(sys.argv[4])):
        pid = os.fork()
        if not pid:
            print("fork", fork, os.getpid(), flush=True)
            serve(model, store, prompts, fork)
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        print("ended", fork, os.waitstatus_to_exitcode(status), flush=True)
    return None


if __name__ == "__main__":
    main()
