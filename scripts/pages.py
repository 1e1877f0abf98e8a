#!/usr/bin/env python3
"""Write the pages of docs/ that are made from the code: docs/causes/, and the tables of docs/trace-format.md,
docs/native-copies.md and docs/export.md.

python scripts/pages.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvtrace.agent.watch import native  # noqa: E402
from kvtrace.causes.registry import CATALOGUE  # noqa: E402
from kvtrace.export.tables import PARTITIONS, TABLES, Column  # noqa: E402
from kvtrace.render.cause import cause_page  # noqa: E402
from kvtrace.render.markdown import markdown  # noqa: E402
from kvtrace.topics import TOPICS  # noqa: E402
from kvtrace.trace import format as fmt  # noqa: E402
from kvtrace.trace import hooks, ops, rows  # noqa: E402

_HEAD = (
    "<!-- written by python scripts/pages.py; edit the cause's file in kvtrace/causes/rules, or "
    "kvtrace/topics.py -->\n"
)
MARKER = "<!-- below: written by python scripts/pages.py -->\n"


def files() -> dict[Path, str]:
    """Each page that is made from the code, and its text."""
    docs = ROOT / "docs"
    written = {
        docs / "causes" / f"{cause.id}.md": markdown(cause_page(cause)) for cause in CATALOGUE.values()
    }
    written[docs / "causes" / "README.md"] = _index()
    written[docs / "questions.md"] = topics()
    found = {path: _HEAD + text for path, text in written.items()}
    made = (
        ("trace-format.md", tables()),
        ("native-copies.md", native_copies()),
        ("export.md", export_tables()),
    )
    for name, text in made:
        page = docs / name
        found[page] = page.read_text(encoding="utf-8").split(MARKER)[0] + MARKER + "\n" + text
    return found


def topics() -> str:
    """What people ask, on one page."""
    lines = ["# Questions about vLLM's part", "", "Each is also `kvtrace docs NAME`.", ""]
    for topic in TOPICS:
        lines += [f"## {topic.title}", "", f"`kvtrace docs {topic.id}`", ""]
        lines += [line for text in (*topic.answer, topic.look) for line in (text, "")]
        lines += ["Findings: " + ", ".join(f"[{one}](causes/{one}.md)" for one in topic.causes) + ".", ""]
    return "\n".join(lines)


def native_copies() -> str:
    lines = ["| entry point | what names the memory; direction | read in |", "|---|---|---|"]
    lines += [f"| `{row.where}` | {row.names} | {row.read_in} |" for row in native.rows()]
    return "\n".join(lines) + "\n"


def export_tables() -> str:
    """The tables of an export and their columns."""
    head = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    lines = ["Each table begins with these columns:", "", *head]
    lines += [_column(column) for column in PARTITIONS]
    for table in TABLES:
        lines += ["", f"### {table.name}", "", f"A row is {table.row}.", "", *head]
        lines += [_column(column) for column in table.columns]
    return "\n".join(lines) + "\n"


def _column(column: Column) -> str:
    return f"| `{column.name}` | {column.type} | {column.unit} | {column.meaning} |"


def _index() -> str:
    lines = ["# Causes\n", "| stage | cause | severity | rule |", "|---|---|---|---|"]
    for cause in CATALOGUE.values():
        stage = "" if cause.stage is None else f"{int(cause.stage)} {cause.stage.label}"
        rule = "seen live" if cause.live else "not yet seen live"
        lines.append(f"| {stage} | [{cause.id}]({cause.id}.md) | {cause.severity} | {rule} |")
    return "\n".join(lines) + "\n"


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


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
