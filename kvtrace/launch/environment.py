"""The child's environment: ours, plus what makes vLLM find and start the agent. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtrace import CONFIG_VARIABLE
from kvtrace.launch.interpreter import ENTRY_POINT_NAME

PLUGINS_VARIABLE = "VLLM_PLUGINS"
RAY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_PREFIX = "KVTRACE_"


def child_environment(
    environ: Mapping[str, str], command: Sequence[str], config: str, overlay: Path | None
) -> dict[str, str]:
    """A copy of ``environ`` in which vLLM, wherever the command starts it, loads the agent.

    Args:
        config: the text of the agent's configuration.
        overlay: the folder that ``launch/overlay.py`` made; None leaves vLLM's plugins as the only way in.
    """
    child = dict(environ)
    child[CONFIG_VARIABLE] = config
    # Unset loads every plugin; set, and also set empty, loads the named ones only.
    if PLUGINS_VARIABLE in child:
        child[PLUGINS_VARIABLE] = add_to_list(child[PLUGINS_VARIABLE], ENTRY_POINT_NAME)
    # vLLM hashes this variable into the key of its compilation cache: setting it where no Ray is
    # involved would make a traced start a cold one.
    if RAY_VARIABLE in child or _speaks_of_ray(child, command):
        child[RAY_VARIABLE] = add_to_list(child.get(RAY_VARIABLE, ""), _PREFIX)
    return child if overlay is None else imports_first(child, overlay)


def imports_first(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """``environ`` in which Python looks for modules in that folder first."""
    before = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else str(folder)}


def add_to_list(text: str, item: str) -> str:
    """A comma list with ``item`` in it; the user's own items stay as they are."""
    if item in text.split(","):
        return text
    return f"{text},{item}" if text else item


def _speaks_of_ray(environ: Mapping[str, str], command: Sequence[str]) -> bool:
    return any(name.startswith("RAY_") for name in environ) or any(
        re.search(r"(?i)(?<![a-z])ray(?![a-z])", word) for word in command
    )
