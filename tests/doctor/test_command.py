"""What a command line says of its Python, vLLM's words and the connector; and the places that it names."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtrace.doctor.command import read_command, transfer_in
from kvtrace.doctor.places import ConfigPlace, look, places
from kvtrace.launch.errors import LaunchError

API = "vllm.entrypoints.openai.api_server"


@pytest.fixture
def bin(tmp_path: Path) -> Path:
    """A folder with ``vllm``, a script of this Python, and ``wrapped``, a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, first in {"vllm": f"#!{sys.executable}", "wrapped": "#!/bin/sh"}.items():
        (folder / name).write_text(f"{first}\n")
        (folder / name).chmod(0o755)
    return folder


def test_vllm_serve(bin: Path) -> None:
    command = read_command(["vllm", "serve", "M", "--seed", "1"], {"PATH": str(bin)})
    assert (command.kind, command.parsed) == ("serve", ("serve", "M", "--seed", "1"))
    assert command.python == sys.executable and command.path0 == str(bin)


def test_other_words_of_vllm_are_not_for_its_parser(bin: Path) -> None:
    assert read_command(["vllm", "bench", "serve"], {"PATH": str(bin)}).kind == ""


@pytest.mark.parametrize(
    ("words", "kind", "parsed"),
    [
        (["-m", API, "--model", "M"], "api-server", ("--model", "M")),
        ([f"-m{API}", "--model", "M"], "api-server", ("--model", "M")),
        (["-m", "vllm.entrypoints.cli.main", "serve", "M"], "serve", ("serve", "M")),
        (["BIN/vllm", "serve", "M"], "serve", ("serve", "M")),
        (["-u", "bench.py", "serve"], "", ()),
        (["-c", "import vllm"], "", ()),
    ],
)
def test_python(bin: Path, words: list[str], kind: str, parsed: tuple[str, ...]) -> None:
    words = [word.replace("BIN", str(bin)) for word in words]
    command = read_command([sys.executable, *words], {})
    assert (command.kind, command.parsed, command.python) == (kind, parsed, sys.executable)
    assert command.path0 == (str(bin) if str(bin) in words[0] else os.getcwd())


def test_env_is_looked_through(bin: Path) -> None:
    words = ["env", "A=1", f"PATH={bin}", "vllm", "serve", "M"]
    command = read_command(words, {"PATH": os.environ["PATH"]})
    assert command.words == ("vllm", "serve", "M") and command.environ["A"] == "1"


def test_a_wrapper_has_no_certain_python(bin: Path) -> None:
    assert read_command(["wrapped", "serve", "M"], {"PATH": str(bin)}).python is None


def test_no_such_program() -> None:
    with pytest.raises(LaunchError, match="command not found"):
        read_command(["no-such-program-here"], {"PATH": "/nowhere"})


def test_the_transfer_configuration_in_the_words() -> None:
    one = {"kv_connector": "X"}
    assert transfer_in(["serve", "--kv-transfer-config", '{"kv_connector": "X"}']) == one
    assert transfer_in(['--kv_transfer_config={"kv_connector": "X"}']) == one
    assert transfer_in(["--kv-transfer-config", "nonsense"]) is None
    assert transfer_in(["--kv-transfer-config"]) is None and transfer_in([]) is None


def test_places_of_a_configuration() -> None:
    extra: dict[str, Any] = {
        "path": "/data/kv", "tier": {"disk": "file:///ssd"}, "peers": ["h1:7000", "[::1]:7001"],
        "server": "redis://user:secret@cache", "listen": "tcp://0.0.0.0:5555", "bucket": "s3://mine/kv",
        "text": "a:b", "chunk": 256, "time": "12:30", "relative": "kv/store", "bad": "http://[", "port": "tcp://h",
        "connectors": [{"kv_connector_extra_config": {"path": "/not/mine"}}],
    }  # fmt: skip
    assert places(extra) == [
        ConfigPlace("path", "/data/kv"),
        ConfigPlace("tier.disk", "/ssd"),
        ConfigPlace("peers", host="h1", port=7000),
        ConfigPlace("peers", host="::1", port=7001),
        ConfigPlace("server", host="cache", port=6379),
    ]


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = {
        "": "directory", "new/deep": "absent", "file": "file", "file/below": "blocked",
    }  # fmt: skip
    for name, state in found.items():
        (seen,) = look([ConfigPlace("path", str(tmp_path / name).rstrip("/"))])
        assert seen.state == state, name
    assert seen.detail == str(tmp_path / "file")


def test_hosts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (seen,) = look([ConfigPlace("peer", host="127.0.0.1", port=port)])
        assert seen.state == "open"
    (seen,) = look([ConfigPlace("peer", host="127.0.0.1", port=port)])
    assert seen.state == "closed" and seen.detail
