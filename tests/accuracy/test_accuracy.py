"""Every scenario on a real engine gets the first finding of its label, and no healthy one a fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scenario_runs import Runs, confusion, spec


@pytest.mark.engine
def test_every_scenario_gets_its_verdict(runs: Runs, record_property: Callable[[str, object], None]) -> None:
    verdicts = []
    for name in spec.names():
        scenario = spec.load(name)
        try:
            report = runs.report(scenario.name)
        except pytest.fail.Exception:
            continue  # it has no verdict, and that is said below; the table shows the others
        verdicts.append(confusion.verdict(scenario, report))
    record_property("confusion table", confusion.text(verdicts))
    assert confusion.wrong(verdicts, spec.names()) == []
