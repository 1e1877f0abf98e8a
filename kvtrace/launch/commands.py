"""What a command line tells: is it Python, is it vLLM, does it read PYTHONPATH? Pure."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence

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
    module, rest = module_of(argv)
    return (
        (module + ".").startswith("vllm.") if module else bool(rest) and os.path.basename(rest[0]) == "vllm"
    )


def module_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Of a Python's command line: the module of ``-m`` and the words after it; else "" and the words from
    the script on, [] where there is none (``-c``)."""
    rest = iter(argv[1:])
    for word in rest:
        if module := _MODULE.match(word):
            name = module.group(1) or next(rest, "")
            return name, list(rest)
        if word == "-c":
            break
        if word in _OPTIONS_WITH_VALUE:
            next(rest, "")
        elif not word.startswith("-"):
            return "", [word, *rest]
    return "", []


def ignores_pythonpath(argv: list[str]) -> bool:
    """``python -I`` or ``-E``."""
    if not is_python(argv):
        return False
    options = itertools.takewhile(lambda word: re.match(r"-[A-Za-z]+\Z", word), argv[1:])
    # what follows -m or -c in one word is no option
    return any(re.match(r"-[^mcWX]*[IE]", word) for word in options)
