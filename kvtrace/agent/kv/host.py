"""Whether a tensor's values may be looked at on the host, and when a copy from a device has come.

``AgentConfig.as_device`` is for tests alone: KV and indexes in host memory are treated as if they lay on a
device. Then nothing is read at once, and what was copied aside counts as come when its step is over.
"""

from __future__ import annotations

import sys
from typing import Any

from kvtrace.agent.state import AGENT


def on_host(tensor: Any) -> bool:
    return tensor.device.type == "cpu" and not AGENT.config.as_device


def aside(tensor: Any) -> Any:
    """A copy on the host, on its way there behind what runs on the tensor's device."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)


class _StepOver:
    def __init__(self) -> None:
        self._step = AGENT.worker.latest if AGENT.worker.step else -1

    def query(self) -> bool:
        return AGENT.worker.step == 0 or AGENT.worker.latest != self._step


def event_behind(device: Any) -> Any:
    """``query()`` of it says whether all that was asked of the device so far is done."""
    if device.type == "cpu":
        return _StepOver()
    module = getattr(sys.modules["torch"], device.type)
    event = module.Event()
    event.record(module.current_stream(device))
    return event
