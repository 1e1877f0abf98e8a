"""A user's script with the probing connector: python probed.py MODEL FOLDER. What is left of the engine when
it is let go stands in FOLDER/after.json."""

import gc
import json
import sys
import weakref
from pathlib import Path

from small_engine import start, storing
from vllm import SamplingParams


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True)
    transfer = storing(folder / "store")
    engine = start(
        model, "Probing", "probing", transfer=transfer, max_model_len=512, max_num_batched_tokens=256
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for prompt in (list(range(10, 110)), list(range(200, 240)), list(range(10, 110))):
        engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    core = engine.llm_engine.engine_core.engine_core
    left = {"scheduler": weakref.ref(core.scheduler), "connector": weakref.ref(core.scheduler.connector)}
    core.shutdown()
    del core, engine
    gc.collect()
    (folder / "after.json").write_text(json.dumps({name: ref() is None for name, ref in left.items()}))


if __name__ == "__main__":
    main()
