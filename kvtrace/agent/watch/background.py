"""A connector's work goes on in threads, executors and event loops: the watch goes with it.

Wrapped are the few places of the standard library through which work passes: where it is handed over (there
the origin is noted) and where it is taken up (there a piece of work begins). A place whose work is nobody's,
or some other library's, costs one look. Threads that ran before are met at their next item.

The origin is kept beside the work, never in an object that the connector can see: by the identity of a thread
that starts and of an item in a queue, on the executor's own job object, in the context of an event loop's
callback. Installed once, never taken out; without a connector in this process nothing is noted.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from kvtrace.agent import limits
from kvtrace.agent.code import owners
from kvtrace.agent.errors.swallowed import ASYNCIO, EXECUTOR, THREAD
from kvtrace.agent.origin import HERE, ORIGIN, WorkOrigin, origin_here
from kvtrace.agent.outside import conditions, files, sockets
from kvtrace.agent.state import AGENT
from kvtrace.agent.watch.work import Work, begin, forget, write_all
from kvtrace.agent.wrap import frames
from kvtrace.agent.wrap.imports import when_imported
from kvtrace.agent.wrap.once import wrap_once
from kvtrace.trace.facts import Limit

_MOST_ITEMS = 1 << 16
_ATTRIBUTE = "_kvtrace_origin"
_on = False


def begins() -> None:
    """A connector is made in this process: from now on work is followed."""
    global _on
    install()
    conditions.install()
    files.install()
    sockets.install()
    _on = True


@functools.cache
def install() -> None:
    """Works once. Modules that are not imported yet are wrapped when they are."""
    AGENT.endings.append(write_all)
    os.register_at_fork(after_in_child=forget)
    for module, cls, name, around in _PLACES:
        when_imported(module, functools.partial(_wrap, cls, name, around))


def _wrap(cls: str, name: str, around: Callable[[Any], Any], module: ModuleType) -> None:
    wrap_once(getattr(module, cls, None), name, around)


# --- other processes ---------------------------------------------------------------


def _popen(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _on:
            command = kwargs.get("args", args[0] if args else "")
            first = command[0] if isinstance(command, (list, tuple)) and command else command
            limits.say(Limit.PROCESS, os.path.basename(str(first).split(" ")[0]))
        original(self, *args, **kwargs)

    return __init__


def _process(original: Any) -> Any:
    def start(self: Any) -> Any:
        if _on:
            limits.say(Limit.PROCESS, str(getattr(self, "name", "")))
        return original(self)

    return start


def _origin() -> WorkOrigin | None:
    """Of the calling thread; never raises."""
    try:
        return origin_here() if _on else None
    except Exception:
        AGENT.failed("origin")
        return None


# --- threads ------------------------------------------------------------------------------------------

_starting: dict[int, WorkOrigin] = {}
"""id of a thread that was started and does not run yet."""


def _start(original: Any) -> Any:
    def start(self: Any) -> Any:
        origin = _origin()
        if origin is not None:
            # What a connector starts as it is made works for whoever asks it later.
            _starting[id(self)] = origin if origin.step else origin._replace(hook="")
        try:
            return original(self)
        except BaseException:
            _starting.pop(id(self), None)
            raise

    return start


def _bootstrap(original: Any) -> Any:
    def _bootstrap_inner(self: Any) -> Any:
        work = _thread_begins(self) if _on else None
        try:
            return original(self)
        finally:
            if work is not None:
                work.stop()

    return _bootstrap_inner


def _thread_begins(thread: Any) -> Work | None:
    try:
        origin = _starting.pop(id(thread), None)
        target = getattr(thread, "_target", None) or type(thread).run
        if getattr(target, "__module__", None) == "concurrent.futures.thread":
            return None  # its jobs are followed, one by one
        return _begin(THREAD, target, origin)
    except Exception:
        AGENT.failed("thread")
        return None


def _begin(kind: str, function: Any, origin: WorkOrigin | None, exact: bool = False) -> Work | None:
    """A piece of work that runs a function: of the connector's whose code it is, where nobody noted an
    origin; None where it is nobody's."""
    code = _code_of(function)
    file = "" if code is None else code.co_filename
    if origin is None:
        index = owners.index_of(file)
        if not index:
            return None
        origin = WorkOrigin(0, index)
    return begin(kind, origin, file, exact)


def _code_of(function: Any) -> CodeType | None:
    for _ in range(8):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__func__"):
            function = function.__func__
        else:
            break
    for name in ("__code__", "cr_code", "gi_code"):
        code = getattr(function, name, None)
        if isinstance(code, CodeType):
            return code
    code = getattr(type(function).__dict__.get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


# --- queues -------------------------------------------------------------------------------------------

_items: dict[tuple[int, int], deque[WorkOrigin]] = {}
"""(id of a queue, id of an item in it) -> for which steps it was put there."""


def _put(original: Any) -> Any:
    def put(self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        if _on:
            _note_item(self, item)
        return original(self, item, *args, **kwargs)

    return put


def _note_item(queue: Any, item: Any) -> None:
    """Of what a hook puts into a queue, or what runs for one alone. A thread may put things back."""
    work = HERE.work
    if isinstance(work, Work) and not work.exact:
        return
    origin = _origin()
    if origin is not None:
        if len(_items) >= _MOST_ITEMS:
            _items.clear()  # queues that were thrown away with what was in them
        _items.setdefault((id(queue), id(item)), deque()).append(origin)


def _get(original: Any) -> Any:
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = _asks(id(self)) if _on else None
        try:
            item = original(self, *args, **kwargs)
        except BaseException as error:
            frames.step_out(error)
            raise
        if work is not None or _items:
            _got(work, self, item)
        return item

    return get


def _asks(queue: int) -> Work | None:
    """The calling thread wants its next item; the work that it is in, if it is followed."""
    try:
        work = HERE.work
        if isinstance(work, Work):
            work.asks(queue)
            return work
        if work is None:
            caller = sys._getframe(2)
            index = owners.index_of(caller.f_code.co_filename)
            if (
                index
                and threading.current_thread() is not threading.main_thread()
                and frames.innermost(caller) is None
            ):
                return begin(THREAD, WorkOrigin(0, index), caller.f_code.co_filename)
    except Exception:
        AGENT.failed("queue")
    return None


def _take_item(queue: Any, item: Any) -> WorkOrigin | None:
    noted = _items.get((id(queue), id(item)))
    if noted is None:
        return None
    try:
        origin = noted.popleft()
    except IndexError:
        return None  # another thread took the same item out just now
    if not noted:
        _items.pop((id(queue), id(item)), None)
    return origin


def _got(work: Work | None, queue: Any, item: Any) -> None:
    try:
        origin = _take_item(queue, item)
        if work is not None:
            work.got(id(queue), origin, sys._getframe(2))
    except Exception:
        AGENT.failed("queue")


# --- executors ----------------------------------------------------------------------------------------


def _job_made(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        origin = _origin() if _on else None
        if origin is not None:
            setattr(self, _ATTRIBUTE, origin)

    return __init__


def _job_runs(original: Any) -> Any:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = _job_begins(self) if _on else None
        if work is None:
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            work.stop(getattr(getattr(self, "future", None), "_exception", None))

    return run


def _job_begins(job: Any) -> Work | None:
    try:
        return _begin(EXECUTOR, getattr(job, "fn", None), getattr(job, _ATTRIBUTE, None), exact=True)
    except Exception:
        AGENT.failed("executor")
        return None


# --- event loops --------------------------------------------------------------------------------------


def _handle_made(original: Any) -> Any:
    def __init__(self: Any, callback: Any, args: Any, loop: Any, context: Any = None) -> None:
        original(self, callback, args, loop, context)
        if context is None and _on:
            # The context is a copy of the caller's, made just now: nobody else has it.
            origin = _origin()
            if origin is not None and self._context.get(ORIGIN) != origin:
                self._context.run(ORIGIN.set, origin)

    return __init__


def _handle_runs(original: Any) -> Any:
    def _run(self: Any) -> Any:
        work = _step_begins(self) if _on else None
        if work is None:
            return original(self)
        task = _task_of(self)
        try:
            return original(self)
        finally:
            over = task is None or bool(task.done())
            work.stop(getattr(task, "_exception", None) if over else None, work.exact and over)

    return _run


def _step_begins(handle: Any) -> Work | None:
    try:
        task = _task_of(handle)
        coroutine = None if task is None else task.get_coro()
        origin = handle._context.get(ORIGIN)
        exact = coroutine is None or _not_begun(coroutine)
        if origin is not None and not exact:
            origin = origin.unless_after(origin.step + 1)
        return _begin(ASYNCIO, coroutine if coroutine is not None else handle._callback, origin, exact)
    except Exception:
        AGENT.failed("asyncio")
        return None


def _task_of(handle: Any) -> Any:
    """The task that a callback is a step of; None for any other callback."""
    task = getattr(handle._callback, "__self__", None)
    return task if hasattr(task, "get_coro") else None


def _not_begun(coroutine: Any) -> bool:
    frame = getattr(coroutine, "cr_frame", None)
    return frame is not None and frame.f_lasti < 0


def _async_get(original: Any) -> Any:
    def get_nowait(self: Any) -> Any:
        try:
            item = original(self)
        except BaseException as error:
            frames.step_out(error)
            raise
        if _items:
            try:
                origin = _take_item(self, item)
                work = HERE.work
                if origin is not None and isinstance(work, Work):
                    work.got(id(self), origin, None)
            except Exception:
                AGENT.failed("asyncio")
        return item

    return get_nowait


_PLACES: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
    ("threading", "Thread", "start", _start),
    ("threading", "Thread", "_bootstrap_inner", _bootstrap),
    ("queue", "Queue", "put", _put),
    ("queue", "Queue", "get", _get),
    ("concurrent.futures.thread", "_WorkItem", "__init__", _job_made),
    ("concurrent.futures.thread", "_WorkItem", "run", _job_runs),
    ("asyncio.events", "Handle", "__init__", _handle_made),
    ("asyncio.events", "Handle", "_run", _handle_runs),
    ("asyncio.queues", "Queue", "put_nowait", _put),
    ("asyncio.queues", "Queue", "get_nowait", _async_get),
    ("subprocess", "Popen", "__init__", _popen),
    ("multiprocessing.process", "BaseProcess", "start", _process),
)
"""Module, class, method, and what makes its wrapper."""
