"""The proxy: for whoever holds it, it is the connector."""

from __future__ import annotations

import abc
import copy
import functools
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest

from kvtrace.agent.wrap.proxy import index_of, its
from kvtrace.trace import hooks

from . import fakes
from .fakes import on_worker

pytestmark = pytest.mark.usefixtures("each_recorder")


class SupportsHMA(abc.ABC):
    @abc.abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


class Registry(abc.ABCMeta):
    """A metaclass that counts what it makes, and has members of its own."""

    made = 0

    def __new__(mcs, *args: Any, **kwargs: Any) -> Any:
        Registry.made += 1
        return super().__new__(mcs, *args, **kwargs)

    def about(cls) -> str:
        return f"about {cls.__name__}"


class Mine(fakes.Storing, SupportsHMA, metaclass=Registry):
    """A connector's own documentation."""

    __slots__ = ("slotted",)
    shared = 0

    def __init__(self) -> None:
        super().__init__()
        self.slotted = "in a slot"
        self.reads = 0

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    @property
    def size(self) -> int:
        self.reads += 1
        return len(self.saved)

    @size.setter
    def size(self, value: int) -> None:
        del self.saved[value:]

    @property
    def broken(self) -> int:
        self.reads += 1
        return self.no_such_thing  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("made_up_"):
            return name
        raise AttributeError(f"Mine has no {name}")

    @classmethod
    def get_required_kvcache_layout(cls, config: Any) -> Any:
        return cls, config

    @staticmethod
    def build_kv_connector_stats(data: Any = None) -> Any:
        return data

    def __len__(self) -> int:
        return len(self.saved)

    def __contains__(self, layer: str) -> bool:
        return any(layer == saved[0] for saved in self.saved)

    def __iter__(self) -> Any:
        return iter(self.saved)

    def __getitem__(self, at: int) -> Any:
        return self.saved[at]

    def __call__(self, value: int) -> int:
        return value + 1

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.reads = -1

    def __add__(self, other: Any) -> Any:
        return type(other)


@pytest.fixture
def both(trace: Any) -> Any:
    """(what vLLM holds, the connector)"""
    connector = Mine()
    return on_worker(connector), connector


def error_of(call: Any) -> str:
    try:
        return repr(call())
    except Exception as error:
        return repr(error)


ASKED = {
    "class": lambda c: c.__class__,
    "isinstance": lambda c: [isinstance(c, cls) for cls in (Mine, fakes.Storing, SupportsHMA, abc.ABC, dict)],
    "type's name": lambda c: (type(c).__name__, type(c).__qualname__, type(c).__module__, type(c).__doc__),
    "type's mro": lambda c: (type(c).__mro__, type(c).__bases__),
    "type's dictionary": lambda c: type(c).__dict__ == Mine.__dict__,
    "type's classmethod": lambda c: type(c).get_required_kvcache_layout(1),
    "classmethod": lambda c: c.get_required_kvcache_layout(2),
    "staticmethod": lambda c: (type(c).build_kv_connector_stats({}), c.build_kv_connector_stats([])),
    "type's method": lambda c: type(c).save_kv_layer is fakes.Storing.save_kv_layer,
    "type's metaclass": lambda c: type(c).about(),
    "type called": lambda c: type(type(c)()),
    "type as a key of isinstance": lambda c: isinstance(Mine(), type(c)),
    "subclass of type": lambda c: issubclass(type("Sub", (Mine,), {}), type(c)),
    "super class's method": lambda c: super(Mine, its(c)).save_kv_layer.__func__ is Mine.save_kv_layer,
    "doc": lambda c: (c.__doc__, c.__module__),
    "vars": lambda c: sorted(vars(c)),
    "dir": lambda c: dir(c),
    "slot": lambda c: c.slotted,
    "property": lambda c: c.size,
    "property that raises": lambda c: (error_of(lambda: c.broken), c.reads),
    "getattr": lambda c: (c.made_up_name, hasattr(c, "none"), getattr(c, "none", 5)),
    "abstract": lambda c: inspect.isabstract(type(c)),
    "signature": lambda c: [
        str(inspect.signature(getattr(c, name))) for name in hooks.NAMES if hasattr(c, name)
    ],
    "method": lambda c: (inspect.ismethod(c.save_kv_layer), c.save_kv_layer.__name__),
    "source": lambda c: inspect.getsource(c.save_kv_layer),
    "callable": lambda c: (callable(c), c(1)),
    "length, truth": lambda c: (len(c), bool(c)),
    "in, iteration, index": lambda c: ("layer.0" in c, list(c), error_of(lambda: c[0])),
    "arithmetic": lambda c: c + 1,
    "hash, dictionary": lambda c: {c: 1}.get(its(c)),
    "equality": lambda c: (c == c, its(c) == c, c == its(c), c != c, c == 1),
    "pickle": lambda c: type(pickle.loads(pickle.dumps(c))),
    "copies": lambda c: (type(copy.copy(c)), type(copy.deepcopy(c))),
    "representation": lambda c: str(c).partition(" at ")[0],
    "format": lambda c: f"{c!r}".partition(" at ")[0],
    "dispatch": lambda c: functools.singledispatch(lambda value: type(its(value)))(c),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_it_answers_as_the_connector_does(both: Any, asked: str) -> None:
    held, _ = both
    assert index_of(held)
    assert ASKED[asked](held) == ASKED[asked](Mine())


def test_setting_and_deleting_reach_the_connector(both: Any) -> None:
    held, connector = both
    held.more = 1
    held.slotted = 2
    held.saved.append(("layer.0",))
    held.size = 0
    assert (connector.more, connector.slotted, connector.saved) == (1, 2, [])
    del held.more
    assert not hasattr(connector, "more")
    with pytest.raises(AttributeError):
        del held.more
    with held as entered:
        assert entered is connector
    assert connector.reads == -1


def test_what_is_set_on_its_class_is_set_on_the_connectors(both: Any) -> None:
    held, _ = both
    type(held).shared = 5
    assert Mine.shared == 5
    del type(held).shared
    assert not hasattr(Mine, "shared")
    Mine.shared = 0
    other = type("Other", (Mine,), {"__slots__": ()})
    held.__class__ = other
    assert type(its(held)) is held.__class__ is other and isinstance(held, other)


def test_no_class_is_made_of_the_users(trace: Any) -> None:
    before, made = Mine.__subclasses__(), Registry.made
    on_worker(Mine())
    assert Mine.__subclasses__() == before and Registry.made == made


def test_no_answer_is_left_in_the_abc_caches(both: Any) -> None:
    """``isinstance`` remembers classes by equality: one that passed for another would spoil the answers."""
    held, _ = both

    class Later(abc.ABC):  # noqa: B024
        pass

    assert not issubclass(type(held), Later) and not isinstance(held, Later)
    Later.register(Mine)
    assert isinstance(Mine(), Later) and isinstance(held, Later)
    assert isinstance(Mine(), SupportsHMA) and issubclass(Mine, SupportsHMA)


def recorded(trace: Any) -> int:
    return len(trace.calls(hooks.SAVE_LAYER))


def test_who_patches_a_hook_on_it_gets_what_he_would(trace: Any, both: Any) -> None:
    """The method that was there, kept and called by the patch, is the connector's: no endless loop."""
    held, connector = both
    original, calls = held.save_kv_layer, []

    def patch(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    held.save_kv_layer = patch
    held.save_kv_layer("layer.0", "kv", None)
    assert connector.save_kv_layer is patch and len(calls) == 1 and len(connector.saved) == 1
    assert recorded(trace) == 1
    del held.save_kv_layer
    held.save_kv_layer("layer.1", "kv", None)
    assert len(calls) == 1 and len(connector.saved) == 2 and recorded(trace) == 2


def test_a_hook_that_the_connector_replaces_later_runs(trace: Any, both: Any) -> None:
    held, connector = both
    connector.save_kv_layer = lambda *args, **kwargs: "its own"
    assert held.save_kv_layer("layer.0", "kv", None) == "its own"
    assert recorded(trace) == 1


def test_the_connector_goes_with_the_last_one_who_held_it(trace: Any) -> None:
    connector = Mine()
    held = on_worker(connector)
    held.save_kv_layer("layer.0", "kv", None)
    held.wait_for_save()
    alive = weakref.ref(connector), weakref.ref(held)
    gc.collect()
    gc.disable()
    try:
        del connector, held
        assert [one() for one in alive] == [None, None], "as soon as it is let go, without the collector"
    finally:
        gc.enable()
