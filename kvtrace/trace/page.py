"""Write the tables of ``docs/trace-format.md`` from the format itself.

``python -m kvtrace.trace.page docs/trace-format.md`` rewrites the part below the marker.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtrace.trace import format as fmt
from kvtrace.trace import hooks, ops, rows

MARKER = "<!-- below: written by python -m kvtrace.trace.page -->\n"


def tables() -> str:
    lines = [
        "## Records",
        "",
        "| kind | name | word 1 | 2 | 3 | 4 | 5 | 6 | 7 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, row in rows.ROWS.items():
        cells = ["" if name.startswith("spare") else f"`{name}`" for name in row._fields[1:]]
        lines.append(f"| {int(kind)} | {kind.name} | " + " | ".join(cells) + " |")
    lines.append("")
    for kind, row in rows.ROWS.items():
        lines.append(f"- **{kind.name}**: {_about(row)}")
    enums = (
        ("Roles", fmt.Role, "word 0, bits 8-15"),
        ("Facts", fmt.Fact, "the code of a FACT record"),
        ("Flags", fmt.Flag, "word 0, bits 32-47"),
        ("Dispatch", fmt.Dispatch, "the detail of an OP record"),
        ("Skips", fmt.Skip, "`skip` of an OP record"),
        ("Stops", fmt.Stop, "the code of a TRAILER record"),
    )
    for title, enum, where in enums:
        lines += ["", f"## {title}", "", f"Where: {where}.", ""]
        lines += [f"- {int(member)}: `{name}`" for name, member in enum.__members__.items()]
    codes: tuple[tuple[str, Sequence[hooks.Hook | ops.Op]], ...] = (
        ("Hooks", hooks.TABLE),
        ("Ops", ops.TABLE),
    )
    for title, table in codes:
        lines += ["", f"## {title}", "", "Where: word 0, bits 16-23.", ""]
        lines += [f"- {one.code}: `{one.name}`" for one in table]
    return "\n".join(lines) + "\n"


def _about(row: type[Any]) -> str:
    """A row's docstring in Markdown, with the kinds' names in place of the rows'."""
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", " ".join((row.__doc__ or "").split()))
    for other, kind in rows.KIND_OF.items():
        text = re.sub(rf"\b{other.__name__}\b(?= record|[,;. )]|$)", kind.name, text)
    return text.replace("``", "`")


def page(text: str) -> str:
    """``text`` with everything below the marker replaced."""
    return text.split(MARKER)[0] + MARKER + "\n" + tables()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
