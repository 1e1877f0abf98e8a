#!/usr/bin/env python3
"""Write kvtrace/cli/help_texts.py anew: the help of every command, as the command itself prints it.

python scripts/help_texts.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

HEAD = '''"""The help of every command. Made by scripts/help_texts.py: do not edit."""

from __future__ import annotations

HELP = {
'''


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


def module(found: dict[str, str]) -> str:
    """The text of the module that holds them."""
    parts = [HEAD]
    for name, text in found.items():
        lines = text.replace("\\", "\\\\").replace('"""', '\\"""')
        parts.append(f'    "{name}": """\\\n{lines}""",\n')
    note = '"""Command ("" for kvtrace alone) -> its help, for terminals of 80 columns and more."""'
    return "".join([*parts, "}\n", note, "\n"])


if __name__ == "__main__":
    import kvtrace

    place = Path(kvtrace.__file__).parent / "cli" / "help_texts.py"
    place.write_text(module(texts()), encoding="utf-8")
