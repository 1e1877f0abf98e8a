"""Kinds of models, by what vLLM keeps of their tokens: KV that comes back is seen, and nothing is a fault."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from side_by_side import Done, Place, Ran, Script

from kvtrace.verify import models

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).with_name("asked_twice.py")
CONNECTORS = Path(__file__).resolve().parents[2] / "scenarios" / "connectors"


def _asked(place: Place, kind: str) -> Done:
    model = models.make(kind, place.folder)
    return place.start(sys.executable, SCRIPT, model, place.store, PYTHONPATH=str(CONNECTORS))


def mla(place: Place) -> Done:
    return _asked(place, "mla")


def sliding(place: Place) -> Done:
    return _asked(place, "sliding")


def hybrid(place: Place) -> Done:
    return _asked(place, "hybrid")


SCRIPTS = (mla, sliding, hybrid)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_kv_of_any_kind_of_model_comes_back(ran: Mapping[Script, Ran], script: Script) -> None:
    run = ran[script]
    assert run.done.returncode == 0, run.done.stderr[-3000:]
    report = json.loads((run.place.run / "report.json").read_text())
    loads = report["ledger"]["loads"]
    assert loads["accounts"]["loaded"] == sum(loads["grades"]["loaded"].values()) > 0
    assert script is hybrid or loads["grades"]["loaded"]["proved"] > 0
    assert [one["id"] for one in report["findings"] if one["severity"] == "fault"] == []
