"""``reports/matrix.md`` from what was kept of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matrix_rows.verdict import numbers, state_numbers

Kept = Mapping[str, Any]

HEAD = """# Every vLLM, every topology, every model

<!-- written by python scripts/matrix.py -->

Each row is one way to run vLLM (its CPU build), with a tiny model of random weights. It is run four times:
with a healthy connector and with one that has a planted fault, untraced and traced. A row is right where

- the traced runs give the tokens of the untraced ones,
- each connector hook that was due was seen,
- both ledgers balance: each token-layer has exactly one outcome,
- the healthy run has no finding of severity fault, and the first finding of the other is the planted fault,
- no more is called written or proved than lies in the store, and no less is called saved: rows there, which
  are tokens of one layer and rank, are counted without kvtrace,
- of a model with states (Mamba, linear attention) as many are called taken as lie in the store, one a request
  and layer.

Where vLLM itself does not run so on this build, the row says why, in the words of the untraced run.
"""

HOW = {
    "one": "one process",
    "many": "several processes",
    "serve": "`vllm serve`",
    "stream": "several processes, asynchronous engine",
    "torchrun": "`torchrun`",
}


def section(title: str, rows: Sequence[Kept], missing: Sequence[str]) -> list[str]:
    """The lines of one section. ``missing``: titles of rows without a result."""
    ran = [row for row in rows if not row["cannot"]]
    right = sum(not row["wrong"] for row in ran)
    lines = [
        f"## {title}",
        "",
        f"**{right} of {len(ran)} rows are right;** {len(rows) - len(ran)} do not run on this build.",
        "",
        "| row | run as | tokens equal | hooks seen / due | ledgers balance | healthy: faults "
        "| planted: first finding | at rest: healthy, planted | right |",
        "|---|---|---|---:|---|---|---|---|---|",
        *map(_line, rows),
    ]
    notes = [f"- {row['title']}: {row['note']}" for row in rows if row["note"]]
    wrong = [f"- {row['title']}: {'; '.join(map(_safe, row['wrong']))}." for row in ran if row["wrong"]]
    lines += ["", "What is wrong:", "", *wrong] if wrong else []
    lines += ["", "Notes:", "", *notes] if notes else []
    lines += ["", f"Not run yet: {'; '.join(missing)}."] if missing else []
    return [*lines, ""]


def _line(row: Kept) -> str:
    first = f"| {row['title']} | {HOW[row['how']]} "
    if row["cannot"]:
        return first + f"| does not run on this build: {_safe(row['cannot'])} | | | | | | |"
    kinds = [row["kinds"][kind] for kind in ("healthy", "planted")]
    healthy, planted = kinds
    cells = [
        _all([one["equal"] for one in kinds]),
        f"{sum(one['seen'] for one in kinds):,} / {sum(one['due'] for one in kinds):,}",
        _all([one["balanced"] for one in kinds]),
        ", ".join(healthy["faults"]) or "none",
        f"{row['connectors']['planted']}: {planted['first']}",
        "; ".join(_numbers(one) for one in kinds),
        "**no**" if row["wrong"] else "yes",
    ]
    return f"{first}| {' | '.join(cells)} |"


def _all(values: Sequence[bool | None]) -> str:
    return "yes" if all(values) else "**no**"


def _numbers(one: Kept) -> str:
    said = numbers(one["grades"], one["rest"])
    states = one.get("states")
    more = f", {states['at rest']} states: {state_numbers(states)}" if states is not None else ""
    return (said if one["rest"] is None else f"{one['rest']:,} rows: {said}") + more


def _safe(text: str) -> str:
    """Somebody else's words in a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def page(sections: Sequence[tuple[str, Sequence[Kept], Sequence[str]]], more: Sequence[str] = ()) -> str:
    """The page: sections (title, rows, titles of rows without a result), and lines made elsewhere."""
    lines = [line for title, rows, missing in sections if rows for line in section(title, rows, missing)]
    return "\n".join([HEAD, *lines, *more]).rstrip("\n") + "\n"
