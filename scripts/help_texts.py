#!/usr/bin/env python3
"""Write kvtrace/cli/help/ anew: the help of every command, as the command itself prints it.

python scripts/help_texts.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def texts() -> dict[str, str]:
    """Command ("" for kvtrace alone) -> its help at 80 columns."""
    import typer

    from kvtrace.cli.commands import app

    os.environ["COLUMNS"] = "80"
    found: dict[str, str] = {}

    def walk(command: Any, names: tuple[str, ...], parent: Any) -> None:
        context = command.make_context(
            names[-1] if names else "kvtrace", [], parent=parent, resilient_parsing=True
        )
        found[" ".join(names)] = command.get_help(context) + "\n"
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*names, name), context)

    walk(typer.main.get_command(app), (), None)
    return found


if __name__ == "__main__":
    import kvtrace

    place = Path(kvtrace.__file__).parent / "cli" / "help"
    place.mkdir(exist_ok=True)
    for old in place.glob("*.txt"):
        old.unlink()
    for verb, text in texts().items():
        (place / f"{verb.replace(' ', '-') or 'kvtrace'}.txt").write_text(text, encoding="utf-8")
