"""Secrets never reach a spool, run.json or a report; ordinary settings stay readable."""

from __future__ import annotations

import json
import time

import pytest

from kvtrace.trace.mask import MASK, mask_argv, mask_mapping, mask_text

SECRET = "s3cr3t-VALUE"


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m", "--api-key", SECRET],
        ["vllm", "serve", "m", f"--api-key={SECRET}"],
        ["vllm", "serve", "m", "--api_key", SECRET, SECRET, "--port", "1"],
        ["vllm", "serve", "m", "--hf-token", SECRET],
        ["env", f"HF_TOKEN={SECRET}", "vllm"],
        ["env", f"AWS_SECRET_ACCESS_KEY={SECRET}", "vllm"],
        ["x", "--redis-password", SECRET],
        ["x", "--password", f"-{SECRET}"],
        ["x", "-H", f"Authorization: Bearer {SECRET}"],
        ["x", "-H", f"Authorization: Token {SECRET}"],
        ["x", "-H", f"X-Api-Key: {SECRET}"],
        ["bash", "-c", f"HF_TOKEN={SECRET} vllm serve --port 1"],
        ["bash", "-c", f"vllm serve m --api-key {SECRET} --port 1"],
        ["bash", "-c", f"vllm serve m --api-key '{SECRET} x' --port 1"],
        ["x", f"redis://user:{SECRET}@host:6379/0"],
        ["x", f"--url=https://{SECRET}{SECRET}@host/path"],
        ["x", f"https://host/path?b=1&access_token={SECRET}&a=1"],
        ["x", "--kv-transfer-config", json.dumps({"extra": {"api_key": SECRET}})],
        ["x", "--kv-transfer-config=" + json.dumps({"extra": [{"apiKey": SECRET}]})],
        ["x", "--config", json.dumps({"nested": json.dumps({"password": SECRET})})],
        ["x", "--config", json.dumps({"credentials": {"user": "u", "x": SECRET}})],
        ["x", "--config", '{"broken": 1, "api_key": "' + SECRET + '"'],
        ["x", '{\\"api_key\\": \\"' + SECRET + '\\"}'],
        ["x", "--kv-transfer-config.extra.api_key", SECRET],
    ],
)
def test_a_secret_in_a_command_line_is_masked(argv: list[str]) -> None:
    masked = mask_argv(argv)
    assert SECRET not in " ".join(masked)
    assert "***" in " ".join(masked)
    assert len(masked) == len(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m", "--max-num-batched-tokens", "64", "--tokenizer", "t", "--port", "80"],
        ["vllm", "serve", "m", "--hf-token", "--port", "80"],
        ["x", "--kv-transfer-config", '{"kv_connector":"X",  "extra": {"max_tokens": 5, "num_tokens":1}}'],
        ["x", "--max-tokens=5", "--stop-token-ids=1,2", "--eos-token", "</s>"],
        ["x", "http://127.0.0.1:8000/v1/models?a=b", "git://git@example.org/x", "a@b"],
        ["python", "-c", "print('hello: world')", "-x", "--", "-y", ""],
        ["x", "PWD=/home/x", "PATH=/bin:/usr/bin"],
    ],
)
def test_an_ordinary_command_line_stays_byte_for_byte(argv: list[str]) -> None:
    assert mask_argv(argv) == argv


def test_mapping_is_copied_and_masked_to_the_bottom() -> None:
    given = {
        "token": SECRET,
        "password": 1234,
        "eos_token_id": 2,
        "bytes_per_token": 4096,
        "token_chunk": 3,
        "list": ({"secret_key": SECRET}, f"redis://u:{SECRET}@h"),
        "KVTRACE_CONFIG": json.dumps({"dir": "/x", "salt": SECRET}),
        "raw": SECRET.encode(),
        "none": {"api_key": None, "use_auth": True},
    }
    before = json.dumps(given, default=repr)
    masked = mask_mapping(given)
    assert SECRET not in json.dumps(masked)
    assert masked["password"] == "***"
    assert (masked["eos_token_id"], masked["bytes_per_token"], masked["token_chunk"]) == (2, 4096, 3)
    assert masked["none"] == {"api_key": None, "use_auth": True}
    assert json.dumps(given, default=repr) == before


def test_messages_keep_their_numbers() -> None:
    for text in ("next token: 5", "max_tokens must be at least 1, got 0.", "error at foo.py:12: bad"):
        assert mask_text(text) == text
    assert SECRET not in mask_text(f"login failed for https://bob:{SECRET}@host (token={SECRET})")
    assert mask_text("key hf_abcdefghijklmnopqrstuvwx leaked") == "key *** leaked"


def test_names() -> None:
    secret = (
        "api-key API_KEY apiKey HF_TOKEN hfToken password dbPassword client_secret Authorization db_pwd salt"
    )
    secret += " pw pwd redis_pw dbpass userpass creds ak sk key ssh_key s3_key kms_key psk pin otp pat"
    secret += " session_id signature sig connection_string dsn sentry_dsn webhook webhookUrl"
    harmless = "max_tokens num_tokens tokenizer tokenizer_mode eos_token_id bos_token PWD author keyfile"
    harmless += " cache_key block_key bypass forward_pass pin_memory path skip task design step signature_len"
    assert set(mask_mapping(dict.fromkeys(secret.split(), "value")).values()) == {MASK}
    assert set(mask_mapping(dict.fromkeys(harmless.split(), "value")).values()) == {"value"}


@pytest.mark.parametrize(
    "text",
    [
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\\n{SECRET}",
        f"https://x.blob.core.windows.net/c?sv=1&sig={SECRET}&x=1",
        f"https://s3/x?X-Amz-Signature={SECRET}",
        f"https://hooks.slack.com/services/T0/B0/{SECRET}",
        f"redis://{SECRET}@h",
        f"redis://:a/{SECRET}@h:6379/0",
        f"curl -u bob:{SECRET} http://h",
        f"mysql -p {SECRET} db",
        f"AIza{SECRET}{SECRET}",
        f"npm_{'S3cr3t' * 6}",
        f"ya29.{SECRET}",
    ],
)
def test_a_secret_in_a_text_is_known_by_place_or_shape(text: str) -> None:
    for masked in (mask_text(text), mask_argv(["x", text])[1], mask_mapping({"x": text})["x"]):
        assert SECRET not in masked and "S3cr3t" not in masked and MASK in masked


@pytest.mark.parametrize(
    "argv",
    [["-p", SECRET], ["-u", f"bob:{SECRET}"], ["--user", f"bob:{SECRET}"]]
    + [[f"--{name}", SECRET] for name in ("pw", "pwd", "key", "sk", "creds", "otp", "redis-pw", "ssh-key")],
)
def test_a_secret_after_a_short_option_is_masked(argv: list[str]) -> None:
    masked = mask_argv(["x", *argv, "--port", "1"])
    assert SECRET not in " ".join(masked) and masked[-2:] == ["--port", "1"] and len(masked) == 5


def test_ports_paths_and_plain_urls_stay() -> None:
    argv = [
        "docker",
        "-p",
        "8000:8000",
        "mkdir",
        "-p",
        "/a/b",
        "-u",
        "bob",
        "http://h:8000/a@b",
        "ssh://git@h/x",
    ]
    assert mask_argv(argv) == argv


PIECES = ["a", "a=", "://", "a://b:", "-a ", "\\", "token='", "eyJ", "[", '{"a":']
PIECES += [
    "a:",
    "a1:a2:",
    "-u a",
    "-p ",
    "-----BEGIN PRIVATE KEY-----",
    "https://h:p",
    "https://hooks.slack.com/",
]


@pytest.mark.parametrize("piece", PIECES)
def test_hostile_text_takes_no_time(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    began = time.process_time()
    mask_text(text)
    mask_argv([text])
    mask_mapping({"x": text})
    assert time.process_time() - began < 5


def test_a_deep_value_ends() -> None:
    deep: object = SECRET
    for _ in range(5000):
        deep = [deep]
    assert SECRET not in repr(mask_mapping(deep))[:100_000]
