"""torchvision for the row with images: what vLLM prepares images with imports it; .venv has none.

There is no build of it on the package index for a CPU torch. Its others are Python around a compiled library
of operators. None of these is called by what prepares images: the rest does without the library, and need
only find them declared. It lies in a folder of its own, which only the processes of that row see.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from vllm_env import CACHE

VERSION = "0.28.0"
"""The one that fits torch 2.13."""

FOLDER = CACHE / f"torchvision-{VERSION}"

DECLARED = """
if not _has_ops():  # added by kvtrace's matrix: its import asks for these, library or not
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Goes to the end of its extension.py: vLLM imports it in a process of its own, too, to look at the model."""


def fetch(folder: Path = FOLDER) -> str:
    """Gets it with pip's own settings, once. Returns why it cannot be had, or ""."""
    if folder.is_dir():
        return ""
    half = folder.with_name(f".{folder.name}")
    shutil.rmtree(half, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", str(half), f"torchvision=={VERSION}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or ["no message"]
        shutil.rmtree(half, ignore_errors=True)
        return f"torchvision {VERSION} cannot be had: {said[-1].removeprefix('ERROR: ')}"
    with (half / "torchvision" / "extension.py").open("a", encoding="utf-8") as file:
        file.write(DECLARED)
    half.rename(folder)
    return ""
