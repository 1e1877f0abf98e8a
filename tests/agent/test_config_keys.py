"""CONFIG_KEYS: what the connector's source asks for; its configuration stays the object that vLLM made."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.code import owners
from kvtrace.agent.facts import config_keys
from kvtrace.agent.hooks.connector import wrap_factory
from kvtrace.agent.wrap.proxy import index_of
from kvtrace.trace.format import Fact, Role

EXTRA = {"path": "/x", "unit": 32, "nested": {"a": 1}, "api_key": "k"}
SOURCE = """
class Reading:
    def __init__(self, config):
        self.extra = config.kv_transfer_config.kv_connector_extra_config
        self.path = self.extra["path"]

    def wait_for_save(self):
        import {late}
        return {late}.unit(self)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a connector of these files, the first of which holds its class, as vLLM would; and its config."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(config_keys, "_live", {})
    monkeypatch.setattr(owners.Owner, "owns", lambda self, file: file.startswith(str(tmp_path)))

    def made(**sources: str) -> tuple[Any, Any]:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        module = importlib.import_module(next(iter(sources)))

        class KVConnectorFactory:
            @classmethod
            def create_connector(cls, config: Any, role: Any) -> Any:
                return module.Reading(config)

        wrap_factory(SimpleNamespace(KVConnectorFactory=KVConnectorFactory))  # type: ignore[arg-type]
        transfer = SimpleNamespace(kv_connector="Reading", kv_connector_extra_config=dict(EXTRA))
        config = SimpleNamespace(kv_transfer_config=transfer)
        return KVConnectorFactory.create_connector(config, SimpleNamespace(name="WORKER")), config

    return made


def test_the_configuration_stays_the_dictionary_that_vllm_made(make: Any) -> None:
    connector, config = make(
        stays="class Reading:\n    def __init__(self, c): self.c = c.kv_transfer_config\n"
    )
    extra = connector.c.kv_connector_extra_config
    assert type(extra) is dict and extra is config.kv_transfer_config.kv_connector_extra_config
    assert extra == EXTRA


def test_keys_of_the_source_are_written_again_after_imports(make: Any, trace: Any) -> None:
    late = "def unit(connector):\n    return connector.extra.get('unit'), connector.extra.get('other')\n"
    connector, _ = make(reads_two=SOURCE.format(late="reads_late"), reads_late=late)
    config_keys.step_ended(Role.WORKER)
    assert connector.wait_for_save() == (32, None)
    config_keys.step_ended(Role.WORKER)
    config_keys.step_ended(Role.WORKER)
    written = trace.facts(Fact.CONFIG_KEYS)
    assert [(fact["read"], fact["asked"]) for fact in written] == [
        (["path"], []),
        (["path", "unit"], ["other"]),
    ]
    assert [fact["hidden"] for fact in written] == [False, False]
    assert written[0]["given"] == list(EXTRA)
    assert written[0]["connector"] == index_of(connector)


def test_no_key_is_unread_where_the_source_iterates_over_all(make: Any, trace: Any) -> None:
    late = "def unit(connector):\n    return list(connector.extra.items())\n"
    make(reads_all=SOURCE.format(late="reads_each"), reads_each=late)
    importlib.import_module("reads_each")
    config_keys.step_ended(Role.WORKER)
    written = trace.facts(Fact.CONFIG_KEYS)
    assert [(fact["read"], fact["hidden"]) for fact in written] == [(["path"], False), ([], True)]


def test_a_class_without_a_source_file_is_not_judged(make: Any, trace: Any) -> None:
    make(no_source="exec('class Reading:\\n def __init__(self, c): 0')\nReading.__module__ = '__nowhere__'\n")
    assert [fact["hidden"] for fact in trace.facts(Fact.CONFIG_KEYS)] == [True]


def test_imports_that_are_not_the_connectors_cost_no_search(make: Any, monkeypatch: Any) -> None:
    make(reads_one=SOURCE.format(late="reads_later"), reads_later="def unit(connector):\n    return 0\n")
    looks: list[object] = []
    monkeypatch.setattr(config_keys, "_look", looks.append)
    monkeypatch.setitem(sys.modules, "vllm.later", SimpleNamespace(__file__=config_keys.__file__))
    config_keys.step_ended(Role.WORKER)
    assert not looks
    importlib.import_module("reads_later")
    config_keys.step_ended(Role.WORKER)
    assert len(looks) == 1
