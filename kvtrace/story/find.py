"""Which request a user means by an id, or by the beginning of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvtrace.errors import KvtraceError

MOST = 6
"""Ids that an error lists."""


def find(wanted: str, ids: Sequence[str], clients: Mapping[str, str]) -> tuple[str, int]:
    """(engine's id, which request of that id) for an id of client or engine, or a unique prefix.

    Args:
        ids: the engine's ids, in order of arrival; one stands there twice where it was used again.
        clients: engine's id -> client's.

    ``ID#2`` means the second request of an id that was used again.

    Raises:
        KvtraceError: none fits, or several do (they are listed).
    """
    match = re.fullmatch(r"(.+)#([1-9]\d{0,5})", wanted)
    number = None
    if match and wanted not in ids and wanted not in clients.values():
        wanted, number = match[1], int(match[2])
    unique = list(dict.fromkeys(ids))
    for fits in (
        [one for one in unique if one == wanted],
        [one for one in unique if clients.get(one) == wanted],
        [one for one in unique if one.startswith(wanted) or clients.get(one, "").startswith(wanted)],
    ):
        if wanted and fits:
            break
    else:
        fits = []
    if not fits:
        hint = "kvtrace requests lists them" if ids else "no request reached a scheduler in this run"
        raise KvtraceError("no such request", shown(wanted), hint)
    if len(fits) > 1:
        named = ", ".join(_named(one, clients) for one in fits[:MOST])
        more = f" and {len(fits) - MOST} more" if len(fits) > MOST else ""
        raise KvtraceError(
            f"{shown(wanted)} fits {len(fits)} requests", f"{named}{more}", "give more of the id"
        )
    uses = list(ids).count(fits[0])
    if number is None and uses > 1:
        raise KvtraceError(
            f"the id {shown(fits[0])} was used {uses} times", f"give {fits[0]}#1 to {fits[0]}#{uses}"
        )
    if number is not None and number > uses:
        raise KvtraceError("no such request", f"{fits[0]}#{number}", f"the id was used {uses} times")
    return fits[0], (number or 1) - 1


def _named(ident: str, clients: Mapping[str, str]) -> str:
    client = clients.get(ident, "")
    return f"{shown(ident)} (client {shown(client)})" if client and client != ident else shown(ident)


def layers(wanted: str, names: Sequence[str]) -> list[str]:
    """The layers of that name; with that number in their name, or where none has it at that place; or with
    these letters in their name."""
    if wanted in names:
        return [wanted]
    if re.fullmatch(r"\d{1,9}", wanted, re.ASCII):
        number = str(int(wanted))
        fits = [name for name in names if number in re.split(r"\D+", name)]
        return fits or list(names[int(number) : int(number) + 1])
    return [name for name in names if wanted and wanted in name]


def shown(text: str) -> str:
    """What somebody typed, as it is printed."""
    return ascii(text)[1:-1][:120]
