"""Keys and tokens of each kind that the table knows, made up here, are masked wherever they stand."""

from __future__ import annotations

import json
import random
import re
import string
import time
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from kvtrace.trace.mask import MASK, mask_argv, mask_mapping, mask_text
from kvtrace.trace.secret_shapes import SHAPES, SOURCE

CLASSES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_WORD": string.ascii_letters + string.digits,
    "CATEGORY_SPACE": " ",
}


def made_up(pattern: str, rng: random.Random) -> str:
    """A text that the pattern fits, at random: no key of anybody's."""
    text = "".join(_made(part, rng) for part in _parser.parse(pattern))
    assert re.fullmatch(pattern, text), (pattern, text)
    return text


def _made(part: tuple[Any, Any], rng: random.Random) -> str:
    kind, what = str(part[0]), part[1]
    if kind == "LITERAL":
        return chr(what)
    if kind == "IN":
        return rng.choice(_chars(what))
    if kind == "ANY":
        return "."  # the detector writes a host's dots so
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = what
        least = 12 if least == 1 and most > 12 else least  # without a length: as long as real ones
        return "".join(_all(inner, rng) for _ in range(rng.randint(least, min(most, least + 3))))
    if kind == "SUBPATTERN":
        return _all(what[-1], rng)
    if kind == "BRANCH":
        return _all(rng.choice(what[1]), rng)
    return ""  # a place: \b, a look around


def _all(parts: Any, rng: random.Random) -> str:
    return "".join(_made(part, rng) for part in parts)


def _chars(parts: list[tuple[Any, Any]]) -> str:
    found = ""
    for kind, what in parts:
        if str(kind) == "LITERAL":
            found += chr(what)
        elif str(kind) == "RANGE":
            found += "".join(map(chr, range(what[0], what[1] + 1)))
        elif str(kind) == "CATEGORY":
            found += CLASSES[str(what)]
    return found


PATTERNS = {name: pattern for name, _, pattern in SHAPES}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_key_of_this_kind_is_masked_in_every_place(name: str) -> None:
    rng = random.Random(name)
    for _ in range(5):
        key = made_up(PATTERNS[name], rng)
        places = (
            mask_text(f"cannot log in with {key}: refused"),
            mask_text(f'{{"where": "{key}"}}'),
            mask_argv(["vllm", "serve", "m", "--kv-transfer-config", json.dumps({"extra": {"a": [key]}})])[
                -1
            ],
            mask_argv(["env", f"WHERE={key}", "vllm"])[1],
            mask_argv(["x", f"https://host/path?where={key}"])[1],
            json.dumps(mask_mapping({"a": [{"b": f"x {key} y"}]})),
        )
        for masked in places:
            assert key not in masked and key[-12:] not in masked and MASK in masked, (key, masked)


def test_the_words_of_a_rule_are_in_each_of_its_keys() -> None:
    """They are looked for first: a rule without one of them would never be tried."""
    rng = random.Random(1)
    for name, words, pattern in SHAPES:
        for _ in range(20):
            key = made_up(pattern, rng).lower()
            assert any(word in key for word in words), (name, key)


def test_a_key_that_is_longer_than_the_table_knows_is_masked_whole() -> None:
    key = "glrt-" + "S3cr3t" * 9
    assert mask_text(f"key {key}, and more") == f"key {MASK}, and more"


def test_what_users_write_stays_as_it_is() -> None:
    for text in (
        "task skipped: no key in block_table of request cmpl-5f3e9c81a2b34d0f9e7a6b5c4d3e2f1a",
        "/models/meta-llama/Llama-3.1-8B-Instruct/model-00001-of-00004.safetensors",
        "model.layers.31.self_attn.attn kv_connector_extra_config shared_storage_path ~/kv",
        "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c 5f70bf18a086007016e948b04aed3b82103a36be",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 https://host/api-docs?page=2",
        "unified_attention_with_output save_kv_layer wait_for_save get_num_new_matched_tokens",
        "eyes on the sky: risk of desk, ask task", "nccl_ico-nified pat.tern sat.urday ops_per_second a3-b4",
    ):  # fmt: skip
        assert mask_text(text) == text


@pytest.mark.parametrize("rule", SHAPES, ids=lambda rule: rule[0])
def test_hostile_text_takes_no_time(rule: tuple[str, tuple[str, ...], str]) -> None:
    """Of begun keys, again and again: linear in the text."""
    rng = random.Random(2)
    key = made_up(rule[2], rng)
    began = time.process_time()
    for piece in (*rule[1], rule[1][0].upper(), key[: len(key) // 2], key[:-1], key + key[1:-1]):
        mask_text(piece * (20_000 // len(piece)))
    assert time.process_time() - began < 20


def test_the_table_names_its_source() -> None:
    assert re.fullmatch(r"gitleaks v\d+\.\d+\.\d+", SOURCE) and len(PATTERNS) == len(SHAPES) >= 100
