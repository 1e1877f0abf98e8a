"""What the agent shares between a connector's threads, where two of them come at once."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from kvtrace.agent.ids import Names
from kvtrace.agent.origin import WorkOrigin
from kvtrace.agent.watch import background


def test_a_name_that_another_thread_forgets_is_no_error(trace: Any) -> None:
    class Shared(dict[str, int]):
        def __delitem__(self, text: str) -> None:
            super().__delitem__(text)  # the other thread
            super().__delitem__(text)

    names = Names(1)
    names._ids = Shared()
    assert names.id("layer 0") > 0
    assert names.id("layer 1") > 0 and list(names._ids) == ["layer 1"]


def test_an_item_that_another_thread_has_taken_has_no_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads get the same sentinel of a queue, and one of the puts was noted."""

    class Emptied(deque[WorkOrigin]):
        def __bool__(self) -> bool:
            return True  # as when this thread looked

    queue, item = object(), None
    monkeypatch.setitem(background._items, (id(queue), id(item)), Emptied())
    assert background._take_item(queue, item) is None
