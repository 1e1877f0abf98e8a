"""The ``kvtrace`` command: its verbs, and how their errors end.

Exit codes: 0 fine, 1 a gate failed, 2 usage or unreadable input; ``run`` returns the child's.
pandas and the rest of the analysis are imported inside the verbs: ``kvtrace --help`` is quick.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import typer

from kvtrace import __version__
from kvtrace.cli.baseline import baseline
from kvtrace.cli.check import check
from kvtrace.cli.diff import diff
from kvtrace.cli.docs import docs
from kvtrace.cli.examples import epilog
from kvtrace.cli.explain import explain
from kvtrace.cli.export import export
from kvtrace.cli.requests import requests
from kvtrace.cli.run import run
from kvtrace.cli.scenario import scenario
from kvtrace.cli.why import why
from kvtrace.errors import KvtraceError
from kvtrace.render.layout import clean

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
app.command("explain", epilog=epilog("explain"))(explain)
app.command("requests", epilog=epilog("requests"))(requests)
app.command("why", epilog=epilog("why"))(why)
app.command("export", epilog=epilog("export"))(export)
app.command("baseline", epilog=epilog("baseline"))(baseline)
app.command("check", epilog=epilog("check"))(check)
app.command("diff", epilog=epilog("diff"))(diff)
app.command("docs", epilog=epilog("docs"))(docs)
app.add_typer(scenario, name="scenario")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits the process with its code."""
    for stream in (sys.stdout, sys.stderr):
        # a report may hold characters that the terminal's encoding lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_call(argv))


def _call(argv: Sequence[str] | None) -> int:
    """The exit code of one command line; what went wrong is on stderr, in one line."""
    try:
        result = app(args=None if argv is None else list(argv), prog_name="kvtrace", standalone_mode=False)
    except KvtraceError as error:
        _say(str(error) or type(error).__name__)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return 130
    except OSError as error:
        _say(": ".join(part for part in (error.strerror or str(error), str(error.filename or "")) if part))
        return 2
    except Exception as error:
        # typer carries its own copy of click in some versions: known by its shape, not its class
        message = getattr(error, "format_message", None)
        if message is not None:
            _usage(error, str(message()))
            return 2
        if os.environ.get("KVTRACE_DEBUG"):
            traceback.print_exc()
        what = traceback.extract_tb(error.__traceback__)[-1]
        _say(
            f"internal error: {type(error).__name__}: {error} "
            f"({os.path.basename(what.filename)}:{what.lineno}): "
            "please report it, with the output of KVTRACE_DEBUG=1"
        )
        return 2
    return result if isinstance(result, int) else 0


def _usage(error: Exception, message: str) -> None:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message, err=True)  # kvtrace alone: the help, as a usage error
        return
    path = context.command_path if context is not None else "kvtrace"
    _say(f"{message.rstrip('.')}: see {path} --help")


def _say(line: str) -> None:
    sys.stderr.write(f"kvtrace: {clean(line)}\n")
