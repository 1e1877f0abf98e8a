"""A transparent object proxy: vLLM holds it in a connector's place, and the connector stays as it is.

Whoever holds the proxy reads, sets, deletes and calls on the connector itself: its own class, ``__dict__``
and ``self``. The hooks alone are the proxy's: bound wrappers in slots, so that a call costs one look-up. Each
proxy has a class of its own, since Python looks for special methods there; it has those that the connector's
class has, and is no subclass of that. What is asked of it (name, class methods, ``__mro__``) the connector's
class answers, but for ``type(proxy) is``, which nothing can answer.

The proxy holds the connector, never the other way round: when vLLM lets go, both are gone at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

ITS = "_kvtrace_its"
"""Of a proxy: the connector."""
INDEX = "_kvtrace_index"
"""Of a proxy: the connector's index in this process."""
_OWN = "_kvtrace_class"
"""Of a proxy's class: the connector's class as it was when the proxy was made."""
_HOOKS = "_kvtrace_hooks"
"""Of a proxy's class: hook -> what makes a wrapper."""

Make = Callable[[Any], "tuple[Callable[..., Any], Passed]"]
"""Makes the wrapper of one hook of a connector; its first argument is the connector (or the proxy, of a hook
in ``asks``)."""


class Passed:
    """Where a hook's wrapper hands its calls on to, once somebody has put something else in the hook's place.

    Who patches a hook on the proxy keeps the wrapper that stood there, and calls it: that must then be what
    stood on the connector, or it would call the patch, which calls it."""

    __slots__ = ("to",)

    def __init__(self) -> None:
        self.to: Callable[..., Any] | None = None


def _known(cls: type, name: str) -> Any:
    """What stands in a proxy's class itself."""
    return type.__getattribute__(cls, name)


class _Kind(type):
    """The class of the proxies' classes: the connector's class answers for them."""

    def __getattribute__(cls, name: str) -> Any:
        return getattr(_known(cls, _OWN), name)

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(_known(cls, _OWN), name, value)

    def __delattr__(cls, name: str) -> None:
        delattr(_known(cls, _OWN), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _known(cls, _OWN)(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _known(cls, _OWN))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _known(cls, _OWN))

    def __repr__(cls) -> str:
        return repr(_known(cls, _OWN))

    def __dir__(cls) -> list[str]:
        return dir(_known(cls, _OWN))


def its(value: Any) -> Any:
    """The connector behind a proxy; anything else is what it is."""
    return getattr(value, ITS) if type(type(value)) is _Kind else value


def index_of(value: Any) -> int | None:
    """The index of the connector behind a proxy; None of anything else."""
    return getattr(value, INDEX) if type(type(value)) is _Kind else None


def _special(name: str) -> Callable[..., Any]:
    """A special method: that of the connector's class, called as Python calls it."""

    def special(self: Any, *args: Any, **kwargs: Any) -> Any:
        connector = self._kvtrace_its
        return getattr(type(connector), name)(connector, *map(its, args), **kwargs)

    return special


def _get(self: Any, name: str) -> Any:
    return getattr(self._kvtrace_its, name)


def _set(self: Any, name: str, value: Any) -> None:
    _changed(self, name, lambda connector: setattr(connector, name, value))


def _delete(self: Any, name: str) -> None:
    _changed(self, name, lambda connector: delattr(connector, name))


def _changed(self: Any, name: str, change: Callable[[Any], None]) -> None:
    connector = self._kvtrace_its
    make = _known(type(self), _HOOKS).get(name)
    before = None if make is None else getattr(connector, name, None)
    change(connector)
    if make is not None:
        _put(self, type(self), name, make, before)


def _put(self: Any, cls: type, name: str, make: Make, before: Callable[..., Any] | None = None) -> None:
    """A new wrapper in a hook's place; the one that stood there calls ``before``."""
    wrappers: dict[str, Passed] = _known(cls, "_kvtrace_passed")
    if name in wrappers:
        wrappers[name].to = before
    made, wrappers[name] = make(self._kvtrace_its)
    slot = _known(cls, "__dict__")[name]
    if isinstance(slot, FunctionType):
        type.__setattr__(cls, name, made)
    else:
        slot.__set__(self, MethodType(made, self._kvtrace_its))


_FROM_OBJECT = (
    "__repr__", "__str__", "__format__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__hash__", "__dir__", "__sizeof__", "__reduce__", "__reduce_ex__", "__getstate__", "__init__",
)  # fmt: skip
_NOT_THOSE = {
    "__new__", "__del__", "__class__", "__dict__", "__weakref__", "__slots__", "__doc__", "__module__",
    "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__init_subclass__", "__subclasshook__",
    "__class_getitem__", "__prepare__", "__set_name__", "__annotate__", "__annotate_func__",
}  # fmt: skip


def _asked(name: str) -> property:
    """An attribute that every object has."""
    return property(
        operator.attrgetter(f"{ITS}.{name}"),
        lambda self, value: setattr(getattr(self, ITS), name, value),
        lambda self: delattr(getattr(self, ITS), name),
    )


def _namespace(cls: type) -> dict[str, Any]:
    members = {name: value for base in cls.__mro__[-2::-1] for name, value in vars(base).items()}
    names = [name for name in _FROM_OBJECT if hasattr(object, name)]
    names += [name for name, value in members.items() if _is_special(name) and name not in _NOT_THOSE]
    made: dict[str, Any] = {name: _special(name) for name in names if callable(getattr(cls, name, None))}
    made |= {name: None for name in names if getattr(cls, name, None) is None}  # as __hash__ = None
    made |= {name: _asked(name) for name in ("__class__", "__dict__", "__doc__", "__module__")}
    # vLLM asks for these at each layer: found sooner than by __getattr__.
    plain = [name for name, value in members.items() if type(value) is FunctionType and not _is_special(name)]
    made |= {name: property(operator.attrgetter(f"{ITS}.{name}")) for name in plain}
    return made | {"__getattr__": _get, "__setattr__": _set, "__delattr__": _delete}


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def make(connector: Any, index: int, hooks: Mapping[str, Make], asks: frozenset[str] = frozenset()) -> Any:
    """The proxy of a connector.

    Args:
        index: of the connector, in this process.
        hooks: name -> what makes the wrapper of that hook.
        asks: those whose wrapper gets the proxy, not the connector, as its first argument.
    """
    cls = type(connector)
    namespace = {name: value for name, value in _namespace(cls).items() if name not in hooks}
    namespace[_OWN] = cls
    namespace[_HOOKS] = dict(hooks)
    namespace["_kvtrace_passed"] = {}
    # Only a function in the class gets the proxy: one in a slot that held it would keep it alive.
    namespace |= {name: _get for name in hooks if name in asks}
    namespace["__slots__"] = (ITS, INDEX, "__weakref__", *(name for name in hooks if name not in asks))
    made: Any = type.__new__(_Kind, cls.__name__, (), namespace)
    type.__delattr__(made, "__slots__")
    proxy: Any = object.__new__(made)
    _known(made, "__dict__")[ITS].__set__(proxy, connector)
    _known(made, "__dict__")[INDEX].__set__(proxy, index)
    for name, maker in hooks.items():
        _put(proxy, made, name, maker)
    return proxy
