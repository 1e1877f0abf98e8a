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


def of_page(parts: page.Page) -> Markup:
    """The parts of a page, as they stand in the other formats."""
    return text(_part(part) for part in parts)


def _part(part: page.Part) -> Markup:
    match part:
        case page.Heading(words):
            return tag("h3", line(words))
        case page.Facts(facts):
            return tag("p", " · ".join(facts), class_="facts")
        case page.Paragraph(words, style):
            return tag("p", line(words), class_=style or None) if page.plain(words) else Markup()
        case page.Badge(word, words, style):
            return tag("h3", [tag("span", word, class_=f"badge {style}"), " ", line(words)])
        case page.Labelled(label, lines):
            return text([tag("h4", label), bullets(map(line, lines))]) if lines else Markup()
        case page.Bullets(lines):
            return bullets(map(line, lines))
        case page.Terms(rows):
            return definitions((tag("code", name), words) for name, words in rows)
        case page.Table() if part.rows:
            return table(part)
        case page.Command(command):
            return tag("p", ["Next: ", tag("code", command)], class_="next")
    return Markup()


def line(value: page.Line) -> Markup:
    """A line, its code spans and its running text."""
    pieces = (value,) if isinstance(value, str) else value
    return text(tag("code", piece) if isinstance(piece, page.Code) else piece for piece in pieces)


def table(part: page.Table) -> Markup:
    """A table, all of it; shares that are drawn stand in a column behind the others."""
    columns = [part.columns[at] for at in part.used()]
    drawn = any(row.bar is not None for row in part.rows)
    heads = [*columns, *([page.Column()] if drawn else [])]
    head = [tag("th", one.head, scope="col", class_="n" if one.right else None) for one in heads]
    body = []
    for row in part.rows:
        cells = []
        for at, column in zip(part.used(), columns, strict=True):
            style = "n" if column.right else "" if at else row.style
            cells.append(tag("td", line((row.cells[at],)), class_=style or None))
        if drawn:
            bar = width(row.bar or 0.0, "bad" if row.style == "bad" else None)
            cells.append(tag("td", [tag("span", [bar], class_="bar", aria_hidden="true")]))
        body.append(tag("tr", cells, class_="total" if row.total else None))
    parts = [
        *([tag("caption", part.title)] if part.title else []),
        tag("thead", [tag("tr", head)]),
        tag("tbody", body),
    ]
    label = part.title or ", ".join(one.head for one in columns if one.head)
    return tag("div", [tag("table", parts)], class_="wide", tabindex=0, role="region", aria_label=label)


def width(share: float, kind: str | None = None) -> Markup:
    """A bar; a share above nothing shows."""
    if share <= 0:
        return Markup()
    return tag("i", "", class_=kind, style=f"width:{max(0.5, min(1.0, share) * 100):.2f}%")


def definitions(rows: Iterable[tuple[Content, Content]]) -> Markup:
    """Names, and what there is to say of each."""
    return tag("dl", [part for name, words in rows for part in (tag("dt", name), tag("dd", words))])


def bullets(lines: Iterable[Content]) -> Markup:
    return tag("ul", [tag("li", one) for one in lines])


def section(ident: str, title: str, *content: Content) -> Markup:
    """A part of the page, with a heading that the table of contents leads to."""
    heading = tag("h2", title, id=ident)
    return tag("section", [heading, *(text(one) for one in content)], aria_labelledby=ident)
