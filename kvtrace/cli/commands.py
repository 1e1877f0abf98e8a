"""The verbs of ``kvtrace``. The analysis is imported inside of them."""

from __future__ import annotations

import typer

from kvtrace import __version__
from kvtrace.cli.baseline import baseline
from kvtrace.cli.check import check
from kvtrace.cli.diff import diff
from kvtrace.cli.docs import docs
from kvtrace.cli.doctor import doctor
from kvtrace.cli.examples import epilog
from kvtrace.cli.explain import explain
from kvtrace.cli.export import export
from kvtrace.cli.merge import merge
from kvtrace.cli.metrics import metrics
from kvtrace.cli.requests import requests
from kvtrace.cli.run import run
from kvtrace.cli.scenario import scenario
from kvtrace.cli.top import top
from kvtrace.cli.verify import verify
from kvtrace.cli.why import why

app = typer.Typer(
    name="kvtrace",
    help="Why were so few KV blocks saved or loaded? Traces vLLM's KV connector hooks and explains it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog(""),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtrace {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "-V", "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


_TAKERS = (run, doctor, verify)
"""What follows their command belongs to it."""
for verb in (*_TAKERS, explain, requests, why, top, metrics, merge, export, baseline, check, diff, docs):
    settings = {"allow_interspersed_args": False} if verb in _TAKERS else None
    app.command(verb.__name__, context_settings=settings, epilog=epilog(verb.__name__))(verb)
app.add_typer(scenario, name="scenario")
