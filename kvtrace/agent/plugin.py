"""The agent's two beginnings: as vLLM is imported (``bootstrap.py``), and as vLLM loads its plugins in every
process (group ``vllm.general_plugins``), where the first was not possible.

Inert unless the variable of the agent's configuration is set: installing kvtrace changes nothing for
a user who does not run it.
"""

from __future__ import annotations

import os
import sys

from kvtrace import CONFIG_VARIABLE

_MODEL_INSPECTION = "vllm.model_executor.models.registry"
_armed = False


def arm() -> None:
    """Hook what is imported from now on. A spool is opened when there is something to write: not every
    process that imports vLLM does its work. Never raises."""
    global _armed
    text = os.environ.get(CONFIG_VARIABLE)
    if not text or _armed or sys.version_info < (3, 10):
        return
    if _MODEL_INSPECTION in sys.orig_argv:
        # A short-lived helper of vLLM that only looks at a model class.
        return
    _armed = True
    try:
        from kvtrace.agent.state import AGENT
        from kvtrace.agent.targets import install_all
        from kvtrace.trace.config import AgentConfig

        AGENT.arm(AgentConfig.from_text(text))
        os.register_at_fork(after_in_child=AGENT.after_fork)
        install_all()
    except Exception as error:
        _did_not_start(error)


def activate() -> None:
    """Called by vLLM without arguments, possibly more than once. Never raises."""
    arm()
    if not _armed:
        return
    try:
        from kvtrace.agent.state import AGENT

        AGENT.live()
    except Exception as error:
        _did_not_start(error)


def _did_not_start(error: Exception) -> None:
    # vLLM lets an exception of a plugin end the process: ours must not.
    sys.stderr.write(f"kvtrace: the agent did not start: {type(error).__name__}: {error}\n")


def retarget(run_dir: str | None) -> None:
    """Go on recording in another run directory, or stop (None). For in-process engines.

    Call it between engines: the connectors and schedulers that are alive stay instrumented,
    but their facts stand in the directory in which they were made.
    """
    from dataclasses import replace
    from pathlib import Path

    from kvtrace.agent.state import AGENT

    AGENT.close()
    if run_dir is not None and AGENT.armed:
        AGENT.open(replace(AGENT.config, dir=Path(run_dir), run=Path(run_dir).name))
