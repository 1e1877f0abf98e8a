"""What a command line tells: is it Python, is it vLLM, does it read PYTHONPATH? Pure."""

from __future__ import annotations

import itertools
import os
import re

TITLE = "VLLM::"
"""vLLM renames its processes: ``VLLM::EngineCore``, ``VLLM::Worker_TP0``, ..."""
_PYTHON = re.compile(r"python[\d.]*t?\Z")
_MODULE = re.compile(r"-[bBdEiIOPqsSuvx]*m(.*)", re.DOTALL)
_OPTIONS_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


def is_python(argv: list[str]) -> bool:
    """The program is called ``python``, ``python3``, ``python3.12``, ..."""
    return bool(argv) and bool(_PYTHON.match(os.path.basename(argv[0])))


def is_vllm(argv: list[str]) -> bool:
    """vLLM by its process title, as the ``vllm`` program, or as ``python -m vllm...``."""
    if not argv:
        return False
    if TITLE in argv[0] or os.path.basename(argv[0]) == "vllm":
        return True
    if not is_python(argv):
        return False
    rest = iter(argv[1:])
    for word in rest:
        if module := _MODULE.match(word):
            return ((module.group(1) or next(rest, "")) + ".").startswith("vllm.")
        if word == "-c":
            return False
        if word in _OPTIONS_WITH_VALUE:
            next(rest, "")
        elif not word.startswith("-"):
            return os.path.basename(word) == "vllm"
    return False


def ignores_pythonpath(argv: list[str]) -> bool:
    """``python -I`` or ``-E``."""
    if not is_python(argv):
        return False
    options = itertools.takewhile(lambda word: re.match(r"-[A-Za-z]+\Z", word), argv[1:])
    # what follows -m or -c in one word is no option
    return any(re.match(r"-[^mcWX]*[IE]", word) for word in options)
