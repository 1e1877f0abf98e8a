"""``kvtrace verify``: does a connector give back what it took?"""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import typer

from kvtrace.cli.output import NO_COLOR, format_option, screen
from kvtrace.cli.run import parse_share
from kvtrace.cli.screen import wrote
from kvtrace.errors import KvtraceError
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.page import Screen
from kvtrace.render.verify import verify_junit, verify_page
from kvtrace.verify.answers import Result, Stopped


def _html(result: Result, screen: Screen) -> str:
    from kvtrace.render.html.page import verify_page as html_page

    return html_page(result)


HTML = Format("html", "a page for a browser", _html)
JUNIT = Format[Result]("junit", "JUnit XML", lambda result, _: verify_junit(result))
FORMATS = (*page_formats(verify_page, Result.document), HTML, JUNIT)


def _words(option: str, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise KvtraceError(f"{option} is no command: {error}", "quote it as a shell does") from None


def _until_stopped() -> list[int]:
    """Ctrl-C and SIGTERM end the asking, once; its servers end with it. The list gets the exit code."""
    codes: list[int] = []

    def stop(number: int, _: object) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        codes.append(128 + number)
        raise Stopped

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, stop)
    return codes


def verify(
    command: list[str] | None = typer.Argument(
        None, metavar="[--] COMMAND...", help="Starts the server to verify, as vllm serve MODEL ..."
    ),
    connector: str | None = typer.Option(
        None,
        "--connector",
        metavar="MODULE:CLASS",
        help="In place of COMMAND: a small server with this connector (or one of vLLM's, by its name).",
    ),
    config: str | None = typer.Option(
        None, "--config", metavar="JSON", help="With --connector: its kv_connector_extra_config."
    ),
    model: Path | None = typer.Option(
        None,
        "--model",
        metavar="DIR|KIND",
        help="With --connector: this model, or the small one of this kind: gqa, mla, sliding, hybrid.",
    ),
    prefill: str = typer.Option(
        "", "--prefill", metavar="COMMAND", help="In place of COMMAND, with --decode: the server that saves."
    ),
    decode: str = typer.Option(
        "", "--decode", metavar="COMMAND", help="The server that loads; each prompt goes to --prefill first."
    ),
    suite: str = typer.Option("quick", "--suite", metavar="quick|full", help="How much is tried."),
    case: str = typer.Option(
        "", "--case", metavar="CASE", help="Try this workload alone, as a failure names it: 'a96 ; a96'."
    ),
    error: str = typer.Option(
        "10%",
        "--error",
        metavar="SHARE",
        help="How far KV that comes back may be from what was computed, on the mean of a layer; 0% for none.",
    ),
    hook_share: str = typer.Option(
        "", "--hook-share", metavar="SHARE", help="Share of the steps' time that one hook may take."
    ),
    all_units: bool = typer.Option(
        False, "--all-units", help="The connector promises to take every whole unit of a prompt."
    ),
    store: Path | None = typer.Option(
        None,
        "--store",
        metavar="DIR",
        help="The connector's directory, empty at the start: a restart must find what is in it, "
        "and suite full damages it.",
    ),
    reference: bool = typer.Option(
        True,
        "--reference/--no-reference",
        help="Also start the same command without its connector, and compare answers.",
    ),
    shrink: float = typer.Option(
        60.0, "--shrink", min=0, metavar="SECONDS", help="Look so long for the smallest failing case; 0: not."
    ),
    seed: int | None = typer.Option(None, "--seed", min=0, help="Of the prompts. [default: a new one]"),
    start_timeout: float = typer.Option(
        900.0, "--start-timeout", min=1, metavar="SECONDS", help="How long the server may take to start."
    ),
    output: Path | None = typer.Option(
        None,
        "-o",
        "--output",
        metavar="DIR",
        help="Where the traced runs go: new, or empty. [default: reports/<timestamp>-verify-...]",
    ),
    junit: Path | None = typer.Option(None, "--junit", metavar="FILE", help="Also write JUnit XML."),
    format: Format[Result] = format_option(FORMATS),
    no_color: bool = NO_COLOR,
) -> None:
    """Prove that a connector gives back what it took.

    To the right asker, and to nobody else. Starts a server of its own, asks prompts, empties the GPU's own
    prefix cache, asks again, and compares the KV. Exit codes: 0 no property failed, 1 one did, 2 usage, or
    the server did not start. After Ctrl-C or SIGTERM (130, 143) it tells what is known by then.
    """
    from kvtrace.cli.progress import progress_bar
    from kvtrace.cli.writing import write_file
    from kvtrace.launch.say import say
    from kvtrace.verify.property import SUITES
    from kvtrace.verify.session import Options, Small, verify

    if suite not in SUITES:
        raise KvtraceError(f"--suite {suite!r} is not known", f"write {' or '.join(SUITES)}")
    if bool(prefill) != bool(decode) or bool(command) + bool(connector) + bool(prefill) != 1:
        raise KvtraceError(
            "verify needs a command or a connector, or --prefill and --decode",
            "kvtrace verify -- vllm serve MODEL ...",
        )
    if connector is None and (config or model):
        raise KvtraceError("--config and --model go with --connector", "COMMAND has its own")
    small = Small(connector, config, model) if connector else None
    shares = parse_share("--error", error), parse_share("--hook-share", hook_share)
    options = Options(
        command or _words("--prefill", prefill), suite, output, seed, *shares, reference, case, store,
        start_timeout, small, shrink, _words("--decode", decode), all_units,
    )  # fmt: skip
    stops = _until_stopped()
    try:
        with progress_bar("starting the server") as progress:
            result = verify(options, progress, say)
    except Stopped:
        say("stopped before anything was asked")
        raise typer.Exit(stops[0]) from None
    here = screen(no_color)
    if junit is not None:
        write_file(junit, JUNIT.draw(result, here), replace=True)
    wrote(format.draw(result, here))  # a reader that has gone does not turn a failure into a pass
    raise typer.Exit(stops[0] if result.stopped else 0 if result.passed else 1)
