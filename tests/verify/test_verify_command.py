"""The user's command is understood, and never changed."""

from __future__ import annotations

import json

import pytest

from kvtrace.cli.run import parse_share
from kvtrace.errors import KvtraceError
from kvtrace.verify.answers import VerifyError
from kvtrace.verify.command import address, without_connector
from kvtrace.verify.connector import command, transfer_config

SERVE = ["vllm", "serve", "m"]


def test_where_the_server_will_listen() -> None:
    assert (address(SERVE).host, address(SERVE).port) == ("127.0.0.1", 8000)
    given = address([*SERVE, "--port", "1", "--host=0.0.0.0", "--port=8123", "--api-key", "k"])
    assert (given.host, given.port, given.key) == ("127.0.0.1", 8123, "k")
    assert address([*SERVE, "--host", "10.0.0.1"]).host == "10.0.0.1"


@pytest.mark.parametrize("more", [["--port", "x"], ["--ssl-keyfile", "k"]])
def test_a_server_that_cannot_be_asked_is_a_usage_error(more: list[str]) -> None:
    with pytest.raises(VerifyError):
        address([*SERVE, *more])


def test_the_same_command_without_its_connector() -> None:
    around = ["--port", "1", "--max-model-len=9"]
    for words in (
        ["--kv-transfer-config", "{}"],
        ["--kv-transfer-config={}"],
        ["--kv_transfer_config", "{}"],
    ):
        assert without_connector([*SERVE, *words, *around]) == [*SERVE, *around]
    dotted = ["--kv-transfer-config.kv_connector", "X", "--kv-transfer-config.kv_role=kv_both"]
    assert without_connector([*SERVE, *dotted, *around]) == [*SERVE, *around]
    assert without_connector(SERVE) is None


def test_a_connector_gets_a_small_server(tmp_path: object) -> None:
    words = command("mine.kv:Mine", '{"place": "x"}', tmp_path, 80)  # type: ignore[arg-type]
    assert words[words.index("--num-gpu-blocks-override") + 1] == "80"
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config == {
        "kv_connector": "Mine",
        "kv_connector_module_path": "mine.kv",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"place": "x"},
    }
    whole = transfer_config("Example", '{"kv_role": "kv_producer", "kv_connector_extra_config": {}}')
    assert whole["kv_role"] == "kv_producer" and "kv_connector_module_path" not in whole


@pytest.mark.parametrize(("name", "config"), [("a-b", None), ("m:", None), ("m:C", "{"), ("m:C", "[]")])
def test_what_is_no_connector_is_a_usage_error(name: str, config: str | None) -> None:
    with pytest.raises(VerifyError):
        transfer_config(name, config)


def test_shares() -> None:
    assert parse_share("--error", "0.5 %") == 0.005 and parse_share("--error", "") == 0
    for text in ("5", "x%", "-1%"):
        with pytest.raises(KvtraceError):
            parse_share("--error", text)
