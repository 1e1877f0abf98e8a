"""Torch's modes, through which a watch sees the operations of its thread.

One pair of modes a thread, pushed on the thread's own stacks while something watches there. They are not
entered as ``with`` would: that sets flags which are global to the process, and torch.compile in another
thread would see them.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtrace.agent.watch.operations import CopyWatch

_ADDRESS = {"data_ptr", "numpy", "__array__", "tolist", "__dlpack__", "untyped_storage", "storage"}
_ADDRESS |= {"_typed_storage", "share_memory_"}
OF_THE_VIEW = {"data_ptr", "numpy", "__array__", "tolist", "__dlpack__"}
"""What is asked for in these lies within the view; the others give all of its storage."""


class Modes:
    """Of one thread."""

    def __init__(self, operations: Any, addresses: Any) -> None:
        self._watchers: list[CopyWatch] = []
        self.seeing: tuple[CopyWatch, ...] = ()
        """Who sees what runs now."""
        self._operations, self._addresses = operations(self), addresses(self)
        self._on = False

    def add(self, watcher: CopyWatch) -> None:
        self._watchers.append(watcher)
        self._changed()
        if not self._on:
            dispatch, function = _torch()
            dispatch._push_mode(self._operations)
            function._push_mode(self._addresses)
            self._on = True

    def remove(self, watcher: CopyWatch) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            self._changed()
        if self._on and not self._watchers:
            self._off()

    def _changed(self) -> None:
        seeing: list[CopyWatch] = []
        for watcher in reversed(self._watchers):
            seeing.append(watcher)
            if watcher.alone:
                break
        self.seeing = tuple(seeing)

    def _off(self) -> None:
        """Modes that the connector left on the stack above ours are not ours to take: then ours stay."""
        dispatch, function = _torch()
        if (
            dispatch._get_current_dispatch_mode() is self._operations
            and function._get_current_function_mode() is self._addresses
        ):
            dispatch._pop_mode()
            function._pop_mode()
            self._on = False


class _Thread(threading.local):
    modes: Modes | None = None


_thread = _Thread()


def of_this_thread() -> Modes | None:
    """None where torch is not loaded: it is never imported for this."""
    if _thread.modes is None and "torch" in sys.modules:
        _thread.modes = Modes(*_mode_classes())
    return _thread.modes


def seeing_here() -> tuple[CopyWatch, ...]:
    """Who sees what runs now in the calling thread."""
    modes = _thread.modes
    return () if modes is None else modes.seeing


def _torch() -> tuple[Any, Any]:
    import torch.overrides
    import torch.utils._python_dispatch

    return torch.utils._python_dispatch, torch.overrides


@functools.cache
def _mode_classes() -> tuple[Any, Any]:
    dispatch, function = _torch()
    interface = sys.modules["torch"].Tensor.__cuda_array_interface__

    class Operations(dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __init__(self, modes: Modes) -> None:
            super().__init__()
            self.modes = modes

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # what is compiled stays compiled

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for watcher in self.modes.seeing:
                watcher.ran(func, args, kwargs or {}, result)
            return result

    class Addresses(function.TorchFunctionMode):  # type: ignore[misc,name-defined]
        def __init__(self, modes: Modes) -> None:
            super().__init__()
            self.modes = modes

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in _ADDRESS or getattr(func, "__self__", None) is interface:
                for watcher in self.modes.seeing:
                    watcher.address(args, name or "__cuda_array_interface__")
            return func(*args, **(kwargs or {}))

    return Operations, Addresses
