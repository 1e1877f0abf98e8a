"""The verbs of ``kvtrace``. pandas and the rest of the analysis are imported inside of them."""

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


_RUN_CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}
app.command("run", context_settings=_RUN_CONTEXT, epilog=epilog("run"))(run)
app.command("doctor", context_settings=_RUN_CONTEXT, epilog=epilog("doctor"))(doctor)
app.command("verify", context_settings=_RUN_CONTEXT, epilog=epilog("verify"))(verify)
app.command("explain", epilog=epilog("explain"))(explain)
app.command("requests", epilog=epilog("requests"))(requests)
app.command("why", epilog=epilog("why"))(why)
app.command("top", epilog=epilog("top"))(top)
app.command("metrics", epilog=epilog("metrics"))(metrics)
app.command("merge", epilog=epilog("merge"))(merge)
app.command("export", epilog=epilog("export"))(export)
app.command("baseline", epilog=epilog("baseline"))(baseline)
app.command("check", epilog=epilog("check"))(check)
app.command("diff", epilog=epilog("diff"))(diff)
app.command("docs", epilog=epilog("docs"))(docs)
app.add_typer(scenario, name="scenario")
