"""Whether a report and a baseline are of one thing, and whether a report holds anything to judge.

A gate that compares with the wrong file, or with nothing, says nothing: it is neither passed nor failed.
"""

from __future__ import annotations

from kvtrace.gate.baseline import GateError
from kvtrace.gate.contract import models
from kvtrace.gate.outcome import GateOutcome
from kvtrace.gate.read_baseline import BaselineFile
from kvtrace.report.model import Report

_GIVE = "give the baseline of this run, or make one: kvtrace baseline PATH -o FILE"


def fits(report: Report, file: BaselineFile) -> None:
    """A run without any connector is of every baseline's kind: that it lost its connector is a failure.

    Raises:
        GateError: `file` is the baseline of another connector or of another model.
    """
    wanted = {one["connector"] for one in file.baseline["engines"]}
    found = {one["connector"]["name"] for one in report["run"]["engines"] if one["connector"]}
    if found and wanted != {None} and not found & wanted:
        what = f"of another connector ({_names(wanted)}, and the run has {_names(found)})"
        raise GateError(f"the baseline is {what}", file.path, _GIVE)
    models_wanted, models_found = set(file.baseline["made"].get("models", ())), set(models(report))
    if models_wanted and models_found and not models_found & models_wanted:
        what = f"of another model ({_names(models_wanted)}, and the run has {_names(models_found)})"
        raise GateError(f"the baseline is {what}", file.path, _GIVE)


def _names(found: set[str | None] | set[str]) -> str:
    return ", ".join(ascii(name)[1:-1][:60] for name in sorted(filter(None, found))[:3])


def judged_something(report: Report, outcome: GateOutcome) -> None:
    """Findings that say why no engine ran are something: such a run fails.

    Raises:
        GateError: no engine executed a step, and nothing would have failed for it.
    """
    ran = any(engine["real_steps"] for engine in report["run"]["engines"])
    if not ran and (outcome.passed or not report["findings"]):
        raise GateError(
            "nothing to check: no engine executed a step in this run",
            outcome.report,
            "did the engine come up, and did it get requests?",
        )
