"""Ways by which KV can leave a sampled call unseen by torch's dispatcher.

A profile function, confined to the one call and thread, notes calls into third-party native
code (a pybind11 extension that is handed a tensor copies past every Python hook) and work
handed to another thread (queue, executor, event). Where one of them was taken, "nothing was
copied" can't be said.

It also notes whether the call asked a file system or a socket: a save that takes nothing may have
found that everything is stored already.

Not seen: native code called from native code, and what an earlier call left running. Threads in
which the connector's own code runs are looked for by :func:`works_elsewhere`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from typing import Any

from kvtrace.agent.code.owners import Owner, is_stdlib_module, top
from kvtrace.agent.code.traces import outwards, short
from kvtrace.agent.kv.tensors import OWN
from kvtrace.agent.state import get_ident
from kvtrace.agent.watch import native
from kvtrace.agent.wrap.tracing import set_profile

# Their native code either goes through the dispatcher, or can't touch a tensor's memory
# without asking Python for it (data_ptr, numpy), which ``watch/operations.py`` sees.
_HARMLESS = {"builtins", "torch", "numpy", "safetensors", "kvtrace", "vllm"}
_HAND_OVER_FILES = ("queue.py", "threading.py", "base_events.py", "thread.py", "process.py", "connection.py")
_HAND_OVER = {
    "put",
    "put_nowait",
    "notify",
    "notify_all",
    "set",
    "start",
    "submit",
    "call_soon_threadsafe",
    "send",
    "send_bytes",
}


_ASKING = {"stat", "lstat", "access", "open", "scandir", "listdir"}
_ASKING_MODULES = {"posix", "nt", "os", "io", "_io"}


def works_elsewhere(owner: Owner, followed: Collection[int]) -> str:
    """Where a thread is inside the connector's own code that is not watched there: other than this one, the
    main one (the user's script, as often as not), and those of ``followed``. "" for none."""
    known = (get_ident(), threading.main_thread().ident, *followed)
    threads = sys._current_frames()
    del threads[get_ident()]  # else this call would hold its own frame, and with it all around it
    for ident, innermost in threads.items():
        for frame in outwards(innermost) if ident not in known else ():
            if owner.owns(frame.f_code.co_filename):
                return f"{short(frame.f_code.co_filename)} in {frame.f_code.co_name}"
    return ""


class Escapes:
    """``start`` and ``stop`` in the thread of the call.

    Args:
        to_the_end: look at all of the call, also past what is :meth:`enough` for KV.
    """

    def __init__(self, to_the_end: bool = False) -> None:
        self._to_the_end = to_the_end
        self.watched = False
        self.native = ""
        """The third-party native code that ran."""
        self.handed_over = False
        self.asked = False

    @property
    def any(self) -> bool:
        return not self.watched or bool(self.native) or self.handed_over

    def start(self) -> None:
        if sys.getprofile() is None:  # somebody's profiler is left alone
            self.watched = set_profile(self._profile)

    def enough(self) -> None:
        """It was seen to copy: what else it may do changes nothing, and a profile function costs."""
        if not self._to_the_end:
            self.stop()
            self.watched = False

    def stop(self) -> None:
        if sys.getprofile() == self._profile:
            set_profile(None)
        else:
            self.watched = False

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if OWN.busy:
            return  # what our own accounting calls is not the connector's
        try:
            if event == "c_call":
                if not self.native and not native.inside():
                    self.native = _third_party(arg)
                if arg.__name__ in _ASKING:
                    self.asked |= getattr(arg, "__module__", None) in _ASKING_MODULES
                elif type(getattr(arg, "__self__", None)).__name__ == "socket":
                    self.asked = True
                if arg.__name__ == "put" and type(arg.__self__).__name__ == "SimpleQueue":
                    self.handed_over = True
            elif event == "call" and frame.f_code.co_name in _HAND_OVER:
                self.handed_over |= frame.f_code.co_filename.endswith(_HAND_OVER_FILES)
        except Exception:
            self.native = "?"  # an object without the usual attributes: nothing is known of it


def _third_party(function: Any) -> str:
    """``module.function`` of third-party native code, else ""."""
    module = getattr(function, "__module__", None)
    if not isinstance(module, str):
        owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
        if owner is None:
            return ""
        kind = owner if isinstance(owner, type) else type(owner)
        module = kind.__module__
        if kind.__flags__ & (1 << 9):
            # A class made in Python that inherits a native method: the native base counts.
            name = getattr(function, "__name__", "")
            bases = [cls for cls in kind.__mro__ if name in vars(cls)]
            module = bases[0].__module__ if bases else module
    package = top(module)
    known = package in _HARMLESS or is_stdlib_module(package)
    return "" if known else f"{module}.{getattr(function, '__name__', '?')}"
