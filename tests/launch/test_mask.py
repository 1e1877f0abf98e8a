"""Secrets never reach a spool, run.json or a report; settings that are known to be harmless stay readable."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator

import pytest

from kvtrace.trace import mask
from kvtrace.trace.mask import MASK, digest, mask_argv, mask_mapping, mask_text

SECRET = "correcthorse"
"""A word that says nothing: it must be known by nothing but that nobody knows it to be harmless."""


@pytest.fixture(autouse=True)
def _salted() -> Iterator[None]:
    mask.use(b"0" * 16)
    yield
    mask.use(b"0" * 16)


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m", "--api-key", SECRET],
        ["vllm", "serve", "m", f"--api-key={SECRET}"],
        ["vllm", "serve", "m", "--api_key", SECRET, SECRET, "--port", "1"],
        ["x", "--header", f"X-Custom-Key: {SECRET}"],
        ["x", "-H", f"Authorization: Bearer {SECRET}"],
        ["x", "--enc-key", SECRET],
        ["x", "--license", SECRET],
        ["x", f"-p{SECRET}"],
        ["x", "-p", SECRET],
        ["x", "-u", f"bob:{SECRET}"],
        ["x", "password", SECRET],
        ["x", f"user/{SECRET}@host"],
        ["x", "--password", f"-{SECRET}"],
        ["env", f"HF_TOKEN={SECRET}", "vllm"],
        ["env", f"ANYTHING={SECRET}", "vllm"],
        ["bash", "-c", f"HF_TOKEN={SECRET} vllm serve --port 1"],
        ["bash", "-lc", f"cd /x && vllm serve m --api-key '{SECRET} x' --port 1"],
        ["bash", "-c", f"vllm 'unclosed {SECRET}"],
        ["python", "-c", f"print('{SECRET}')"],
        ["x", f"redis://user:{SECRET}@host:6379/0"],
        ["x", f"redis://{SECRET}@host"],
        ["x", f"redis://:a/{SECRET}@h:6379/0"],
        ["x", f"--url=https://{SECRET}@host/path"],
        ["x", f"https://host/path?b=1&access={SECRET}&a=1"],
        ["x", f"https://hooks.slack.com/services/T0/B0/{SECRET}"],
        ["x", "--kv-transfer-config", json.dumps({"extra": {"api_key": SECRET}})],
        ["x", "--kv-transfer-config", json.dumps({"extra": [["password", SECRET]]})],
        ["x", "--kv-transfer-config=" + json.dumps({"extra": ["--token", SECRET]})],
        ["x", "--config", json.dumps({"nested": json.dumps({"access": SECRET})})],
        ["x", "--config", json.dumps({"model": {"x": SECRET}})],
        ["x", "--config", '{"broken": 1, "access": "' + SECRET + '"'],
        ["x", "--kv-transfer-config.extra.access", SECRET],
        ["x", "--model", f"user:{SECRET}@host"],
        ["x", f"-----BEGIN PRIVATE KEY-----\\n{SECRET}"],
        [f"vllm serve m --api-key {SECRET}"],
        ["x", "--", SECRET],
    ],
)
def test_a_string_not_known_to_be_harmless_is_not_kept(argv: list[str]) -> None:
    masked = mask_argv(argv)
    assert SECRET not in " ".join(masked)
    assert re.search(r"<string of \d+ characters?, [0-9a-f]{6}>", " ".join(masked))
    assert len(masked) == len(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m", "--max-num-batched-tokens", "64", "--tokenizer", "t", "--port", "80"],
        ["vllm", "serve", "Qwen/Qwen3-0.6B", "-tp", "2", "-O3", "-O.mode=3", "-cc.cudagraph_mode=PIECEWISE"],
        ["vllm", "serve", "/models/meta-llama/Llama-3.1-8B", "--block-size=16", "--dtype", "bfloat16"],
        ["vllm", "serve", "m", "--hf-token", "--port", "80", "--no-enable-prefix-caching"],
        ["vllm", "serve", "m", "--distributed-executor-backend", "ray", "--gpu-memory-utilization", "0.9"],
        ["x", "--kv-transfer-config",
         '{"kv_connector":"X",  "kv_role": "kv_both", "kv_connector_module_path": "a.b_c.d", '
         '"kv_connector_extra_config": {"max_tokens": 5, "unit": "256", "size": "4GiB", "on": false, '
         '"mode": "off", "path": "/mnt/kv-store", "none": null}}'],
        ["x", "--max-tokens=5", "--stop-token-ids=1,2", "--cudagraph-capture-sizes", "1", "2", "4"],
        ["x", "redis://127.0.0.1:6379/0", "http://127.0.0.1:8000", "file:///mnt/kv", "s3://bucket/kv"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
        ["python", "-u", "bench/run.py", "--config", "serve.yaml", "-x", "--", "-y", ""],
        ["env", "VLLM_ATTENTION_BACKEND=FLASH_ATTN", "CUDA_VISIBLE_DEVICES=0,1", "PYTHONPATH=/a:/b", "vllm"],
        ["bash", "-c", "cd /x && VLLM_LOGGING_LEVEL=DEBUG vllm serve m --port 1"],
        ["docker", "-p", "8000:8000", "-p", "/a/b"],
        ["VLLM::Worker_TP0"],
    ],
)  # fmt: skip
def test_an_ordinary_command_line_stays_byte_for_byte(argv: list[str]) -> None:
    assert mask_argv(argv) == argv


def test_a_mapping_is_copied_and_masked_to_the_bottom() -> None:
    given = {
        "enc_key": SECRET,
        "license": SECRET,
        "password": 1234,
        "pin": "1234",
        "eos_token_id": 2,
        "token_chunk": 3,
        "text": f"-p{SECRET}",
        "list": ({"access": SECRET}, f"redis://u:{SECRET}@h", ["--token", SECRET]),
        "raw": SECRET.encode(),
        "none": {"api_key": None, "use_auth": True},
        f"k1{SECRET}2x3y": 1,
        "switch": "disabled",
        "kv_connector": "Mine",
    }
    before = json.dumps(given, default=repr)
    masked = mask_mapping(given)
    assert SECRET not in json.dumps(masked) and SECRET.encode().hex() not in json.dumps(masked)
    assert masked["password"] == digest("1234") == masked["pin"]
    assert (masked["eos_token_id"], masked["token_chunk"]) == (2, 3)
    assert masked["none"] == {"api_key": None, "use_auth": True}
    assert (masked["switch"], masked["kv_connector"]) == ("disabled", "Mine")
    assert json.dumps(given, default=repr) == before


def test_equal_strings_have_equal_digests_under_one_key_alone() -> None:
    first = mask_mapping({"a": SECRET, "b": SECRET})
    assert first["a"] == first["b"] == f"<string of {len(SECRET)} characters, {first['a'][-7:-1]}>"
    mask.use(b"1" * 16)
    assert mask_mapping({"a": SECRET})["a"] != first["a"]


def test_keep_settings_lifts_it_and_leaves_credentials_masked() -> None:
    mask.use(b"0" * 16, keep=True)
    assert mask_argv(["x", "--mode", "lossy", "two words"]) == ["x", "--mode", "lossy", "two words"]
    assert mask_mapping({"tier": "warm", "n": [1]}) == {"tier": "warm", "n": [1]}
    assert SECRET not in json.dumps(mask_mapping({"url": f"redis://u:{SECRET}@h", "c": f"password={SECRET}"}))


@pytest.mark.parametrize(
    "text",
    [
        f"login failed for https://bob:{SECRET}@host",
        f"login failed (token={SECRET})",
        f"anything={SECRET}",
        f"{{'anything': '{SECRET}'}}",
        f'{{\\"api_key\\": \\"{SECRET}\\"}}',
        f"X-Custom-Key: {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"used tool --enc-key {SECRET} --port 1",
        f"mysql -p {SECRET} db",
        f"curl -u bob:{SECRET} http://h",
        f"sqlplus user/{SECRET}@host",
        f"password {SECRET}7",
        f"password: {SECRET}",
        f"https://x.blob.core.windows.net/c?sv=1&sig={SECRET}&x=1",
        f"https://hooks.slack.com/services/T0/B0/{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\\n{SECRET}",
        f"/x/api_key={SECRET}/y",
        f"license: {SECRET}",
    ],
)
def test_an_assignment_or_a_credential_in_a_text_is_masked(text: str) -> None:
    assert SECRET not in mask_text(text) and MASK in mask_text(text)


@pytest.mark.parametrize(
    "key",
    [
        "hf_abcdefghijklmnopqrstuvwx", "sk-abcdefghijklmnopqrstuvwx", "ghp_Q8vzP3Kd72LmXw91TrYb4NcE6sHj0aUf",
        "github_pat_11ABCDE0Y0abcdefghij", "glpat-AbCdEfGhIjKlMnOpQrSt", "xoxb-1234567890-abcdefghij",
        "AKIAIOSFODNN7EXAMPLE", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_def-ghi",
        "npm_abcdefghij0123456789",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
        "dop_v1_bd975c8284a23140fbf05cb418bbc2790a08edbbfb35731adf96e2",
        "s3cr3tV4lue", "hvs.CAESIJabcdefghijklmnop", "shpat_0123456789abcdef0123456789abcdef",
        "dapi1b9efb25d9656727691436d24014df54", "nvapi-abcdefghijklmnopqrst",
    ],
)  # fmt: skip
def test_what_looks_like_a_key_is_masked(key: str) -> None:
    assert key[-8:] not in mask_text(f"cannot log in with {key}: refused")


def test_messages_keep_their_words_and_numbers() -> None:
    for text in (
        "next token: 5",
        "max_tokens must be at least 1, got 0.",
        "error at test_secret_shapes.py:12: bad",
        "kv_role=kv_both, block_size=16, prefix caching=False",
        "task skipped: no key in block_table of request cmpl-5f3e9c81a2b34d0f9e7a6b5c4d3e2f1a",
        "/models/meta-llama/Llama-3.1-8B-Instruct/model-00001-of-00004.safetensors",
        "/store/dt=2024-x/wJalrXUtnFEMIK7MDENGbPxRfiCY01/3.bin",
        "model.layers.31.self_attn.attn kv_connector_extra_config shared_storage_path ~/kv",
        "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c 5f70bf18a086007016e948b04aed3b82103a36be",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "unified_attention_with_output save_kv_layer wait_for_save get_num_new_matched_tokens",
        "KVConnectorBaseV1 LMCacheConnectorV1 P2pNcclConnector float8_e4m3fnuz H100-SXM5-80GB",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid it",
        "tcp 10.0.0.1:6379", "unix /run/kv.sock",
        "eyes on the sky: risk of desk, ask task", "nccl_ico-nified pat.tern sat.urday ops_per_second a3-b4",
    ):  # fmt: skip
        assert mask_text(text) == text


PIECES = [
    "a",
    "a ",
    "a=",
    "://",
    "a://b:",
    "-a ",
    "\\",
    "token='",
    "eyJ",
    "[",
    '{"a":',
    "a:",
    "a1:a2:",
    "-u a",
    "-p ",
]
PIECES += [
    "-----BEGIN PRIVATE KEY-----",
    "https://h:p",
    "https://hooks.slack.com/",
    "s3cr3tV4 ",
    "password 1 ",
    "a-",
    "_",
]
PIECES += ["/", "a@", "a/b@", "key: ", '"a": "', ",1", "1.", "~/a:", "x=1 "]


def _seconds(work: Callable[[], object]) -> float:
    """Of processor time, at best."""
    took = []
    for _ in range(3):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def _plain(text: str) -> int:
    """What a megabyte is measured by, on whatever machine: one loop over its characters."""
    return sum(1 for _ in text)


@pytest.mark.parametrize("piece", PIECES)
def test_a_megabyte_costs_a_few_loops_over_it(piece: str) -> None:
    """Whatever it is made of: a pattern that tried each start anew would take thousands."""
    text = piece * (1_000_000 // len(piece))
    loop = _seconds(lambda: _plain(text))
    assert _seconds(lambda: mask_text(text)) < 10 * loop
    assert _seconds(lambda: mask_argv(["x", text])) < 10 * loop
    assert _seconds(lambda: mask_mapping({"x": text})) < 10 * loop


def test_a_large_or_deep_value_ends() -> None:
    deep: object = SECRET
    for _ in range(5000):
        deep = [deep]
    assert SECRET not in repr(mask_mapping(deep))[:100_000]
    loop = _seconds(lambda: _plain("x" * 1_000_000))
    large = {str(at): [at] * 1000 for at in range(1000)}
    assert _seconds(lambda: mask_mapping(large)) < 10 * loop
    line = json.dumps([[SECRET] * 1000] * 60)
    assert _seconds(lambda: mask_argv(["x", line])) < 10 * loop
    assert len(mask_text(SECRET * 100_000)) < 100
