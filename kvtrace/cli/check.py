"""``kvtrace check``: a run against a baseline, against rules, or against the default gate."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import typer

from kvtrace.cli.output import NO_COLOR, format_option, screen
from kvtrace.cli.screen import wrote
from kvtrace.errors import KvtraceError
from kvtrace.gate.outcome import GateOutcome
from kvtrace.render.check import check_page
from kvtrace.render.formats import Format, page_formats
from kvtrace.render.github import commands, silenced
from kvtrace.render.junit import junit_xml
from kvtrace.render.sarif import sarif_json

PAGES = {row.name: row for row in page_formats(check_page, GateOutcome.document)}
TEXT, MARKDOWN, JSON = PAGES["text"], PAGES["markdown"], PAGES["json"]
JUNIT = Format[GateOutcome]("junit", "JUnit XML", lambda outcome, _: junit_xml(outcome))
SARIF = Format[GateOutcome]("sarif", "SARIF 2.1.0", lambda outcome, _: sarif_json(outcome))
FORMATS = (*PAGES.values(), JUNIT, SARIF)


def check(
    path: str = typer.Argument(..., metavar="PATH", help="A report.json, or a run directory of kvtrace run."),
    baseline: str | None = typer.Option(
        None, "--baseline", metavar="FILE", help="The contract that kvtrace baseline wrote."
    ),
    minimum: list[str] | None = typer.Option(
        None,
        "--min",
        metavar="HOOK=SHARE",
        help="Least coverage of a hook in each layer, on each rank. Repeatable.",
    ),
    min_saved_tokens: float | None = typer.Option(
        None,
        "--min-saved-tokens",
        metavar="SHARE",
        help="Least share saved of the tokens computed here (not counting decode that is never offered).",
    ),
    forbid: list[str] | None = typer.Option(
        None, "--forbid", metavar="CAUSE", help="Fail on this finding; 'fault': on every fault. Repeatable."
    ),
    allow: list[str] | None = typer.Option(
        None, "--allow", metavar="CAUSE", help="Let this finding, and the tokens it costs, pass. Repeatable."
    ),
    tolerance: float | None = typer.Option(
        None, "--tolerance", metavar="SHARE", help="How much worse a ledger share may be. [default: 0.02]"
    ),
    config: Path | None = typer.Option(
        None,
        "--config",
        metavar="FILE",
        help="Rules. [default: kvtrace.toml or pyproject.toml, here or above]",
    ),
    no_config: bool = typer.Option(False, "--no-config", help="Read no file of rules."),
    junit: Path | None = typer.Option(None, "--junit", metavar="FILE", help="Also write JUnit XML."),
    sarif: Path | None = typer.Option(None, "--sarif", metavar="FILE", help="Also write SARIF 2.1.0."),
    github: bool = typer.Option(False, "--github", help="Also write GitHub annotations and the job summary."),
    format: Format[GateOutcome] = format_option(FORMATS),
    as_json: bool = typer.Option(False, "--json", help="The same as --format json."),
    no_color: bool = NO_COLOR,
) -> None:
    """Fail where a run lost hooks, tokens or targets, and say why.

    Without a baseline and without rules: no fault, and every KV layer hooked. Exit codes: 0 passed, 1 failed,
    2 usage or unreadable input.
    """
    from kvtrace.cli.writing import write_file
    from kvtrace.gate.config import find_rules, read_rules
    from kvtrace.gate.fit import fits, judged_something
    from kvtrace.gate.judge import judge
    from kvtrace.gate.read_baseline import read_baseline
    from kvtrace.gate.rules import Rules, from_options, merged
    from kvtrace.merge.one_run import one_run
    from kvtrace.report.load import read_report

    one_run(path, "check")
    options = from_options(minimum or (), min_saved_tokens, forbid or (), allow or (), tolerance, baseline)
    if config is not None and no_config:
        raise KvtraceError("--config and --no-config exclude each other")
    found = read_rules(config) if config else Rules() if no_config else find_rules(Path.cwd())
    rules = merged(found, options)
    contract = None if rules.baseline is None else read_baseline(rules.baseline)
    _no_clash(path, rules.baseline, junit, sarif)
    report = read_report(path)
    if contract is not None:
        fits(report, contract)
    outcome = judge(report, path, contract, rules)
    judged_something(report, outcome)

    here = screen(no_color)
    for file, row in ((junit, JUNIT), (sarif, SARIF)):
        if file is not None:
            write_file(file, row.draw(outcome, here), replace=True)
    chosen = JSON if as_json else format
    shown = chosen.draw(outcome, here)
    if github:
        shown = _for_github(outcome, shown, chosen)
    wrote(shown)  # a reader that has gone (| head) does not turn a failure into a pass
    raise typer.Exit(0 if outcome.passed else 1)


def _for_github(outcome: GateOutcome, shown: str, format: Format[GateOutcome]) -> str:
    """What goes to stdout: `shown` with annotations behind it, or `shown` alone where a program reads it."""
    _summary(MARKDOWN.draw(outcome, screen()))
    lines = "".join(f"{line}\n" for line in commands(outcome))
    if format is TEXT:
        return silenced(shown, secrets.token_hex(16)) + lines
    typer.echo(lines, nl=False, err=True)  # the runner reads both streams
    return shown


def _summary(text: str) -> None:
    """Appends to the job's summary, where the runner says that there is one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise KvtraceError("cannot write the job summary", path, error.strerror or str(error)) from None


def _no_clash(report: str, baseline: str | None, *outputs: Path | None) -> None:
    """No output may overwrite an input, or the other output."""
    from kvtrace.report.load import REPORT_NAME

    inputs = (report, os.path.join(report, REPORT_NAME), baseline)
    taken = [os.path.realpath(one) for one in inputs if one]
    for output in outputs:
        if output is None:
            continue
        if os.path.realpath(output) in taken:
            raise KvtraceError(
                "this file is an input, or is written twice", output, "name another file for the output"
            )
        taken.append(os.path.realpath(output))
