"""``kvtrace docs``: the page of a cause, from the catalogue."""

from __future__ import annotations

import difflib

import typer

from kvtrace.cli.output import emit, screen
from kvtrace.errors import KvtraceError


def docs(
    id: str = typer.Argument("", metavar="[ID]", help="A cause; without it, all are listed."),
) -> None:
    """Print the page of a cause: what it means, how it is seen, what to do."""
    from kvtrace.causes.registry import CATALOGUE
    from kvtrace.render.cause import cause_page
    from kvtrace.render.terminal import terminal

    if not id:
        wide = max(map(len, CATALOGUE), default=0)
        emit("".join(f"{name:{wide}}  {cause.meaning}\n" for name, cause in CATALOGUE.items()))
        return
    if id not in CATALOGUE:
        near = difflib.get_close_matches(id, CATALOGUE, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "kvtrace docs lists them"
        raise KvtraceError("no such cause", ascii(id)[1:-1], hint)
    emit(terminal(cause_page(CATALOGUE[id]), screen()))
