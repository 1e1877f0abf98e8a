"""What vLLM says as it refuses to start, in fewer words, and what to do: the same in ``doctor`` and in a
report.

Standard library only: any piece may import it.
"""

from __future__ import annotations

import difflib
import re

TRANSFER_KEYS = (
    "kv_connector", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_role", "kv_rank",
    "kv_parallel_size", "kv_ip", "kv_port", "kv_connector_extra_config", "kv_connector_module_path",
    "enable_permute_local_kv", "kv_load_failure_policy",
)  # fmt: skip
"""Of vLLM's KVTransferConfig, in any version."""
_UNKNOWN_KEY = re.compile(r"for (\w+)\s+([\w.]+)\s+(?:Unexpected keyword argument|Extra inputs)")
_PYDANTIC = re.compile(r"\s*For further information visit \S+|\s*\[type=\w+,.*?input_type=\w+\]")
_NO_MODULE = re.compile(r"No module named '?([\w.…]+)'?")
_NO_CLASS = re.compile(r"Class (\S+) not found in (\S+)")
_NO_ATTRIBUTE = re.compile(r"(?:module|type object) '([\w.]+)' has no attribute '(\w+)'")
_NO_FILE = re.compile(r"\[Errno (\d+)\] [^:]*(?:: '([^']*)')?")


def in_short(text: str) -> str:
    """vLLM's own words without what pydantic adds: one line."""
    text = " ".join(text.split())
    if match := _UNKNOWN_KEY.search(text):
        return f"{match[1]} has no key {match[2]!r}"
    return _PYDANTIC.sub("", text).strip()


_OLD_INIT = re.compile(r"Connector (\w+) uses deprecated 2-argument constructor")
"""``distributed/kv_transfer/kv_connector/factory.py``, vLLM 0.32.0."""


def remedy(text: str) -> str:
    """What to do about an error at the engine's start; "" where that is not known."""
    text = " ".join(text.split())
    if match := _UNKNOWN_KEY.search(text):
        if match[2] in TRANSFER_KEYS:
            return f"leave out {match[2]}: only other versions of vLLM have it"
        near = difflib.get_close_matches(match[2], TRANSFER_KEYS, n=1)
        meant = f"write {near[0]} for {match[2]}" if near else f"leave out {match[2]}"
        inside = "; keys of the connector's own go into kv_connector_extra_config"
        return meant + (inside if match[1] == "KVTransferConfig" and not near else "")
    if match := _NO_MODULE.search(text):
        if match[1].startswith("vllm."):
            return f"change what imports {match[1]}: this version of vLLM has no such module"
        return f"install {match[1]} in the Python that runs vLLM, or put its folder on PYTHONPATH"
    if match := _NO_CLASS.search(text):
        return f"give as kv_connector the name of a class that {match[2]} has"
    if match := _NO_ATTRIBUTE.search(text):
        return f"look whether {match[1]} is the version that is meant: it has no {match[2]}"
    if "Unsupported connector type" in text or "not registered" in text:
        return "set kv_connector_module_path, or let the plugin in that registers it"
    if match := _NO_FILE.search(text):
        what = match[2] or "that path"
        return f"make {what} a place where this user may write, or configure another one"
    if match := _OLD_INIT.search(text):
        return (
            f"give {match[1]}.__init__ a third parameter, kv_cache_config, and hand it to super().__init__()"
        )
    if "out of memory" in text:
        return "free the device's memory, or lower --gpu-memory-utilization"
    return ""
