"""Bytes of KV that were read against bytes that came to rest, in words."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.ledger.run import OutsideBytes
from kvtrace.words import count, plural, size

_LEAST, _MOST = 0.02, 0.9
"""Bytes in files for one that was read: what is removed of less is an index, a list of names; more is all."""


def narrower(case: Case) -> Iterator[OutsideBytes]:
    """Connectors of which less came into files than they read, and that removed none: narrower numbers,
    compression, or a loss. Next to nothing in one file is an index or a log, and no store."""
    for one in case.run.outside:
        index = one.files < 2 and (one.came or 0) < _LEAST * one.read
        if one.came and one.came < _MOST * one.read and not (index or _removes(one)):
            yield one


def removed(case: Case) -> Iterator[OutsideBytes]:
    """Connectors that removed a good part of what they had put into files."""
    return (one for one in case.run.outside if _removes(one))


def _removes(one: OutsideBytes) -> bool:
    """Unless what stays accounts for all that was read: then these were temporary files."""
    stays = one.at_end is not None and one.read and one.at_end >= one.read
    least = max((1 - _MOST) * one.put, _LEAST * one.read)
    return bool(one.removed and one.taken_away > least and not stays)


def never_came(one: OutsideBytes) -> int:
    """Tokens for which no byte came, where others account for all of theirs, so that no number was made
    narrower; 0 where that can't be told."""
    if not one.accounted or not one.token or one.came is None:
        return 0
    return max(0, one.read - one.came) // one.token


def tokens_gone(one: OutsideBytes) -> int:
    """Tokens for whose bytes nothing stands in files at the end, as far as it can be told."""
    gone = max(one.read - (one.at_end or 0), 0) if one.at_end is not None else one.taken_away
    return gone // one.token if one.token else 0


def tokens_removed(one: OutsideBytes) -> int:
    """Of these no more than what it removed held."""
    return min(tokens_gone(one), one.taken_away // one.token) if one.token else 0


def removed_in_words(one: OutsideBytes) -> str:
    """``12 of 16 files that it wrote, 3.0 MiB of 4.0 MiB, were removed or emptied by the connector``."""
    what = f"{count(one.removed)} of {plural(one.files, 'file')} that it wrote"
    return f"{what}, {size(one.taken_away)} of {size(one.put)}, were removed or emptied by the connector"


def in_words(one: OutsideBytes) -> str:
    """``4.0 MiB were read from the KV cache, 1.0 MiB came to rest (25 %)``."""
    came = one.came or 0
    share = 100 * came / one.read if one.read else 0.0
    return f"{size(one.read)} were read from the KV cache, {size(came)} came to rest ({share:.0f} %)"
