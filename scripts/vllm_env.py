"""The environment in which the demo, the tests and the scenarios start vLLM.

Every cache lies inside the clone, nothing asks the network, and two CPU workers may share the cores.
Standard library only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

SOCKET_ROOM = 60
"""The longest folder for temporary files in which vLLM's sockets still fit a Unix socket's 107 bytes."""


def vllm_env(cache: Path = CACHE) -> dict[str, str]:
    """A copy of this process's environment, made fit for a vLLM that touches nothing outside the clone."""
    env = dict(os.environ)
    env.pop("KVTRACE_CONFIG", None)
    # Settings of the user's own vLLM must not decide what the demo and the tests see.
    for name in [name for name in env if name.startswith("VLLM_")]:
        del env[name]
    env.update(
        PATH=os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")]),
        PYTHONUNBUFFERED="1",
        # caches
        XDG_CACHE_HOME=str(cache / "xdg"),
        XDG_CONFIG_HOME=str(cache / "xdg-config"),
        VLLM_CACHE_ROOT=str(cache / "vllm"),
        VLLM_CONFIG_ROOT=str(cache / "vllm-config"),
        HF_HOME=str(cache / "huggingface"),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "torchinductor"),
        TRITON_CACHE_DIR=str(cache / "triton"),
        NUMBA_CACHE_DIR=str(cache / "numba"),
        MPLCONFIGDIR=str(cache / "matplotlib"),
        # no network
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        # a small CPU engine: 1 GiB of KV cache; without "nobind" vLLM wants one NUMA node a worker
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=env.get("OMP_NUM_THREADS") or str(min(2, os.cpu_count() or 1)),
        TOKENIZERS_PARALLELISM="false",
    )
    temporary = cache / "tmp"
    if (
        len(os.fsencode(temporary)) <= SOCKET_ROOM
    ):  # vLLM leaves its sockets behind; a deep clone keeps the system's
        temporary.mkdir(parents=True, exist_ok=True)
        env["TMPDIR"] = str(temporary)
    return env
