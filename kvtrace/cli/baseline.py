"""``kvtrace baseline``: the contract of a good run, to be committed and held against later runs."""

from __future__ import annotations

from pathlib import Path

import typer

from kvtrace.cli.output import emit

DEFAULT = "kvtrace-baseline.json"


def baseline(
    path: str = typer.Argument(..., metavar="PATH", help="A report.json, or a run directory of kvtrace run."),
    output: Path = typer.Option(Path(DEFAULT), "-o", "--output", metavar="FILE", help="Where to write it."),
    force: bool = typer.Option(False, "--force", help="Replace the file if it is there."),
) -> None:
    """Write the contract of a good run, for kvtrace check.

    Coverage, shares of the ledgers, findings, targets: small JSON without times or anything of the
    machine, to be committed.
    """
    from kvtrace.cli.writing import write_file
    from kvtrace.gate.contract import baseline_text, make_baseline
    from kvtrace.gate.limits import limits_of
    from kvtrace.merge.one_run import one_run
    from kvtrace.render.contract import contract_lines
    from kvtrace.report.load import read_report

    one_run(path, "baseline")
    report = read_report(path)
    contract = make_baseline(report, path)
    write_file(output, baseline_text(contract), force)
    emit("".join(f"{line}\n" for line in contract_lines(contract, str(output), limits_of(report))))
