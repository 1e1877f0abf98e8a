"""CONFIG_KEYS: the noting dictionary is the user's dictionary to everybody else."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace

from kvtrace.agent import config_keys, describe
from kvtrace.agent.config_keys import ReadNotes
from kvtrace.agent.connector import wrap_factory
from kvtrace.trace.format import Fact, Role

from . import fakes

EXTRA = {"path": "/x", "unit": 32, "nested": {"a": 1}}


def test_it_is_a_plain_dict_to_whoever_looks():
    notes = ReadNotes(EXTRA)
    assert isinstance(notes, dict) and notes == EXTRA and repr(notes) == repr(EXTRA)
    assert len(notes) == 3 and bool(notes)
    for made in (pickle.loads(pickle.dumps(notes)), copy.deepcopy(notes), copy.copy(notes)):
        assert type(made) is dict and made == EXTRA
    assert notes.read_keys == set()
    assert json.loads(json.dumps(notes)) == EXTRA
    assert {**notes} == dict(notes) == notes | {} == EXTRA


def test_each_way_of_reading_is_noted():
    for read, keys in [
        (lambda d: d["path"], {"path"}),
        (lambda d: d.get("unit", 1), {"unit"}),
        (lambda d: "pth" in d, {"pth"}),
        (lambda d: d.get("typo"), {"typo"}),
        (lambda d: d.pop("unit"), {"unit"}),
        (lambda d: d.setdefault("unit", 2), {"unit"}),
        (lambda d: list(d), set(EXTRA)),
        (lambda d: d.items(), set(EXTRA)),
        (lambda d: dict(d), set(EXTRA)),
        (lambda d: {**d}, set(EXTRA)),
        (lambda d: d.copy(), set(EXTRA)),
    ]:
        notes = ReadNotes(EXTRA)
        read(notes)
        assert notes.read_keys == keys


def test_what_the_connector_reads_is_written_and_again_when_it_reads_more(trace):
    class Reading(fakes.KVConnectorBase_V1):
        def __init__(self, config) -> None:
            super().__init__()
            self.extra = config.kv_transfer_config.kv_connector_extra_config
            self.path = self.extra["path"]

        def wait_for_save(self):
            self.extra.get("unit")

    class KVConnectorFactory:
        @classmethod
        def create_connector(cls, config, role):
            return Reading(config)

    wrap_factory(SimpleNamespace(KVConnectorFactory=KVConnectorFactory))
    transfer = SimpleNamespace(kv_connector="Reading", kv_connector_extra_config={**EXTRA, "api_key": "k"})
    config = SimpleNamespace(kv_transfer_config=transfer)
    connector = KVConnectorFactory.create_connector(config, SimpleNamespace(name="WORKER"))
    describe.kv_transfer(config)  # our own reading does not count
    config_keys.step_ended(Role.WORKER)
    connector.wait_for_save()
    config_keys.step_ended(Role.WORKER)
    config_keys.step_ended(Role.WORKER)
    written = trace.facts(Fact.CONFIG_KEYS)
    assert [fact["read"] for fact in written] == [["path"], ["path", "unit"]]
    assert written[0]["given"] == ["path", "unit", "nested", "api_key"]
    assert written[0]["connector"] == connector._kvtrace_connector
