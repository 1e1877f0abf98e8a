#!/usr/bin/env python3
"""Make a tiny Llama-style model with real random weights, and a tokenizer: locally, no network.

    python scripts/tiny_model.py OUT

Random weights with a wide spread, not vLLM's dummy ones: those give flat logits, in which a corrupted
KV cache does not show. One word of the vocabulary is one token, so that a prompt of N words has exactly
N tokens. The same call gives the same bytes; a finished model is left as it is.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RECIPE: dict[str, Any] = {
    "version": 1,
    "seed": 20261120,
    "vocab": 512,
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 256,
    "max_position": 4096,
    "initializer_range": 0.15,
}
DONE = "kvtrace-tiny-model.json"
"""Written last: the recipe that the folder was made by."""

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def words() -> list[str]:
    """The vocabulary without its special tokens: 508 words of two syllables."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    return [
        "".join(pair)
        for pair in itertools.islice(itertools.product(syllables, repeat=2), RECIPE["vocab"] - 4)
    ]


def is_made(path: Path, recipe: Mapping[str, Any] = RECIPE) -> bool:
    try:
        return bool(json.loads((path / DONE).read_text(encoding="utf-8")) == recipe)
    except (OSError, ValueError):
        return False


def make_tiny_model(path: Path | str) -> Path:
    """Make the model at ``path`` unless it is there already, and return the path.

    An older model of this script is replaced; any other non-empty folder is a ``FileExistsError``.
    """

    def write(folder: Path) -> None:
        write_tokenizer(folder)
        _write_weights(folder)

    return make_folder(Path(path), RECIPE, write)


def make_folder(path: Path, recipe: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """As make_tiny_model: the folder of that recipe, which ``write`` fills."""
    if is_made(path, recipe):
        return path
    if path.exists() and any(path.iterdir()) and not (path / DONE).exists():
        raise FileExistsError(f"{path} is there and was not made by tiny_model.py; name another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    try:
        write(half)
        (half / DONE).write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        if not is_made(path, recipe):  # another process may have been faster
            shutil.rmtree(path, ignore_errors=True)
            half.rename(path)
    except OSError:
        if not is_made(path, recipe):
            raise
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return path


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words by a space
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=RECIPE["max_position"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)


def _write_weights(path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=RECIPE["vocab"],
        hidden_size=RECIPE["hidden"],
        intermediate_size=RECIPE["intermediate"],
        num_hidden_layers=RECIPE["layers"],
        num_attention_heads=RECIPE["heads"],
        num_key_value_heads=RECIPE["kv_heads"],
        head_dim=RECIPE["head_dim"],
        max_position_embeddings=RECIPE["max_position"],
        initializer_range=RECIPE["initializer_range"],
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RECIPE["seed"])
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python scripts/tiny_model.py OUT", file=sys.stderr)
        return 2
    try:
        print(make_tiny_model(sys.argv[1]))
    except OSError as error:
        print(f"tiny_model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
