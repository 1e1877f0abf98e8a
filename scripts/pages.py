#!/usr/bin/env python3
"""Write the pages that are made from the code: docs/causes/, and beside the code the tables of the spool,
of an export and of the known native copies.

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
from kvtrace.export.tables import PARTITIONS, TABLES, ColumnSpec  # noqa: E402
from kvtrace.render.cause import cause_page  # noqa: E402
from kvtrace.render.markdown import markdown  # noqa: E402
from kvtrace.topics import TOPICS  # noqa: E402
from kvtrace.trace import format as fmt  # noqa: E402
from kvtrace.trace import hooks, ops, rows  # noqa: E402

_HEAD = "<!-- written by python scripts/pages.py from {} -->\n"


def files() -> dict[Path, str]:
    """Each page that is made from the code, and its text."""
    made = {
        f"docs/causes/{cause.id}.md": ("kvtrace/causes/rules", markdown(cause_page(cause)))
        for cause in CATALOGUE.values()
    }
    made |= {
        "docs/causes/README.md": ("kvtrace/causes/rules and kvtrace/topics.py", _index() + "\n" + topics()),
        "kvtrace/trace/records.md": ("the tables in kvtrace/trace", records()),
        "kvtrace/export/tables.md": ("kvtrace/export/tables.py", export_tables()),
        "kvtrace/agent/watch/native.md": ("kvtrace/agent/watch/native.py", native_copies()),
    }
    return {ROOT / name: _HEAD.format(source) + text for name, (source, text) in made.items()}


def topics() -> str:
    """What people ask."""
    lines = ["# Questions about vLLM's part", "", "Each is also `kvtrace docs NAME`.", ""]
    for topic in TOPICS:
        lines += [f"## {topic.title}", "", f"`kvtrace docs {topic.id}`", ""]
        lines += [line for text in (*topic.answer, topic.look) for line in (text, "")]
        lines += ["Findings: " + ", ".join(f"[{one}]({one}.md)" for one in topic.causes) + ".", ""]
    return "\n".join(lines)


def native_copies() -> str:
    """The entry points that are known."""
    lines = [
        "# Known native copies",
        "",
        "| entry point | what names the memory; direction | read in |",
        "|---|---|---|",
    ]
    lines += [f"| `{row.where}` | {row.names} | {row.read_in} |" for row in native.rows()]
    return "\n".join(lines) + "\n"


def export_tables() -> str:
    """The tables of an export and their columns."""
    head = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    lines = ["# The tables of an export", "", "Each table begins with these columns:", "", *head]
    lines += [_column(column) for column in PARTITIONS]
    for table in TABLES:
        lines += ["", f"### {table.name}", "", f"A row is {table.row}.", "", *head]
        lines += [_column(column) for column in table.columns]
    return "\n".join(lines) + "\n"


def _column(column: ColumnSpec) -> str:
    return f"| `{column.name}` | {column.type} | {column.unit} | {column.meaning} |"


def _index() -> str:
    lines = [
        "# Causes",
        "",
        "Each is also `kvtrace docs ID`.",
        "",
        "| stage | cause | severity | rule |",
        "|---|---|---|---|",
    ]
    for cause in CATALOGUE.values():
        stage = "" if cause.stage is None else f"{int(cause.stage)} {cause.stage.label}"
        rule = "seen live" if cause.live else "not yet seen live"
        lines.append(f"| {stage} | [{cause.id}]({cause.id}.md) | {cause.severity} | {rule} |")
    return "\n".join(lines) + "\n"


def records() -> str:
    """What a spool's records hold."""
    lines = [
        "# The records of a spool",
        "",
        *(line for part in (fmt.__doc__ or "").split("\n\n")[1:] for line in (_plain(part), "")),
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
    """A row's docstring, with the kinds' names in place of the rows'."""
    text = _plain(row.__doc__ or "")
    for other, kind in rows.KIND_OF.items():
        text = re.sub(rf"\b{other.__name__}\b(?= record|[,;. )]|$)", kind.name, text)
    return text


def _plain(text: str) -> str:
    """A docstring as a paragraph of Markdown."""
    return re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
