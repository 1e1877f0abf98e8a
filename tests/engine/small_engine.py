"""The engine of the scripts: one process, eager, blocks of 32 tokens, a connector of a module beside them."""

from __future__ import annotations

from typing import Any

from vllm import LLM


def start(model: str, connector: str, module: str = "", *, transfer: Any = None, **more: Any) -> LLM:
    """``transfer``: more of the connector's configuration; ``more``: of the engine's."""
    config = {"kv_connector": connector, "kv_role": "kv_both", **(transfer or {})}
    if module:
        config["kv_connector_module_path"] = module
    own = {"enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 2048, **more}
    return LLM(model=model, kv_transfer_config=config, **own)


def storing(folder: object, /, **more: Any) -> dict[str, Any]:
    """The ``transfer`` of a connector that keeps its files there."""
    return {"kv_connector_extra_config": {"shared_storage_path": str(folder), **more}}
