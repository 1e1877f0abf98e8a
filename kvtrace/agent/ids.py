"""The numbers of watched calls, and the ids of texts that many records share."""

from __future__ import annotations

import itertools

from kvtrace.agent.state import AGENT

_calls = itertools.count(1)


def next_call() -> int:
    """The running number of a watched call, or of a piece of background work."""
    return next(_calls)


class Names:
    """Ids of the latest texts: layers and hooks that touch the same share one, old ones are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: dict[str, int] = {}
        AGENT.openings.append(self._ids.clear)

    def id(self, text: str) -> int:
        recorder = AGENT.live()
        if recorder is None:
            return 0
        ident = self._ids.get(text)
        if ident is None:
            ident = self._ids[text] = recorder.name(text)
            if len(self._ids) > self._most:
                try:
                    oldest = next(iter(self._ids))
                    del self._ids[oldest]
                except (KeyError, RuntimeError, StopIteration):
                    return ident  # another thread forgets or adds one just now
                recorder.forget_name(oldest)
        return ident
