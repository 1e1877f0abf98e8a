"""``python -m kvtrace.render.pages DIR``: one Markdown page a cause, from the catalogue."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtrace.causes.cause import Cause
from kvtrace.causes.registry import CATALOGUE

_HEAD = "<!-- made by python -m kvtrace.render.pages; edit the file in kvtrace/causes/rules instead -->\n"
_SEVERITY = {
    "fault": "something to mend: configuration, connector or vLLM",
    "limit": "works as built; the remedy says what to change if that is not wanted",
    "note": "information",
}


def page(cause: Cause) -> str:
    """The page of one cause."""
    stage = (
        "none (no token is lost by it)"
        if cause.stage is None
        else f"{int(cause.stage)} ({cause.stage.label})"
    )
    status = "A rule looks for it. " + (
        "Seen on a real vLLM: a scenario gives it as first finding, and a healthy twin does not."
        if cause.live
        else "Not yet seen live: the rule is tested on synthetic traces."
    )
    return (
        f"{_HEAD}# {cause.id}\n\n"
        f"{cause.meaning}\n\n"
        f"| | |\n|---|---|\n"
        f"| Severity | {cause.severity}: {_SEVERITY[cause.severity]} |\n"
        f"| Stage | {stage} |\n"
        f"| Ledger | {cause.ledger or 'none'} |\n"
        f"| vLLM | {cause.versions} |\n"
        f"| Rule | {status} |\n\n"
        f"## How it shows\n\n{cause.seen_as}\n\n"
        f"## What to do\n\n{cause.remedy}\n"
    )


def index() -> str:
    lines = [_HEAD + "# Causes\n", "| stage | cause | severity | rule |", "|---|---|---|---|"]
    for cause in CATALOGUE.values():
        stage = "" if cause.stage is None else str(int(cause.stage))
        rule = "seen live" if cause.live else "not yet seen live"
        lines.append(f"| {stage} | [{cause.id}]({cause.id}.md) | {cause.severity} | {rule} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name -> text."""
    return {"README.md": index(), **{f"{cause.id}.md": page(cause) for cause in CATALOGUE.values()}}


def main(arguments: list[str]) -> int:
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
