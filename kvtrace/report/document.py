"""A JSON document of kvtrace from bytes: checked by its schema, or one line that says what it is instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from kvtrace.errors import KvtraceError
from kvtrace.report.validate import problem
from kvtrace.trace.format import MAGIC


class DocumentKind(NamedTuple):
    """What is read: ``name`` is "report" or "baseline", ``schema`` its ``kvtrace.NAME/N``."""

    name: str
    schema: str
    rules: Callable[[], dict[str, Any]]
    """The JSON Schema."""
    error: type[KvtraceError]
    max_bytes: int
    """The documents are bounded: what is larger is something else, and is not read."""
    how: str
    """What to give instead of another file."""
    again: str
    """How a damaged or an older one is made again."""
    spool: str
    """What to give instead of a spool."""
    others: tuple[tuple[str, str, str], ...]
    """Other documents of kvtrace: name, what to call it, what to do with it (``{}``: the path)."""


def parse(kind: DocumentKind, data: bytes, where: str) -> Any:
    """The document in `data`; `where` names it in errors.

    Raises:
        KvtraceError: `kind.error`, with what the data is instead.
    """
    if len(data) > kind.max_bytes:
        raise kind.error(f"larger than any {kind.name} ({kind.max_bytes >> 20} MiB)", where, kind.how)
    if data.startswith(MAGIC):
        raise kind.error(f"this is a spool, not a {kind.name}", where, kind.spool)
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise kind.error("not JSON (not UTF-8 text)", where, kind.how) from None
    except RecursionError:
        raise kind.error(f"JSON nested too deep for a {kind.name}", where, kind.how) from None
    except ValueError as error:
        if not data.strip():
            raise kind.error("the file is empty", where, kind.how) from None
        at = "a bad number"
        if isinstance(error, json.JSONDecodeError):
            at = f"{error.msg}, line {error.lineno}"
        raise kind.error(f"not JSON, or cut short ({at})", where, kind.how) from None
    return check(kind, value, where)


def check(kind: DocumentKind, value: object, where: str) -> Any:
    """`value`, if it is valid by its schema.

    Raises:
        KvtraceError: `kind.error`: another document, a newer or older one, a wrong type or field.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, str):
        raise kind.error(f"JSON, but no kvtrace {kind.name} (no schema field)", where, kind.how)
    if schema != kind.schema:
        _refuse(kind, schema, where)
    try:
        found = problem(value, kind.rules())
    except RecursionError:
        raise kind.error(f"JSON nested too deep for a {kind.name}", where, kind.how) from None
    if found:
        raise kind.error(f"damaged {kind.name}", where, found, kind.again)
    return value


def _refuse(kind: DocumentKind, schema: str, where: str) -> NoReturn:
    match = re.fullmatch(r"kvtrace\.([a-z]+)/(\d{1,9})", schema)
    name, version = (match[1], int(match[2])) if match else ("", 0)
    if name == kind.name and version > int(kind.schema.rpartition("/")[2]):
        raise kind.error(f"{schema} was made by a newer kvtrace", where, "upgrade kvtrace to read it")
    if name == kind.name:
        older = f"{schema} was made by an older kvtrace, this one reads {kind.schema}"
        raise kind.error(older, where, kind.again)
    for other, words, remedy in kind.others:
        if name == other:
            raise kind.error(f"this is {words}, not a {kind.name}", where, remedy.format(where))
    raise kind.error(f"JSON of another kind (schema {ascii(schema)[:60]})", where, kind.how)


def _no_constant(name: str) -> Any:
    raise ValueError(name)
