"""What a connector can ask to find out where it runs: each probe is a question with one answer, the same
traced and untraced but for the table in docs/run.md, "What a traced process can notice".

Standard library, torch and numpy, whatever is imported. An answer names no path, number or id that changes
from run to run.
"""

from __future__ import annotations

import abc
import asyncio
import atexit
import builtins
import collections
import concurrent.futures
import contextvars
import copy
import copyreg
import ctypes
import fcntl
import functools
import gc
import inspect
import io
import logging
import multiprocessing
import operator
import os
import pickle
import queue
import re
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import typing
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROBES: dict[str, Callable[[Any], Any]] = {}
BEFORE: dict[str, Any] = {}
"""What was made before the hook in which the probes run."""


def probe(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        assert name not in PROBES, name
        PROBES[name] = function
        return function

    return add


class Meta(abc.ABCMeta):
    """A metaclass of the user's."""

    made: typing.ClassVar[list[str]] = []

    def __new__(mcs, name: str, *args: Any, **kwargs: Any) -> Any:
        Meta.made.append(name)
        return super().__new__(mcs, name, *args, **kwargs)

    def about(cls) -> str:
        return f"about {cls.__name__}"


class Named:
    """A descriptor that learns its name."""

    name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> str:
        return f"{self.name} of {getattr(owner, '__name__', owner)}"


class Asked(metaclass=Meta):
    """What a probing connector inherits: members to be asked for."""

    __slots__ = ("slotted",)
    subclasses: typing.ClassVar[list[str]] = []
    described = Named()
    counter = 0

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        Asked.subclasses.append(cls.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("made_up_"):
            return f"{name} of {type(self).__name__}"
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __getstate__(self) -> dict[str, Any]:
        return {"part": 7}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]

    @property
    def size(self) -> int:
        return len(type(self).__name__)

    @classmethod
    def which(cls) -> type:
        return cls

    @staticmethod
    def plain(value: int) -> int:
        return value + 1

    def inherited(self) -> Any:
        return type(self)

    def climbs(self) -> Any:
        return "the base class's"

    @functools.cached_property
    def cached(self) -> type:
        return type(self)

    halves = functools.partialmethod(lambda self, by, more: (type(self).__name__, by, more), 2)


class Climbing(Asked):
    __slots__ = ()

    def climbs(self) -> Any:
        # What breaks for instances of subclasses, and is written all the same.
        return super(type(self), self).climbs() if type(self) is Climbing else "its own, " + super().climbs()


class Alone(Climbing):
    """Beside the connector: made by the probes."""


class SizedProtocol(typing.Protocol):
    def climbs(self) -> Any: ...


RuntimeProtocol = typing.runtime_checkable(SizedProtocol)


# --- first: once KV was copied, nobody watches for some ways any more ------------------------------

probe("sys.gettrace()")(lambda self: sys.gettrace() is None)
probe("sys.getprofile()")(lambda self: sys.getprofile() is None)

# --- class ------------------------------------------------------------------------------------

probe("type(self) is MyClass")(lambda self: type(self) is self.own())
probe("self.__class__ is MyClass")(lambda self: self.__class__ is self.own())
probe("type(self) == MyClass, in, hash")(
    lambda self: (
        operator.eq(type(self), self.own()),
        type(self) in {self.own()},
        hash(type(self)) == hash(self.own()),
    )
)
probe("isinstance(self, each of its classes)")(
    lambda self: [isinstance(self, cls) for cls in self.own().__mro__]
)
probe("issubclass(type(self), each of its classes)")(
    lambda self: [issubclass(type(self), cls) for cls in self.own().__mro__]
)
probe("type(self)'s names and documentation")(
    lambda self: (type(self).__name__, type(self).__qualname__, type(self).__module__, type(self).__doc__)
)
probe("type(self).__mro__")(lambda self: [cls.__name__ for cls in type(self).__mro__])
probe("type(self).__bases__")(lambda self: type(self).__bases__ == self.own().__bases__)
probe("vars(type(self))")(lambda self: sorted(vars(type(self))))
probe("type(type(self))")(lambda self: type(type(self)).__name__)
probe("MyClass.__subclasses__()")(lambda self: [cls.__name__ for cls in self.own().__subclasses__()])
probe("its base class's __subclasses__()")(
    lambda self: [cls.__name__ for cls in self.own().__base__.__subclasses__()]
)
probe("{MyClass: ...}[type(self)]")(lambda self: {self.own(): 1}[type(self)])
probe("a metaclass's method")(lambda self: type(self).about())
probe("classes that a metaclass made")(lambda self: Meta.made[:])
probe("__init_subclass__ calls")(lambda self: Asked.subclasses[:])
probe("__set_name__, a descriptor")(lambda self: (self.described, type(self).described))
probe("__slots__")(lambda self: (Asked.__slots__, "slotted" in dir(self), "slotted" in vars(self)))
probe("vars(self)")(lambda self: sorted(vars(self)))
probe("dir(self)")(lambda self: dir(self))
probe("names of kvtrace on self")(lambda self: [name for name in dir(self) if "kvt" in name])
probe("__getattr__ of the class")(lambda self: (self.made_up_name, hasattr(self, "no_such")))
probe("a property")(lambda self: self.size)
probe("a class method's cls")(lambda self: self.which() is self.own())
probe("a static method")(lambda self: self.plain(1))
probe("functools.cached_property")(lambda self: self.cached is self.own())
probe("functools.partialmethod")(lambda self: self.halves(3))
probe("an attribute of the class, set through type(self)")(
    lambda self: (setattr(type(self), "counter", type(self).counter + 1), self.own().counter, Asked.counter)
)
probe("object.__repr__(self)")(lambda self: object.__repr__(self).partition(" at ")[0])
probe("self == self, hash(self)")(lambda self: (self == self, hash(self) == object.__hash__(self)))
probe("self.__class__ = its class")(
    lambda self: (setattr(self, "__class__", self.own()), type(self).__name__)
)

# --- super ------------------------------------------------------------------------------------

probe("super(type(self), self).method()")(lambda self: super(type(self), self).climbs())
probe("super() in a method")(lambda self: self.climbs())
probe("super(type(self), self) of an object beside it")(lambda self: Alone().climbs())
probe("super(MyClass, self)")(lambda self: super(self.own(), self).climbs())
probe("super() of a property")(lambda self: super(self.own(), self).size)
probe("super() of a class method")(lambda self: super(self.own(), self).which() is self.own())
probe("type(self).method is Base.method")(lambda self: type(self).inherited is Asked.inherited)
probe("self.method.__func__ is Base.method")(lambda self: self.inherited.__func__ is Asked.inherited)
probe("self.method.__self__ is self")(lambda self: self.inherited.__self__ is self)
probe("type(self).hook is Base.hook, where not overridden")(
    lambda self: [
        getattr(type(self), name) is next(vars(c)[name] for c in self.own().__mro__ if name in vars(c))
        for name in self.hooks()
    ]
)
probe("self.hook.__func__, its code")(
    lambda self: [getattr(self, name).__code__.co_name for name in self.hooks()]
)
probe("MyClass.method(self)")(lambda self: Asked.inherited(self) is self.own())

# --- abc --------------------------------------------------------------------------------------


@probe("isinstance(other, type(self)) and then isinstance(other, MyClass)")
def _(self: Any) -> Any:
    other = self.own().__new__(self.own())
    return isinstance(other, type(self)), isinstance(other, self.own()), isinstance(other, Asked)


@probe("isinstance(instance of a subclass, type(self)), and of MyClass then")
def _(self: Any) -> Any:
    below = BEFORE["below"]
    other = below.__new__(below)
    return [isinstance(other, cls) for cls in (type(self), self.own(), Asked, below)]


@probe("isinstance of an unrelated one, before and after it is registered")
def _(self: Any) -> Any:
    class Unrelated:
        pass

    other = Unrelated()
    first = isinstance(other, type(self)), isinstance(other, Asked)
    Asked.register(Unrelated)  # type: ignore[attr-defined]
    return first, isinstance(other, Asked)


probe("inspect.isabstract(type(self)), __abstractmethods__")(
    lambda self: (inspect.isabstract(type(self)), sorted(type(self).__abstractmethods__))
)
probe("a runtime protocol")(lambda self: (isinstance(self, RuntimeProtocol), isinstance(1, RuntimeProtocol)))
probe("collections.abc of it")(
    lambda self: [
        isinstance(self, getattr(collections.abc, name)) for name in ("Hashable", "Sized", "Callable")
    ]
)
probe("functools.singledispatch")(lambda self: _dispatched(self))


@functools.singledispatch
def _dispatched(value: object) -> str:
    return "an object"


@_dispatched.register
def _(value: Asked) -> str:
    return "one that is asked"


# --- pickle and copy ------------------------------------------------------------------------------

probe("pickle.dumps(type(self))")(lambda self: pickle.loads(pickle.dumps(type(self))) is self.own())
probe("pickle of self")(lambda self: type(pickle.loads(pickle.dumps(self))) is self.own())
probe("pickle of self, every protocol")(
    lambda self: [len(pickle.dumps(self, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
)
probe("pickle of a method")(lambda self: pickle.loads(pickle.dumps(self.inherited))().__name__)
probe("pickle of an inherited hook")(lambda self: pickle.loads(pickle.dumps(type(self).inherited)).__name__)
probe("pickle of a hook of self")(
    lambda self: [len(pickle.dumps(getattr(self, name))) for name in self.hooks()]
)
probe("copy.copy(self)")(lambda self: type(copy.copy(self)) is self.own())
probe("copy.deepcopy(self)")(lambda self: type(copy.deepcopy(self)) is self.own())
probe("copy of its class")(lambda self: copy.deepcopy(type(self)) is self.own())
probe("object.__reduce_ex__")(lambda self: object.__reduce_ex__(self, 2)[1][0] is self.own())
probe("ForkingPickler")(
    lambda self: type(pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(self))).__name__
)

# --- inspect -----------------------------------------------------------------------------------

probe("inspect.signature of its hooks")(
    lambda self: [str(inspect.signature(getattr(self, name))) for name in self.hooks()]
)
probe("inspect.getsource of its hooks")(
    lambda self: [len(inspect.getsource(getattr(self, name))) for name in self.hooks()]
)
probe("inspect.getsource, getfile and getmodule of its class")(
    lambda self: (
        inspect.getsource(type(self)) == inspect.getsource(self.own()),
        os.path.basename(inspect.getfile(type(self))),
        inspect.getmodule(type(self)).__name__,  # type: ignore[union-attr]
    )
)
probe("inspect.getmembers(self)")(
    lambda self: [name for name, _ in inspect.getmembers(self, inspect.ismethod)]
)
probe("inspect.classify_class_attrs")(
    lambda self: [(one.name, one.kind) for one in inspect.classify_class_attrs(type(self))]
)
probe("inspect.getattr_static")(
    lambda self: [type(inspect.getattr_static(self, name)).__name__ for name in self.hooks()]
)
probe("inspect.unwrap of its hooks")(
    lambda self: [
        inspect.unwrap(getattr(type(self), name)) is getattr(type(self), name) for name in self.hooks()
    ]
)
probe("__globals__ of its hooks")(
    lambda self: [getattr(self, name).__globals__["__name__"] for name in self.hooks()]
)
probe("inspect.stack() in a hook")(lambda self: [one.function for one in inspect.stack()][:12])
probe("sys._getframe(1).f_code of a hook's caller")(
    lambda self: [os.path.basename(BEFORE["caller"].co_filename), BEFORE["caller"].co_name]
)


@probe("a traceback from a hook")
def _(self: Any) -> Any:
    try:
        self.wait_for_layer_load(None, None, None)
    except TypeError as error:
        return [(os.path.basename(f.filename), f.name) for f in traceback.extract_tb(error.__traceback__)]


# --- torch -------------------------------------------------------------------------------------


def _torch() -> Any:
    import torch

    return torch


probe("torch.jit.trace")(
    lambda self: (
        _torch().jit.trace(lambda x: x.view(-1) * 2, _torch().ones(2, 2))(_torch().ones(2, 2)).tolist()
    )
)


@probe("torch.jit.script")
def _(self: Any) -> Any:
    return _torch().jit.script(_scripted)(_torch().ones(2)).tolist()


def _scripted(x):  # type: ignore[no-untyped-def]
    return x * 2 + 1


probe("torch.fx.symbolic_trace")(lambda self: _torch().fx.symbolic_trace(lambda x: x + 1).code)


@probe("make_fx")
def _(self: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: x.sin() + 1)(_torch().ones(2)).code


@probe("torch.compile with a backend that counts")
def _(self: Any) -> Any:
    torch, graphs = _torch(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)
    return compiled(torch.zeros(3)).tolist(), graphs


@probe("frames that dynamo compiles")
def _(self: Any) -> Any:
    torch = _torch()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(lambda x: x.cos() + 1, backend="eager")(torch.zeros(3))
    return dict(torch._dynamo.utils.counters["frames"])


@probe("torch.export")
def _(self: Any) -> Any:
    torch = _torch()

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x.relu()

    return len(torch.export.export(Module(), (torch.ones(2),)).graph.nodes)


@probe("what a dispatch mode of its own sees")
def _(self: Any) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mine(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mine() as mode:
        _torch().ones(4).view(2, 2).sum()
    return mode.seen


@probe("what a function mode of its own sees")
def _(self: Any) -> Any:
    from torch.overrides import TorchFunctionMode

    class Mine(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    with Mine() as mode:
        _torch().ones(4).view(2, 2).sum()
    return mode.seen


@probe("the stack of dispatch modes")
def _(self: Any) -> Any:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


probe("the stack of function modes")(lambda self: _torch()._C._len_torch_function_stack())
probe("grad, inference and autocast modes")(
    lambda self: (
        _torch().is_grad_enabled(), _torch().is_inference_mode_enabled(), _torch().is_autocast_enabled("cpu"),
    )
)  # fmt: skip
probe("default device and type")(
    lambda self: (str(_torch().get_default_device()), str(_torch().get_default_dtype()))
)


@probe("a tensor subclass with __torch_dispatch__")
def _(self: Any) -> Any:
    torch = _torch()
    seen: list[str] = []

    class Mine(torch.Tensor):  # type: ignore[misc, name-defined]
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    (torch.ones(2).as_subclass(Mine) + 1).sum()
    return seen


probe("torch.func.vmap")(lambda self: _torch().func.vmap(lambda x: x.sum())(_torch().ones(2, 3)).tolist())
probe("torch.func.grad")(lambda self: _torch().func.grad(lambda x: (x**2).sum())(_torch().ones(2)).tolist())
probe("sparse and nested tensors")(
    lambda self: (
        _torch().eye(2).to_sparse().to_dense().tolist(),
        _torch().nested.nested_tensor([_torch().ones(1), _torch().ones(2)]).to_padded_tensor(0).tolist(),
    )
)


@probe("a KV tensor's type, version and strides")
def _(self: Any) -> Any:
    kv = next(iter(BEFORE["caches"].values()), None)
    if kv is None:
        return None
    version = kv._version if not kv.is_inference() else 0
    return type(kv).__name__, version, kv.stride(), kv[:1].clone().shape, kv.is_contiguous()


@probe("torch.save")
def _(self: Any) -> Any:
    file = io.BytesIO()
    _torch().save({"kv": _torch().ones(3)}, file)
    return len(file.getvalue()), _torch().load(io.BytesIO(file.getvalue()))["kv"].tolist()


# --- locks --------------------------------------------------------------------------------------

_TRY = """
import fcntl, os, sys
fd = os.open(sys.argv[2], os.O_RDWR)
try:
    (fcntl.flock if sys.argv[1] == 'flock' else fcntl.lockf)(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print('got it')
except OSError:
    print('locked')
"""
_WRITE = """
import sqlite3, sys
try:
    other = sqlite3.connect(sys.argv[1], timeout=0)
    other.execute("insert into kv values ('theirs')")
    other.commit()
    print('wrote')
except sqlite3.OperationalError as error:
    print(error)
"""


def _another(code: str, *args: str) -> str:
    """What another process answers."""
    command = [sys.executable, "-S", "-E", "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr[-200:]


def _libc_lockf(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).lockf(fd, 2, ctypes.c_long(0)):
        raise OSError(ctypes.get_errno(), "lockf")


def _record_lock(fd: int) -> None:
    import struct

    fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))


LOCKS: dict[str, Callable[[int], Any]] = {
    "fcntl.flock": lambda fd: fcntl.flock(fd, fcntl.LOCK_EX),
    "fcntl.lockf": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX),
    "fcntl.fcntl(F_SETLK)": _record_lock,
    "os.lockf": lambda fd: os.lockf(fd, os.F_LOCK, 0),
    "lockf of libc": _libc_lockf,
}


def _lock(name: str) -> None:
    @probe(f"{name}: another process, while KV is written to the file")
    def _(self: Any) -> Any:
        way = "flock" if name == "fcntl.flock" else "lockf"
        path = BEFORE["folder"] / f"{name}.lock"
        answers = []
        for data in (b"", _some_kv()):
            with open(path, "wb", buffering=0) as file:
                file.write(data)
            fd = os.open(path, os.O_RDWR)
            try:
                LOCKS[name](fd)
                with open(BEFORE["folder"] / "beside", "wb") as other:
                    other.write(data)
                os.pwrite(fd, data, 0)
                answers.append(_another(_TRY, way, str(path)))
            finally:
                os.close(fd)
        return answers


for _name in LOCKS:
    _lock(_name)


def _some_kv() -> bytes:
    """What a request's tokens have left in the KV cache, as a connector copies it."""
    kv = next(iter(BEFORE["caches"].values()), None)
    if kv is None:
        return b"kv" * 512
    blocks = kv[0] if kv.shape[0] == 2 else kv
    filled = next(block for block in blocks[1:9] if block.any())
    copied: bytes = filled.contiguous().view(_torch().uint8).numpy().tobytes()
    return copied


JOURNALS = ("delete", "truncate", "persist", "memory", "wal", "off")
MADE = ("connect", "mkstemp", "touch", "open")


def _made(how: str, path: Path) -> None:
    if how == "mkstemp":
        fd, name = tempfile.mkstemp(dir=path.parent)
        os.close(fd)
        os.rename(name, path)
    elif how == "touch":
        path.touch()
    elif how == "open":
        open(path, "wb").close()


def _database(how: str, journal: str, path: Path) -> sqlite3.Connection:
    _made(how, path)
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute(f"pragma journal_mode={journal}")
    database.execute("create table kv (data)")
    return database


def open_before(folder: Path) -> dict[str, sqlite3.Connection]:
    """Databases that are open when the hook begins."""
    return {
        f"{how} {journal}": _database(how, journal, folder / f"before-{how}-{journal}.db")
        for how in MADE
        for journal in JOURNALS
    }


def _sqlite(how: str, journal: str, before: bool) -> None:
    @probe(f"SQLite, {journal}, made by {how}, opened {'before' if before else 'in'} the hook")
    def _(self: Any) -> Any:
        if before:
            database, path = BEFORE[f"{how} {journal}"], BEFORE["folder"] / f"before-{how}-{journal}.db"
        else:
            path = BEFORE["folder"] / f"{how}-{journal}.db"
            database = _database(how, journal, path)
        database.execute("begin immediate")
        database.execute("insert into kv values (?)", (_some_kv(),))
        theirs = _another(_WRITE, str(path))
        try:
            database.execute("commit")
            return theirs, database.execute("select count(*) from kv").fetchall()
        except sqlite3.OperationalError as error:
            return theirs, str(error)
        finally:
            database.close()


for _how in MADE:
    for _journal in JOURNALS:
        for _before in (False, True):
            _sqlite(_how, _journal, _before)


def hold(folder: Path) -> dict[str, Any]:
    """Locks of every kind on files that KV was written to, and transactions on databases, to be held until
    a later step."""
    held: dict[str, Any] = {}
    for name, lock in LOCKS.items():
        path = folder / f"{name}.held"
        path.write_bytes(_some_kv())
        fd = os.open(path, os.O_RDWR)
        lock(fd)
        os.pwrite(fd, _some_kv(), 0)
        held[name] = fd
    for how in MADE:
        for journal in JOURNALS:
            database = _database(how, journal, folder / f"held-{how}-{journal}.db")
            database.execute("begin immediate")
            database.execute("insert into kv values (?)", (_some_kv(),))
            held[f"{how} {journal}"] = database
    return held


def release(folder: Path, held: dict[str, Any]) -> dict[str, str]:
    """What another process gets of them now, and what becomes of them."""
    answers: dict[str, str] = {}
    for name, one in held.items():
        if isinstance(one, int):
            way = "flock" if name == "fcntl.flock" else "lockf"
            answers[name] = _another(_TRY, way, str(folder / f"{name}.held"))
            os.close(one)
            continue
        theirs = _another(_WRITE, str(folder / f"held-{name.replace(' ', '-')}.db"))
        try:
            one.execute("commit")
            answers[name] = repr((theirs, one.execute("select count(*) from kv").fetchall()))
        except sqlite3.OperationalError as error:
            answers[name] = repr((theirs, str(error)))
        one.close()
    return answers


# --- files and descriptors --------------------------------------------------------------------------


def _descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{name}")
            found.append(int(name))
        except OSError:
            continue
    return sorted(found)


probe("open descriptors")(lambda self: len(_descriptors()) - BEFORE["descriptors"])


@probe("descriptors that a file opens and closes")
def _(self: Any) -> Any:
    before = set(_descriptors())
    with open(BEFORE["folder"] / "counted", "wb") as file:
        file.write(_some_kv())
        during = set(_descriptors()) - before
    return len(during), set(_descriptors()) - before


@probe("a descriptor that is used again is still its own")
def _(self: Any) -> Any:
    path = BEFORE["folder"] / "first"
    first = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(first, _some_kv())
    os.close(first)
    path.unlink()
    second = os.open(BEFORE["folder"] / "second", os.O_RDWR | os.O_CREAT)
    database = sqlite3.connect(BEFORE["folder"] / "reused.db")
    database.execute("create table kv (data)")
    database.close()
    written = os.write(second, b"x" * 10)
    os.close(second)
    return second == first, written


@probe("os.pipe, select, poll")
def _(self: Any) -> Any:
    out, into = os.pipe()
    os.write(into, b"kv")
    ready = select.select([out], [], [], 0)[0] == [out]
    poll = select.poll()
    poll.register(out, select.POLLIN)
    answer = ready, len(poll.poll(0)), os.read(out, 9)
    os.close(out)
    os.close(into)
    return answer


probe("os.memfd_create")(lambda self: _written_and_read(os.memfd_create("kv")))
probe("os.dup and os.dup2")(lambda self: _written_and_read(os.dup(os.memfd_create("kv"))))


def _written_and_read(fd: int) -> Any:
    os.write(fd, b"kv")
    answer = os.pread(fd, 9, 0), os.fstat(fd).st_size
    os.close(fd)
    return answer


@probe("a socket pair")
def _(self: Any) -> Any:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(_some_kv())
        return len(other.recv(100)), one.gettimeout()


probe("open, os.open and io.open themselves")(
    lambda self: [_whose(one) for one in (builtins.open, io.open, os.open, os.write, os.replace, os.unlink)]
)


def _whose(function: Any) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    return f"{module}.{name} {type(function).__name__}"


# --- references -----------------------------------------------------------------------------------


@probe("weakref.ref(self), WeakKeyDictionary")
def _(self: Any) -> Any:
    kept: Any = weakref.WeakKeyDictionary()
    kept[self] = 1
    return weakref.ref(self)() is self, len(kept)


@probe("a tensor is gone when it is deleted")
def _(self: Any) -> Any:
    tensor = _torch().ones(8) * 2
    gone = weakref.ref(tensor)
    del tensor
    return gone()


@probe("what a failed attempt held is gone when it was caught")
def _(self: Any) -> Any:
    refs = []
    for attempt in range(5):
        try:
            refs.append(_attempt(attempt))
        except _Failed as error:
            refs.append(error.ref)
            error = None  # type: ignore[assignment]
    return [ref() is None for ref in refs]


class _Failed(OSError):
    ref: Any


def _attempt(number: int) -> Any:
    buffer = _torch().ones(8) * number
    failed = _Failed("refused")
    failed.ref = weakref.ref(buffer)
    try:
        raise failed
    finally:
        del failed


@probe("a copy of it is gone when it is deleted")
def _(self: Any) -> Any:
    other = copy.copy(self)
    gone, finalized = weakref.ref(other), []
    weakref.finalize(other, finalized.append, 1)
    del other
    return gone(), finalized


probe("sys.getrefcount(self)")(lambda self: sys.getrefcount(self) - BEFORE["references"])
probe("gc.isenabled(), gc.callbacks, gc.get_threshold()")(
    lambda self: (gc.isenabled(), len(gc.callbacks), gc.get_threshold())
)

# --- threads ----------------------------------------------------------------------------------------


def _in_thread(call: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()), name="asked")
    thread.start()
    thread.join()
    return answers


probe("a thread")(
    lambda self: _in_thread(lambda: (type(self) is self.own(), threading.current_thread().name))
)
probe("threads that run")(lambda self: sorted(one.name for one in threading.enumerate())[:20])
probe("ThreadPoolExecutor")(lambda self: _pool(lambda: type(self) is self.own()))


def _pool(call: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


probe("asyncio.run in a thread")(lambda self: _in_thread(lambda: asyncio.run(asyncio.sleep(0, "slept"))))


@probe("queue.Queue between threads")
def _(self: Any) -> Any:
    items: queue.Queue[Any] = queue.Queue()
    _in_thread(lambda: items.put(type(self) is self.own()))
    return items.get(timeout=10), items.empty()


@probe("contextvars in a thread and here")
def _(self: Any) -> Any:
    variable = contextvars.ContextVar("asked", default=0)
    variable.set(5)
    return variable.get(), _in_thread(variable.get), contextvars.copy_context()[variable]


@probe("an exception in a future")
def _(self: Any) -> Any:
    def fails() -> None:
        raise KeyError("mine")

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        error = pool.submit(fails).exception()
    frames = traceback.extract_tb(error.__traceback__) if error else []
    return repr(error), [(os.path.basename(one.filename), one.name) for one in frames]


@probe("threading.settrace: files that a thread passes")
def _(self: Any) -> Any:
    files: set[str] = set()

    def tracer(frame: Any, event: str, arg: Any) -> None:
        files.add(os.path.basename(os.path.dirname(frame.f_code.co_filename)))

    threading.settrace(tracer)
    try:
        _in_thread(lambda: type(self))
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    return sorted(files)


probe("inspect.stack() in a thread")(
    lambda self: _in_thread(lambda: [one.function for one in inspect.stack()])
)
probe("threading.excepthook, sys.excepthook, sys.unraisablehook")(
    lambda self: [_whose(one) for one in (threading.excepthook, sys.excepthook, sys.unraisablehook)]
)
probe("Thread, queue and executor themselves")(
    lambda self: [
        _whose(one)
        for one in (
            threading.Thread.start, threading.Thread.run, queue.Queue.put, queue.Queue.get,
            queue.SimpleQueue, concurrent.futures.ThreadPoolExecutor.submit, threading.Lock,
            threading.Event.set, asyncio.run, asyncio.events.Handle._run,
        )
    ]
)  # fmt: skip
probe("logging and warnings themselves")(
    lambda self: [_whose(one) for one in (logging.Logger.handle, logging.Logger._log, warnings.warn)]
)
probe("ctypes, mmap and multiprocessing themselves")(
    lambda self: [
        _whose(one)
        for one in (ctypes.memmove, ctypes.CDLL, multiprocessing.Process.start, subprocess.Popen.__init__)
    ]
)

# --- signals, time --------------------------------------------------------------------------------

probe("signal handlers")(
    lambda self: [
        (number.name, str(getattr(handler, "__qualname__", handler)))
        for number in sorted(signal.valid_signals() & set(signal.Signals))
        for handler in (signal.getsignal(number),)
        if isinstance(number, signal.Signals)
    ]
)


@probe("a signal in a hook")
def _(self: Any) -> Any:
    if threading.current_thread() is not threading.main_thread():
        return "not the main thread"
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    os.kill(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    return len(seen)


probe("signals that are blocked")(lambda self: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
probe("interval timers")(lambda self: signal.getitimer(signal.ITIMER_REAL))
probe("time functions themselves")(
    lambda self: [_whose(one) for one in (time.sleep, time.time, time.monotonic)]
)

# --- fork and spawn -----------------------------------------------------------------------------------


@probe("os.fork in a hook")
def _(self: Any) -> Any:
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(into, repr((type(self) is self.own(), self.climbs())).encode())
        os._exit(7)
    os.close(into)
    answer = os.read(out, 1000)
    os.close(out)
    return answer, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


probe("subprocess.run")(lambda self: _another("import sys; print(len(sys.argv), sys.flags.no_site)", "x"))
probe("os.posix_spawn")(
    lambda self: os.waitstatus_to_exitcode(
        os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {}), 0)[1]
    )
)
probe("what a child's Python has loaded")(
    lambda self: _child("import sys; print(any(n.startswith('kvtrace.agent.s') for n in sys.modules))")
)


def _child(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()


probe("multiprocessing's fork")(lambda self: _forked(type(self).__name__))


def _forked(name: str) -> Any:
    context = multiprocessing.get_context("fork")
    items = context.SimpleQueue()
    process = context.Process(target=items.put, args=(name,))
    process.daemon = False
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemon, config["daemon"] = config.get("daemon"), False
    try:
        process.start()
        answer = items.get()
        process.join()
        return answer, process.exitcode
    finally:
        config["daemon"] = daemon


@probe("multiprocessing's spawn")
def _(self: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    main, config = sys.modules["__main__"], multiprocessing.current_process()._config  # type: ignore[attr-defined]
    file, daemon = main.__dict__.pop("__file__", None), config.get("daemon")
    config["daemon"] = False
    try:  # a child that does not import the script anew
        process = context.Process(target=_ends_with, args=(5,), daemon=False)
        process.start()
        process.join()
        return process.exitcode, multiprocessing.get_start_method(allow_none=True)
    finally:
        config["daemon"] = daemon
        if file is not None:
            main.__dict__["__file__"] = file


def _ends_with(code: int) -> None:
    sys.exit(code)


probe("environment variables")(
    lambda self: sorted(name for name in os.environ if "KVTRACE" in name or name == "PYTHONPATH")
)

# --- the interpreter ---------------------------------------------------------------------------------

probe("threading.gettrace(), threading.getprofile()")(
    lambda self: (threading.gettrace(), threading.getprofile()) if sys.version_info >= (3, 10) else None
)
probe("sys.monitoring's tools")(
    lambda self: (
        [sys.monitoring.get_tool(tool) for tool in range(6)]  # type: ignore[attr-defined,unused-ignore]
        if hasattr(sys, "monitoring")
        else None
    )
)


@probe("sys.settrace of its own")
def _(self: Any) -> Any:
    seen: list[str] = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: seen.append(frame.f_code.co_name))  # type: ignore[func-returns-value]
    self.plain(1)
    sys.settrace(before)
    return seen


@probe("sys.setprofile of its own")
def _(self: Any) -> Any:
    seen: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: seen.append(f"{event} {frame.f_code.co_name}"))
    self.plain(1)
    sys.setprofile(before)
    return [one for one in seen if one.endswith("plain")]


@probe("warnings.warn(stacklevel=2) from a hook")
def _(self: Any) -> Any:
    return [os.path.basename(where) for where in BEFORE["warned"]]


@probe("logging's stacklevel=2 from a hook")
def _(self: Any) -> Any:
    return BEFORE["logged"]


@probe("how deep a hook may recurse")
def _(self: Any) -> Any:
    return sys.getrecursionlimit()


probe("sys.meta_path")(
    lambda self: [_whose(one if isinstance(one, type) else type(one)) for one in sys.meta_path]
)
probe("modules of kvtrace")(lambda self: any(name.startswith("kvtrace") for name in sys.modules))
probe("sys.path")(lambda self: sum("spool" in one or "kvtrace" in one or "boot" in one for one in sys.path))
probe("sys.flags, sys.getswitchinterval()")(lambda self: (str(sys.flags), sys.getswitchinterval()))
probe("atexit callbacks")(lambda self: atexit._ncallbacks() - BEFORE["atexit"])  # type: ignore[attr-defined]
probe("the arguments of its hooks")(lambda self: BEFORE["given"])


# --- asking -----------------------------------------------------------------------------------------


def begin(connector: Any, folder: Path) -> dict[str, Any]:
    """Long before the hook in which the probes run. What is made goes into ``BEFORE`` then: both sides of
    vLLM may share a process."""
    folder.mkdir(parents=True, exist_ok=True)
    before: dict[str, Any] = {"folder": folder, "caches": {}}
    before |= open_before(folder)

    class Below(type(connector)):  # type: ignore[misc]
        """A subclass, made while nothing is traced yet."""

    return before | {"below": Below}


def ask(connector: Any) -> dict[str, str]:
    """Every probe's answer. In a hook: what is asked of the connector is asked of ``self``."""
    answers: dict[str, str] = {}
    for name, question in PROBES.items():
        try:
            answers[name] = repr(question(connector))
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def page() -> str:
    """What the user is told of what can be noticed."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "run.md").read_text(encoding="utf-8")
    return text.partition("## What a traced process can notice")[2].partition("\n## ")[0]


def noticed() -> set[str]:
    """What the page lists: the first column of its table."""
    return set(re.findall(r"^\| `(.+?)` \|", page(), re.MULTILINE))
