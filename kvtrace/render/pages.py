"""``python -m kvtrace.render.pages DIR`` writes ``docs/causes/``: a page for each cause, and their list."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtrace.causes.registry import CATALOGUE
from kvtrace.render.cause import cause_page
from kvtrace.render.markdown import markdown

_HEAD = (
    "<!-- written by python -m kvtrace.render.pages docs/causes; edit the cause's file in "
    "kvtrace/causes/rules -->\n"
)


def pages() -> dict[str, str]:
    """File name -> text."""
    found = {f"{cause.id}.md": markdown(cause_page(cause)) for cause in CATALOGUE.values()}
    return {name: _HEAD + text for name, text in {"README.md": _index(), **found}.items()}


def _index() -> str:
    lines = ["# Causes\n", "| stage | cause | severity | rule |", "|---|---|---|---|"]
    for cause in CATALOGUE.values():
        stage = "" if cause.stage is None else f"{int(cause.stage)} {cause.stage.label}"
        rule = "seen live" if cause.live else "not yet seen live"
        lines.append(f"| {stage} | [{cause.id}]({cause.id}.md) | {cause.severity} | {rule} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the pages; 2 for a wrong command line."""
    if len(arguments) != 1:
        print("usage: python -m kvtrace.render.pages DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
