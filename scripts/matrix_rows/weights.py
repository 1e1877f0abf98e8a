"""The models of the rows: ``python -m matrix_rows.weights NAME OUT``, in a process that needs torch.

A maker gets a folder and fills it once; a second call leaves what is finished as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tiny_model
import tiny_models


def make_lora(path: Path) -> None:
    """The tiny model, and in ``adapter`` a LoRA of rank 8 for two of its projections."""
    import torch
    from safetensors.torch import save_file

    tiny_model.make_tiny_model(path)
    size, heads = int(tiny_model.RECIPE["hidden"]), int(tiny_model.RECIPE["heads"])
    out = {"q_proj": heads * int(tiny_model.RECIPE["head_dim"]),
           "v_proj": int(tiny_model.RECIPE["kv_heads"]) * int(tiny_model.RECIPE["head_dim"])}  # fmt: skip
    source = torch.Generator().manual_seed(8)
    weights = {}
    for layer in range(int(tiny_model.RECIPE["layers"])):
        for name, width in out.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = 0.1 * torch.randn((8, size), generator=source)
            weights[f"{at}.lora_B.weight"] = 0.1 * torch.randn((width, 8), generator=source)
    folder = path / "adapter"
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": sorted(out), "bias": "none",
              "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "lora_dropout": 0.0}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def make_eagle(path: Path) -> None:
    """The tiny model, and in ``draft`` an EAGLE head for it: one layer of its own, the rest is shared."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_model.make_tiny_model(path)
    config = LlamaConfig.from_pretrained(path)
    config.num_hidden_layers = 1
    config.architectures = ["LlamaForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        layers = LlamaForCausalLM(config).to(torch.bfloat16).model.layers.state_dict()
        fc = 0.1 * torch.randn((config.hidden_size, 2 * config.hidden_size), dtype=torch.bfloat16)
    # the first layer of a head has no norm at its input
    weights = {f"layers.{name}": one for name, one in layers.items() if "input_layernorm" not in name}
    folder = path / "draft"
    folder.mkdir(exist_ok=True)
    save_file({**weights, "fc.weight": fc}, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


MAKERS: dict[str, Callable[[Path], object]] = {
    "eagle": make_eagle,
    "lora": make_lora,
    "tiny": tiny_model.make_tiny_model,
    **{name: partial(tiny_models.make_tiny, name) for name in tiny_models.KINDS},
}


def main() -> int:
    name, out = sys.argv[1:]
    MAKERS[name](Path(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
