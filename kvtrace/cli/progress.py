"""A progress bar on stderr, where somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, octets: bool = False) -> Iterator[Callable[..., None]]:
    """Gives a function that takes how much is done, of how much, and what is done now if not `what`."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total, now=what: None
        return
    from rich import progress as rich
    from rich.console import Console

    bar, task = rich.BarColumn(), rich.TextColumn("{task.description}")
    columns: list[rich.ProgressColumn] = [bar, rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), task]
    if octets:
        columns = [task, bar, rich.DownloadColumn(), rich.TimeRemainingColumn()]
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        ident = shown.add_task(what, total=None)
        yield lambda done, total, now=what: shown.update(ident, completed=done, total=total, description=now)
