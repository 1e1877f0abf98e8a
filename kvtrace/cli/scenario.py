"""``kvtrace scenario``: the reproductions of a repository checkout, listed and run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Optional

import typer

import kvtrace
from kvtrace.cli.output import emit
from kvtrace.errors import KvtraceError

_DIR = typer.Option(None, "--dir", metavar="DIR", help="The scenarios folder. [default: the checkout's]")

scenario = typer.Typer(
    help="List and run the scenarios: a real vLLM, one cause each, and what the report must say.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def scenarios_folder(given: Path | None) -> Path:
    """The folder that holds run.py and the scenario files.

    Raises:
        KvtraceError: there is none.
    """
    checkout = Path(kvtrace.__file__).resolve().parent.parent
    places = [given] if given is not None else [checkout / "scenarios", Path.cwd() / "scenarios"]
    for place in places:
        if (place / "run.py").is_file() and any(place.glob("*.toml")):
            return place.resolve()
    if given is not None:
        raise KvtraceError("no scenarios in this folder", given, "it needs run.py and the *.toml files")
    raise KvtraceError(
        "no scenarios here", "they come with the repository, not with the package", "name them: --dir DIR"
    )


def listed(folder: Path) -> list[tuple[str, str, str]]:
    """(name, cause or "healthy", title) of each scenario file."""
    return [(path.stem, *_read(path)) for path in sorted(folder.glob("*.toml"))]


def _read(path: Path) -> tuple[str, str]:
    if sys.version_info < (3, 11):
        return "", "(its title needs Python 3.11 to be read)"
    else:
        import tomllib

        try:
            data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return "", f"cannot be read: {error}"
        return str(data.get("cause") or "healthy"), str(data.get("title", ""))


@scenario.command("list")
def list_(directory: Optional[Path] = _DIR) -> None:  # noqa: UP045 (typer on Python 3.10)
    """List the scenarios: name, the cause that each must give first, what it does."""
    from kvtrace.render.wording import clean

    rows = listed(scenarios_folder(directory))
    wide = [max((len(row[at]) for row in rows), default=0) for at in range(2)]
    emit("".join(f"{row[0]:{wide[0]}}  {row[1]:{wide[1]}}  {clean(row[2])}\n" for row in rows))


@scenario.command("run")
def run(
    names: Optional[list[str]] = typer.Argument(None, metavar="[NAME]...", help="[default: all]"),  # noqa: UP045
    out: Optional[Path] = typer.Option(  # noqa: UP045
        None, "-o", "--out", metavar="DIR", help="New folder. [default: reports/<timestamp>-scenarios]"
    ),
    check: bool = typer.Option(True, "--check/--no-check", help="Compare with what each must give."),
    directory: Optional[Path] = _DIR,  # noqa: UP045
) -> None:
    """Run scenarios on the vLLM of this Python; exit code 1 where one does not give what it must."""
    folder = scenarios_folder(directory)
    known = [name for name, _, _ in listed(folder)]
    for name in names or []:
        if name not in known:
            raise KvtraceError("no such scenario", ascii(name)[1:-1], "kvtrace scenario list shows them")
    place = out or Path("reports") / time.strftime("%Y%m%d-%H%M%S-scenarios")
    command = [sys.executable, str(folder / "run.py"), *(names or []), "--out", str(place)]
    code = subprocess.run([*command, *(["--check"] if check else [])], check=False).returncode
    raise typer.Exit(code if code >= 0 else 128 - code)
