"""A connector that comes without a server: the command of a small one for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtrace.verify import models
from kvtrace.verify.answers import VerifyError
from kvtrace.verify.command import BLOCKS

_CLASS = re.compile(r"(?:(?P<module>[A-Za-z_][\w.]*):)?(?P<name>[A-Za-z_]\w*)\Z")
_TRANSFER = (
    "kv_role",
    "kv_connector_extra_config",
    "kv_load_failure_policy",
    "kv_buffer_device",
    "engine_id",
)
BLOCK, STEP, LONGEST = 32, 512, 2048
"""Of the small server: tokens in a block, in a step, and of a sequence. Steps end with a block: vLLM's CPU
backend packs the keys of a block, so that rows copied out of a half full one come back as other numbers."""


def transfer_config(connector: str, config: str | None) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for it.

    Args:
        connector: ``module:Class``, or the name of one of vLLM's own.
        config: JSON: fields of ``kv_transfer_config``, or of its ``kv_connector_extra_config`` alone.

    Raises:
        VerifyError: one of them is no such thing.
    """
    found = _CLASS.match(connector)
    if found is None:
        raise VerifyError(
            f"--connector {connector!r} is no class", "write module:Class, for example mine.kv:Mine"
        )
    try:
        given = json.loads(config) if config else {}
    except ValueError as error:
        raise VerifyError("--config is no JSON", str(error)) from None
    if not isinstance(given, dict):
        raise VerifyError("--config is no JSON object")
    fields = given if any(name in given for name in _TRANSFER) else {"kv_connector_extra_config": given}
    module = {"kv_connector_module_path": found["module"]} if found["module"] else {}
    return {"kv_connector": found["name"], **module, "kv_role": "kv_both", **fields}


def command(connector: str, config: str | None, model: Path, blocks: int) -> list[str]:
    """Starts a small server with it, and so many blocks."""
    transfer = json.dumps(transfer_config(connector, config))
    beside = Path(sys.executable).with_name("vllm")
    vllm = str(beside) if beside.exists() else shutil.which("vllm")
    start = [vllm] if vllm else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    return [
        *start, "serve", str(model),
        "--port", str(free_port()), "--host", "127.0.0.1",
        "--block-size", str(BLOCK), "--max-num-batched-tokens", str(STEP), "--max-model-len", str(LONGEST),
        "--max-num-seqs", "16", BLOCKS, str(blocks), "--enforce-eager",
        "--kv-transfer-config", transfer,
    ]  # fmt: skip


def environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What the small server gets beside the user's environment: the working directory to import from, and a
    small CPU engine where it is one."""
    path = os.pathsep.join(filter(None, (os.getcwd(), environ.get("PYTHONPATH"))))
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {"PYTHONPATH": path, **{name: value for name, value in small.items() if name not in environ}}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def kinds(model: Path | None, full: bool) -> list[str]:
    """Kinds of models that are tried; "" the user's own."""
    if model is not None:
        return [str(model)] if str(model) in models.KINDS else [""]
    return list(models.KINDS) if full else [models.FIRST]
