"""The whole page: one file, which loads nothing and runs nothing but what was put into it here."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from kvtrace import __version__
from kvtrace.picture.picture import Picture
from kvtrace.render.html import charts, sections
from kvtrace.render.html.markup import Markup, embedded, of_page, section, tag
from kvtrace.render.verify import verify_page as answers
from kvtrace.report.model import Report
from kvtrace.verify.answers import Result

_NAV = (
    ("findings", "Findings"), ("ledger", "Ledger"), ("flow", "Token flow"), ("ruled-out", "Ruled out"),
    ("map", "Layers and steps"), ("requests", "Requests"), ("times", "Hook times"),
    ("processes", "Processes"), ("glossary", "Glossary"),
)  # fmt: skip


_FOOT = (
    f"Made by kvtrace {__version__} from the trace of one run. This file loads nothing from the network. "
    "Charts: Apache ECharts (Apache-2.0)."
)
_WITHOUT = "Without JavaScript the charts are missing; the tables hold the same."


def page(report: Report, picture: Picture | None = None) -> str:
    """The report as an HTML document.

    Args:
        picture: of the run's steps, None where there is only the report.
    """
    data = (picture or Picture()).document()
    library, script = _file("charts.min.js"), _file("page.js")
    parts = [
        tag("a", "To the answer", href="#verdict", class_="skip"),
        sections.top(report),
        tag("main", [_navigation(), *_body(report, picture)]),
        tag("footer", [_FOOT]),
        Markup(f'<script type="application/json" id="kvtrace-picture">{embedded(data)}</script>'),
        Markup(f"<script>{library}</script><script>{script}</script>"),
    ]  # fmt: skip
    return document(sections.title(report), parts, library, script)


def verify_page(result: Result) -> str:
    """What :func:`kvtrace.render.verify.verify_page` says."""
    header = tag("header", [tag("h1", "kvtrace verify")])
    told = section("verify", "Proof by return", of_page(answers(result)[1:]))
    return document(f"verify {result.subject}", [header, tag("main", [told])])


def document(title: str, parts: Sequence[Markup], *scripts: str) -> str:
    """A whole document; it may run these scripts and nothing else."""
    allowed = " ".join(_hash(script) for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{tag('title', f'kvtrace: {title}')}<style>{_file('page.css')}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(parts)}</body></html>\n'


def _navigation() -> Markup:
    links = [tag("li", [tag("a", title, href=f"#{ident}")]) for ident, title in _NAV]
    return tag("nav", [tag("ul", links)], aria_label="Parts of this page")


def _body(report: Report, picture: Picture | None) -> list[Markup]:
    return [
        tag("noscript", [tag("p", _WITHOUT, class_="bad")]),
        sections.findings(report),
        sections.ledgers(report),
        sections.flow(report),
        sections.ruled_out(report),
        charts.heat_maps(picture),
        charts.request_lanes(picture, report),
        sections.hook_times(report),
        sections.processes(report),
        sections.glossary(report),
    ]


@cache
def _file(name: str) -> str:
    return (files("kvtrace.render.html") / name).read_text(encoding="utf-8").strip()


def _hash(script: str) -> str:
    """The source expression of a Content-Security-Policy for one script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
