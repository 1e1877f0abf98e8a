"""Which keys of ``kv_connector_extra_config`` a connector reads: CONFIG_KEYS facts.

The dictionary is exchanged for an equal one that notes what is read. It is a ``dict`` to
isinstance, ``==``, json, repr and pydantic, and pickles and copies as a plain dict. Reading
all of it (``items()``, ``dict(config)``, iteration) counts as reading every key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtrace.agent.state import AGENT
from kvtrace.trace.facts import ConfigKeys
from kvtrace.trace.format import Role

_ATTRIBUTE = "kv_connector_extra_config"
_MAX_KEYS = 200


class ReadNotes(dict):  # type: ignore[type-arg]
    """A dict that notes which of its keys were asked for (in ``read_keys``)."""

    __slots__ = ("read_keys",)

    def __init__(self, value: dict[Any, Any]) -> None:
        super().__init__(value)
        self.read_keys: set[Any] = set()

    def _all(self) -> None:
        self.read_keys.update(dict.keys(self))

    def _plain(self) -> dict[Any, Any]:
        # dict.copy would come back through our keys()
        return dict(dict.items(self))

    def __getitem__(self, key: Any) -> Any:
        self.read_keys.add(key)
        return dict.__getitem__(self, key)

    def __contains__(self, key: Any) -> bool:
        self.read_keys.add(key)
        return dict.__contains__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.read_keys.add(key)
        return dict.get(self, key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.read_keys.add(key)
        return dict.setdefault(self, key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.read_keys.add(key)
        return dict.pop(self, key, *default)

    def __iter__(self) -> Iterator[Any]:
        self._all()
        return dict.__iter__(self)

    def keys(self) -> Any:
        self._all()
        return dict.keys(self)

    def values(self) -> Any:
        self._all()
        return dict.values(self)

    def items(self) -> Any:
        self._all()
        return dict.items(self)

    def copy(self) -> Any:
        self._all()
        return self._plain()

    def __or__(self, other: Any) -> Any:
        self._all()
        return self._plain() | other

    def __ror__(self, other: Any) -> Any:
        self._all()
        return other | self._plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (dict, (self._plain(),))


class _Noted:
    def __init__(self, notes: ReadNotes, role: Role) -> None:
        self.notes = notes
        self.role = role
        self.given = tuple(key for key in dict.keys(notes) if isinstance(key, str))[:_MAX_KEYS]
        self.index = 0
        """Of the connector, in this process."""
        self.written = -1
        """How many keys were read when the fact was written last."""


_live: dict[Role, _Noted] = {}
"""The connector made last, per role."""


def note_reads(config: Any, role: Role) -> _Noted | None:
    """Before a connector is made: put the noting dictionary into its KVTransferConfig."""
    _live.pop(role, None)
    transfer = getattr(config, "kv_transfer_config", None)
    value = getattr(transfer, _ATTRIBUTE, None)
    if type(value) is dict and value:
        notes = ReadNotes(value)
        # past validation on assignment, which would make a plain dict of it again
        object.__setattr__(transfer, _ATTRIBUTE, notes)
    elif isinstance(value, ReadNotes):
        notes = value  # both roles in one process share the configuration
    else:
        return None
    return _Noted(notes, role)


def made(noted: _Noted | None, index: int) -> None:
    """The connector exists, under that index."""
    if noted is not None:
        noted.index = index
        _live[noted.role] = noted
        _write(noted)


def step_ended(role: Role) -> None:
    """Write the fact again where more keys were read since."""
    noted = _live.get(role)
    if noted is not None and len(noted.notes.read_keys) != noted.written:
        _write(noted)


def _write(noted: _Noted) -> None:
    read = set(noted.notes.read_keys)
    noted.written = len(read)
    asked = sorted(key for key in read - set(noted.given) if isinstance(key, str))
    fact = ConfigKeys(
        connector=noted.index,
        given=noted.given,
        read=tuple(key for key in noted.given if key in read),
        asked=tuple(asked[:_MAX_KEYS]),
    )
    AGENT.fact(fact, noted.role)
