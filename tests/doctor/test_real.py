"""The look at a real vLLM: its own connectors, and classes that do not fit. Two processes for all tests, side
by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from side_by_side import Place, Ran, Script
from vllm_env import vllm_env

from kvtrace.agent.preflight import facts
from kvtrace.doctor import checks
from kvtrace.doctor.answer import Level, Line
from kvtrace.doctor.gather import DoctorFacts, gather

pytestmark = pytest.mark.engine
OK, WARNING, PROBLEM, NOT_KNOWN = Level.OK, Level.WARNING, Level.PROBLEM, Level.NOT_KNOWN
PLENTY = 3600.0
CLASSES = """
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

class OldParameters(ExampleConnector):
    def update_state_after_alloc(self, request, num_external_tokens): print()

class OldConstructor(ExampleConnector):
    def __init__(self, vllm_config, role): print()

class Misspelt(ExampleConnector):
    def request_finishd(self, request, block_ids): return False, None
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.unit = self._kv_transfer_config.get_from_extra_config("unit", 16)
"""
ABSTRACT = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

class Abstract(KVConnectorBase_V1):
    def start_load_kv(self, forward_context, **kwargs): pass
"""


def serve(model: Path, connector: str, site: Path, module: str | None = None, **extra: Any) -> DoctorFacts:
    """The facts of ``vllm serve`` with that connector, where the modules of ``site`` can be imported."""
    transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if module:
        transfer["kv_connector_module_path"] = module
    words = ["serve", str(model), "--block-size", "32", "--kv-transfer-config", json.dumps(transfer)]
    environ = {**vllm_env(), "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words]
    return gather(command, "", environ, PLENTY)


def example(place: Place) -> DoctorFacts:
    """vLLM's own example with a place that can be written."""
    return serve(place.model, "ExampleConnector", place.folder, shared_storage_path=str(place.store))


def misfits(place: Place) -> DoctorFacts:
    """A MultiConnector with a child for each fault."""
    site = place.folder
    (site / "classes.py").write_text(CLASSES)
    (site / "abstract.py").write_text(ABSTRACT)
    (site / "raising.py").write_text("raise ValueError('no licence')\n")
    (site / "file").touch()

    def child(name: str, module: str | None = None, **extra: Any) -> dict[str, Any]:
        where = {"kv_connector_module_path": module} if module else {}
        return {"kv_connector": name, **where, "kv_connector_extra_config": extra}

    children = [
        child("ExampleConnector", shared_storage_path=str(site / "file" / "below"), shared_storage_pth=1),
        child("OldParameters", "classes"),
        child("OldConstructor", "classes"),
        child("Misspelt", "classes", unti=16),
        child("Abstract", "abstract"),
        child("Raises", "raising"),
        child("NoSuchConnector"),
    ]
    return serve(place.model, "MultiConnector", site, connectors=children)


SCRIPTS = (example, misfits)


@pytest.fixture
def healthy(ran: Mapping[Script, Ran]) -> DoctorFacts:
    found: DoctorFacts = ran[example].done
    return found


@pytest.fixture
def faulty(ran: Mapping[Script, Ran]) -> DoctorFacts:
    found: DoctorFacts = ran[misfits].done
    return found


def lines(found: DoctorFacts, check: str, about: str = "") -> list[Line]:
    return [one for one in checks.answer(found).lines if one.check == check and about in one.text]


def test_vllms_example_is_fine_and_its_smallest_prompt_known(healthy: DoctorFacts) -> None:
    answer = checks.answer(healthy)
    bad = [line for line in answer.lines if line.level in (WARNING, PROBLEM) and line.check != "stuck hooks"]
    assert not bad, bad
    assert not [line for line in answer.lines if line.level is NOT_KNOWN and line.check != "stuck hooks"]
    assert "32 tokens a block" in lines(healthy, "blocks")[0].text
    assert "below 33 tokens" in lines(healthy, "least prompt")[0].text
    assert "graph mode NONE" in lines(healthy, "graphs")[0].text
    assert "save_kv_layer" in lines(healthy, "saves")[0].text
    assert "vLLM's own parser" in lines(healthy, "command")[0].text


def test_every_target_is_there(healthy: DoctorFacts) -> None:
    (line,) = lines(healthy, "targets")
    assert line.level is OK and healthy.targets


def test_every_step_was_reached(healthy: DoctorFacts, faulty: DoctorFacts) -> None:
    assert [one.state for one in healthy.steps.values()] == ["done"] * len(facts.STEPS)
    assert set(faulty.steps) == set(facts.STEPS)


@pytest.mark.parametrize(
    ("check", "about", "level"),
    [
        ("hooks", "OldParameters.update_state_after_alloc(request, num_external_tokens)", PROBLEM),
        ("hooks", "Misspelt.request_finishd", WARNING),
        ("hooks", "Abstract has no", PROBLEM),
        ("connector", "2-argument constructor", PROBLEM),
        ("connector", "Raises is not to be had: ValueError: no licence", PROBLEM),
        ("connector", "NoSuchConnector is not to be had", PROBLEM),
        ("config", "ExampleConnector never asks for the key 'shared_storage_pth'", WARNING),
        ("config", "Misspelt never asks for the key 'unti'", WARNING),
        ("store", "shared_storage_path", PROBLEM),
        ("hooks", "ExampleConnector has", OK),
    ],
)
def test_what_does_not_fit_is_found(faulty: DoctorFacts, check: str, about: str, level: Level) -> None:
    assert [line.level for line in lines(faulty, check, about)] == [level]


def test_nothing_else_is_a_problem(faulty: DoctorFacts) -> None:
    found = [line for line in checks.answer(faulty).lines if line.level is PROBLEM]
    assert len(found) == 6, found
