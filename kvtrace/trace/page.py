"""Write the tables of ``docs/trace-format.md`` from the format itself.

``python -m kvtrace.trace.page docs/trace-format.md`` rewrites the part below the marker.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtrace.trace import format as fmt

MARKER = "<!-- below: written by python -m kvtrace.trace.page -->\n"


def tables() -> str:
    lines = [
        "## Records",
        "",
        "| kind | name | word 1 | 2 | 3 | 4 | 5 | 6 | 7 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, names in fmt.COLUMNS.items():
        cells = ["" if name.startswith("_") else f"`{name}`" for name in names]
        lines.append(f"| {int(kind)} | {kind.name} | " + " | ".join(cells) + " |")
    enums = (
        ("Roles", fmt.Role, "word 0, bits 8-15"),
        ("Facts", fmt.Fact, "the code of a FACT record"),
        ("Flags", fmt.Flag, "word 0, bits 32-47"),
        ("Roads", fmt.Dispatch, "the lane of an OP record"),
        ("Skips", fmt.Skip, "`skip` of an OP record"),
        ("Stops", fmt.Stop, "the code of a TRAILER record"),
    )
    for title, enum, where in enums:
        lines += ["", f"## {title}", "", f"Where: {where}.", ""]
        lines += [f"- {int(member)}: `{name}`" for name, member in enum.__members__.items()]
    for title, codes in (("Hooks", fmt.HOOKS), ("Ops", fmt.OPS)):
        lines += ["", f"## {title}", "", "Where: word 0, bits 16-23.", ""]
        lines += [f"- {code}: `{name}`" for code, name in enumerate(codes) if name]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """``text`` with everything below the marker replaced."""
    return text.split(MARKER)[0] + MARKER + "\n" + tables()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
