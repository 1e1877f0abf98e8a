"""``kvtrace check``: a run against a baseline, against rules, or against the default gate."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Optional

import typer

from kvtrace.cli.output import emit, styled
from kvtrace.errors import KvtraceError


def check(
    path: str = typer.Argument(..., metavar="PATH", help="A report.json, or a run directory of kvtrace run."),
    baseline: Optional[str] = typer.Option(  # noqa: UP045 (typer on Python 3.10)
        None, "--baseline", metavar="FILE", help="The contract that kvtrace baseline wrote."
    ),
    minimum: Optional[list[str]] = typer.Option(  # noqa: UP045
        None,
        "--min",
        metavar="HOOK=SHARE",
        help="Least coverage of a hook in each layer, on each rank. Repeatable.",
    ),
    min_saved_tokens: Optional[float] = typer.Option(  # noqa: UP045
        None,
        "--min-saved-tokens",
        metavar="SHARE",
        help="Least share saved of the tokens computed here (not counting decode that is never offered).",
    ),
    forbid: Optional[list[str]] = typer.Option(  # noqa: UP045
        None, "--forbid", metavar="CAUSE", help="Fail on this finding; 'fault': on every fault. Repeatable."
    ),
    allow: Optional[list[str]] = typer.Option(  # noqa: UP045
        None, "--allow", metavar="CAUSE", help="Let this finding, and the tokens it costs, pass. Repeatable."
    ),
    tolerance: Optional[float] = typer.Option(  # noqa: UP045
        None, "--tolerance", metavar="SHARE", help="How much worse a ledger share may be. [default: 0.02]"
    ),
    config: Optional[Path] = typer.Option(  # noqa: UP045
        None,
        "--config",
        metavar="FILE",
        help="Rules. [default: kvtrace.toml or pyproject.toml, here or above]",
    ),
    no_config: bool = typer.Option(False, "--no-config", help="Look for no file of rules."),
    junit: Optional[Path] = typer.Option(None, "--junit", metavar="FILE", help="Also write JUnit XML."),  # noqa: UP045
    sarif: Optional[Path] = typer.Option(None, "--sarif", metavar="FILE", help="Also write SARIF 2.1.0."),  # noqa: UP045
    github: bool = typer.Option(False, "--github", help="Also write GitHub annotations and the job summary."),
    as_json: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
    no_color: bool = typer.Option(False, "--no-color", help="No colour (also: NO_COLOR=1)."),
) -> None:
    """Fail where a run lost hooks, tokens or targets, with the finding that explains it.

    Without a baseline and without rules: no fault, and every KV layer hooked. Exit codes: 0 passed, 1 failed,
    2 usage or unreadable input.
    """
    from kvtrace.cli.writing import write_file
    from kvtrace.gate.config import find_rules, read_rules
    from kvtrace.gate.judge import judge
    from kvtrace.gate.read import read_baseline
    from kvtrace.gate.rules import Rules, from_options, merged
    from kvtrace.report.read import read_report

    options = from_options(minimum or (), min_saved_tokens, forbid or (), allow or (), tolerance, baseline)
    if config is not None and no_config:
        raise KvtraceError("--config and --no-config exclude each other")
    found = read_rules(config) if config else Rules() if no_config else find_rules(Path.cwd())
    rules = merged(found, options)
    contract = read_baseline(rules.baseline) if rules.baseline else None
    _no_clash(path, rules.baseline, junit, sarif)
    outcome = judge(read_report(path), path, contract, rules)

    if junit is not None:
        from kvtrace.render.junit import junit_xml

        write_file(junit, junit_xml(outcome), replace=True)
    if sarif is not None:
        from kvtrace.render.sarif import sarif_json

        write_file(sarif, sarif_json(outcome, path), replace=True)
    if as_json:
        from kvtrace.gate.result import outcome_json

        shown = json.dumps(outcome_json(outcome), indent=2, allow_nan=False) + "\n"
    else:
        from kvtrace.render.gate_text import render_check

        shown = styled(lambda console: render_check(outcome, console), no_color)
    if github:
        from kvtrace.render.gate_markdown import check_markdown
        from kvtrace.render.github import commands, silenced

        _summary(check_markdown(outcome))
        lines = "".join(f"{line}\n" for line in commands(outcome))
        if as_json:
            typer.echo(lines, nl=False, err=True)  # the runner reads both streams
        else:
            shown = silenced(shown, secrets.token_hex(16)) + lines
    with contextlib.suppress(
        typer.Exit
    ):  # a reader that has gone (| head) does not turn a failure into a pass
        emit(shown)
    raise typer.Exit(0 if outcome.passed else 1)


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
    taken = [Path(one).resolve() for one in (report, baseline) if one]
    for output in outputs:
        if output is None:
            continue
        if output.resolve() in taken:
            raise KvtraceError(
                "this file is read, or written twice", output, "name another file for the output"
            )
        taken.append(output.resolve())
