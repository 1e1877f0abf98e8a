"""Adapters: functions that say what a connector's metadata declares, where reading its shape can't.

A connector ships one under the entry-point group :data:`GROUP`, named after its class (``Name`` or
``module:Name``); a user names one for the run (``module:function``). Documented in docs/metadata-adapter.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Any

from kvtrace.agent.metadata import Answer
from kvtrace.agent.metadata.entries import DeclaredEntry
from kvtrace.agent.metadata.step_requests import StepRequests
from kvtrace.agent.metadata.walk import Problem
from kvtrace.agent.state import AGENT
from kvtrace.trace.format import Flag

GROUP = "kvtrace.metadata_adapters"
_MOST_ENTRIES = 4096
_DIRECTIONS = {"store": int(Flag.STORE), "load": int(Flag.LOAD)}
_FIELDS = ("request_id", "direction", "start", "end", "unit")

KvEntries = Callable[[Any, "AdapterContext"], "Iterable[Any] | None"]
"""``kv_entries(metadata, context)``: entries, or None to leave this metadata to kvtrace's own reader."""


class AdapterContext:
    """What the scheduler knows in this step; nothing of it is to be changed."""

    def __init__(self, requests: StepRequests) -> None:
        self._requests = requests

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens in a block of each KV cache group."""
        return tuple(self._requests.sizes)

    @property
    def scheduled(self) -> Mapping[str, int]:
        """Request id -> tokens that this step computes."""
        return self._requests.scheduled

    def block_ids(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The blocks of a request, in order of position, a tuple a KV cache group; () where unknown."""
        return tuple(tuple(table) for table in self._requests.tables(request_id))

    def computed(self, request_id: str) -> tuple[int, int] | None:
        """Tokens of a request that are computed before this step and with it; None where unknown."""
        return self._requests.computed(request_id)


@dataclass(frozen=True)
class Adapter:
    """A function and where it was found; ``function`` None where it could not be had, and ``error`` why."""

    name: str
    function: KvEntries | None = None
    error: str = ""

    def entries(self, metadata: Any, requests: StepRequests) -> Answer | None:
        """The adapter's answer; None where it leaves this metadata to the reader. Never raises."""
        if self.function is None:
            return [], [Problem("", f"the adapter {self.name} can't be used: {self.error}")]
        try:
            found = self.function(metadata, AdapterContext(requests))
            if found is None:
                return None
            listed = list(islice(found, _MOST_ENTRIES + 1))
            if len(listed) > _MOST_ENTRIES:
                raise ValueError(f"more than {_MOST_ENTRIES} entries")
            return [_entry(one, requests) for one in listed], []
        except Exception as error:
            return [], [Problem("", f"the adapter {self.name} raised {_text(error)}")]


def _entry(given: Any, requests: StepRequests) -> DeclaredEntry:
    """One entry of an adapter: a tuple, a mapping or an object with these fields.

    Raises:
        ValueError: it is none.
    """
    if isinstance(given, Mapping):
        values = [given.get(name) for name in _FIELDS]
    elif isinstance(given, tuple):
        values = [*given, None][:5] if len(given) in (4, 5) else []
    else:
        values = [getattr(given, name, None) for name in _FIELDS]
    if len(values) != 5:
        raise ValueError(f"{given!r:.100} is no entry (request_id, direction, start, end[, unit])")
    request_id, direction, start, end, unit = values
    if not isinstance(request_id, str) or direction not in _DIRECTIONS:
        raise ValueError(f"{given!r:.100}: a request id, and 'store' or 'load'")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end:
        raise ValueError(f"{given!r:.100}: positions [start, end) as integers")
    if unit not in ("tokens", "blocks", None):
        raise ValueError(f"{given!r:.100}: the unit is 'tokens' or 'blocks'")
    if unit == "blocks":
        if len(set(requests.sizes)) != 1:
            raise ValueError("blocks of which KV cache group? Give positions in tokens")
        start, end = start * requests.sizes[0], end * requests.sizes[0]
    return DeclaredEntry(request_id, _DIRECTIONS[direction], end - start, end - start, start)


class Adapters:
    """The adapters of this process, each looked for once.

    Args:
        named: ``module:function`` that the user gave for the run, "" for none.
    """

    def __init__(self, named: str = "") -> None:
        self._named = named
        self._known: dict[tuple[type, bool], Adapter | None] = {}
        self.answered: dict[int, tuple[Any, Answer]] = {}
        """By id of the metadata: what the adapters of connectors inside a connector answered."""

    def of(self, cls: type, inside: bool = False) -> Adapter | None:
        """The adapter of a connector class; the user's own for all that stand in no other connector."""
        key = cls, inside
        if key not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            self._known[key] = self._find(cls, inside)
        return self._known[key]

    @cached_property
    def _points(self) -> dict[str, Any]:
        try:
            from importlib.metadata import entry_points

            return {point.name: point for point in entry_points(group=GROUP)}
        except Exception:
            return {}

    def _find(self, cls: type, inside: bool) -> Adapter | None:
        if self._named and not inside:
            return _load(self._named, self._named)
        for base in cls.__mro__:
            for name in (f"{base.__module__}:{base.__qualname__}", base.__qualname__):
                point = self._points.get(name)
                if point is not None:
                    return _load(f"{name} ({point.value})", point)
        return None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {AGENT.said(error, 150)}"[:200]


def _load(name: str, where: Any) -> Adapter:
    """An adapter from an entry point, or from ``module:function``."""
    try:
        if isinstance(where, str):
            module, _, attribute = where.partition(":")
            function = attrgetter(attribute or "kv_entries")(importlib.import_module(module))
        else:
            function = where.load()
    except Exception as error:
        return Adapter(name, error=_text(error))
    return Adapter(name, function) if callable(function) else Adapter(name, error="it is no function")
