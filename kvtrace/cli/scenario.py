"""``kvtrace scenario``: the reproductions of a repository checkout, listed and run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import typer

import kvtrace
from kvtrace.cli.examples import epilog
from kvtrace.cli.output import NO_COLOR, emit, format_option, screen
from kvtrace.errors import KvtraceError
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.page import Code, Column, Heading, Page, Row, Table
from kvtrace.words import clean

_DIR = typer.Option(None, "--dir", metavar="DIR", help="The scenarios folder. [default: the checkout's]")

scenario = typer.Typer(
    help="List and run the reproductions: a real vLLM, one cause each.",
    no_args_is_help=True,
    epilog=epilog("scenario"),
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


class Scenario(NamedTuple):
    """The name of its file, its cause or "healthy", its title."""

    name: str
    cause: str
    title: str


def listed(folder: Path) -> list[Scenario]:
    """The scenarios in a folder."""
    return [Scenario(path.stem, *_read(path)) for path in sorted(folder.glob("*.toml"))]


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


def _page(scenarios: list[Scenario]) -> Page:
    columns = (Column("scenario"), Column("cause"), Column("what it does"))
    rows = [Row((Code(one.name), one.cause, clean(one.title))) for one in scenarios]
    return [Heading("kvtrace scenario list", 2, quiet=True), Table(columns, rows)]


FORMATS = page_formats(_page, lambda scenarios: [one._asdict() for one in scenarios])


@scenario.command("list", epilog=epilog("scenario list"))
def list_(
    directory: Path | None = _DIR,
    format: Format[list[Scenario]] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """List the scenarios.

    Name, the cause that each must give first, what it does.
    """
    emit(format.draw(listed(scenarios_folder(directory)), screen(no_color)))


@scenario.command("run", epilog=epilog("scenario run"))
def run(
    names: list[str] | None = typer.Argument(None, metavar="[NAME]...", help="[default: all]"),
    out: Path | None = typer.Option(
        None, "-o", "--out", metavar="DIR", help="New folder. [default: reports/<timestamp>-scenarios]"
    ),
    check: bool = typer.Option(True, "--check/--no-check", help="Compare with what each must give."),
    directory: Path | None = _DIR,
) -> None:
    """Run scenarios on the vLLM of this Python.

    Exit code 1 where one does not give what it must.
    """
    folder = scenarios_folder(directory)
    known = [one.name for one in listed(folder)]
    for name in names or []:
        if name not in known:
            raise KvtraceError("no such scenario", ascii(name)[1:-1], "kvtrace scenario list shows them")
    place = out or Path("reports") / time.strftime("%Y%m%d-%H%M%S-scenarios")
    command = [sys.executable, str(folder / "run.py"), *(names or []), "--out", str(place)]
    code = subprocess.run([*command, *(["--check"] if check else [])], check=False).returncode
    raise typer.Exit(code if code >= 0 else 128 - code)
