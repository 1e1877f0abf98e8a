"""A CUDA device that is a clock and queues: what torch.cuda looks like to the agent.

Host and device share one time line (nanoseconds), shifted against each other. ``work`` puts kernels on a
stream; an event is done when all that was queued before it is.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

SHIFT = 7_777_000_000
"""Device clock minus host clock: nobody may rely on it being 0."""


def on_cuda(patch: Any, cuda: Any) -> None:
    """What the agent finds of torch and of vLLM's platform where there is a CUDA device."""
    patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="2.11"))
    platform = SimpleNamespace(device_type="cuda", opaque_attention_op=lambda: True)
    patch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))


class Stream:
    def __init__(self, handle: int, device: int = 0) -> None:
        self.cuda_stream, self.device_index = handle, device
        self.free_at = 0  # host time at which its queue is empty


class Cuda:
    """Stands in for ``torch.cuda``; ``clock`` for ``time.perf_counter_ns``."""

    def __init__(self) -> None:
        self.now = 1_000_000
        self.stream = Stream(0)
        self.capturing = False
        self.fails: str | None = None  # message of the error that the next event raises
        self.recorded_while_capturing = 0
        self.asked_while_capturing = 0
        self.made = 0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                cuda.check()
                cuda.made += 1
                self.done_at: int | None = None
                self.device: int | None = None  # of the first recording

            def record(self, stream: Stream) -> None:
                cuda.check()
                if self.device not in (None, stream.device_index):
                    raise RuntimeError("Event device does not match recording stream's device")
                self.device = stream.device_index
                cuda.recorded_while_capturing += cuda.capturing
                cuda.now += 1_000
                self.done_at = max(cuda.now, stream.free_at)
                stream.free_at = self.done_at

            def query(self) -> bool:
                cuda.check()
                cuda.asked_while_capturing += cuda.capturing
                cuda.now += 500
                return self.done_at is None or self.done_at <= cuda.now

            def elapsed_time(self, other: Any) -> float:
                assert self.query() and other.query(), "elapsed_time of an event that is not done"
                return ((other.done_at + SHIFT) - (self.done_at + SHIFT)) / 1e6

            def synchronize(self) -> None:
                raise AssertionError("the agent waited for the device")

        self.Event = Event

    def check(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)

    def clock(self) -> int:
        self.now += 100
        return self.now

    def current_stream(self) -> Stream:
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        raise AssertionError("the agent waited for the device")

    # --- what a hook does

    def host(self, ns: int) -> None:
        self.now += ns

    def work(self, ns: int, stream: Stream | None = None) -> None:
        """A kernel of so many nanoseconds; launching costs the host 2 µs."""
        stream = stream or self.stream
        self.now += 2_000
        stream.free_at = max(self.now, stream.free_at) + ns

    def wait(self, stream: Stream | None = None) -> None:
        """What a hook may do and the agent never: block until the stream is empty."""
        self.now = max(self.now, (stream or self.stream).free_at)
