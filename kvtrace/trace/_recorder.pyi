"""What ``_recorder.c`` makes."""

from collections.abc import Sequence
from typing import Any

RECORD_SIZE: int
WINDOW: int
WINDOW_FULL: int
HOOK: int
OP: int
EXEC: int
TRAILER: int
SEAL: int
SIZE_LIMIT: int
WRITE_FAILED: int
DESCRIPTOR_LOST: int
RAISED: int
NO_METADATA: int

class Store:
    size: int
    blocks: int
    lost: int
    limit: int
    ceiling: int
    full: bool
    alive: bool
    descriptor: int
    path: str

    def __new__(cls, fd: int, path: str, window: int, seed: int, limit: int, ceiling: int) -> Store: ...
    def add(self, words: Sequence[int], /) -> None: ...
    def flush(self) -> None: ...
    def stop(self, why: int, /) -> None: ...
    def abandon(self) -> None: ...
    def mark(self) -> int: ...
    def collapse(
        self, mark: int, /
    ) -> list[tuple[int, int, int, int, int, int, int, int, int, bytes]] | None: ...

class Call:
    def __new__(
        cls,
        agent: Any,
        side: Any,
        head: int,
        threads: dict[int, int],
        switches: tuple[tuple[Any, str], ...],
        ids: dict[str, int] | None = None,
        slots: str | None = None,
        entries: str | None = None,
        hooked: str | None = None,
        direct: int = 0,
        skip: int = 0,
        modes: int = -1,
    ) -> Call: ...
    def begin(self) -> int | None: ...
    def end(self, token: int, /, *said: Any) -> bool: ...

def begun(token: int, /) -> int: ...
def use(store: Store | None, /) -> None: ...
