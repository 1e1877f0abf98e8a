"""HTML from Python values: whatever is no :class:`Markup` is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import TypeAlias

from kvtrace.render import page
from kvtrace.words import clean


class Markup(str):
    """HTML that was made here."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[str]"
"""Text (escaped), Markup (as it is), or several of them."""

_JSON = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def text(value: Content) -> Markup:
    """The content, escaped; control characters are made visible."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return Markup(html.escape(clean(value)))
    return Markup("".join(text(one) for one in value))


def tag(name: str, content: Content = "", **attributes: str | int | bool | None) -> Markup:
    """``tag("p", "a < b", class_="dim")``: an element. Attributes: ``_`` at the end is dropped, else it is
    ``-``; True stands alone, False and None are left out."""
    shown = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            shown.append(f" {key}")
        elif value is not None and value is not False:
            shown.append(f' {key}="{html.escape(clean(str(value)))}"')
    return Markup(f"<{name}{''.join(shown)}>{text(content)}</{name}>")


def embedded(document: object) -> str:
    """JSON that can stand in a script element: no character of it means anything to HTML."""
    found = json.dumps(document, separators=(",", ":"), allow_nan=False)
    for char, escape in _JSON.items():
        found = found.replace(char, escape)
    return found


def table(heads: Iterable[tuple[str, bool]], rows: Iterable[Iterable[Content]], caption: str = "") -> Markup:
    """A table. `heads`: each column's name, and whether it holds numbers."""
    columns = list(heads)
    head = [tag("th", name, scope="col", class_="n" if number else None) for name, number in columns]
    body = []
    for row in rows:
        cells = zip(row, columns, strict=True)
        body.append(tag("tr", [tag("td", one, class_="n" if number else None) for one, (_, number) in cells]))
    parts = [
        *([tag("caption", caption)] if caption else []),
        tag("thead", [tag("tr", head)]),
        tag("tbody", body),
    ]
    return tag("div", [tag("table", parts)], class_="wide", tabindex=0, role="region",
               aria_label=caption or ", ".join(name for name, _ in columns if name))  # fmt: skip


def table_of(part: page.Table, caption: str) -> Markup:
    """A table of a page, all of it."""
    heads = [(column.head, column.right) for column in part.columns]
    shown = [
        [tag("code", one) if isinstance(one, page.Code) else one for one in row.cells] for row in part.rows
    ]
    return table(heads, shown, caption)


def definitions(rows: Iterable[tuple[Content, Content]]) -> Markup:
    """Names, and what there is to say of each."""
    return tag("dl", [part for name, words in rows for part in (tag("dt", name), tag("dd", words))])


def bullets(lines: Iterable[Content]) -> Markup:
    return tag("ul", [tag("li", line) for line in lines])


def section(ident: str, title: str, *content: Content) -> Markup:
    """A part of the page, with a heading that the table of contents leads to."""
    heading = tag("h2", title, id=ident)
    return tag("section", [heading, *(text(one) for one in content)], aria_labelledby=ident)
