"""The documents of a spool: what is written is read, and what is no such field is unknown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrace.trace import facts
from kvtrace.trace.format import Fact

ENGINE = facts.EngineFact(
    tag=7,
    vllm="0.32.0",
    tp=2,
    prefix_caching=False,
    kv_transfer=facts.KvTransfer(connector="Mine", role="kv_both", extra={"path": "/x", "n": [1]}),
    kv_groups=(facts.KvGroup("FullAttentionSpec", 128, ("a", "b")),),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def test_every_fact_has_a_document() -> None:
    assert set(facts.FACTS) == set(Fact)


@pytest.mark.parametrize("code", sorted(facts.FACTS), ids=lambda code: code.name)
def test_an_empty_document_is_all_unknown_and_round_trips(code: Fact) -> None:
    empty = facts.FACTS[code].from_json({})
    assert empty == facts.FACTS[code]()
    assert facts.FACTS[code].from_json(json.loads(json.dumps(empty.to_json()))) == empty


def test_what_is_written_is_read() -> None:
    assert facts.EngineFact.from_json(json.loads(json.dumps(ENGINE.to_json()))) == ENGINE
    connector = facts.ConnectorFact(ordinal=1, cls="Mine", ints={"unit": 64}, noop=("shutdown",))
    document = connector.to_json()
    assert document["class"] == "Mine" and "cls" not in document
    assert facts.ConnectorFact.from_json(document) == connector


@given(code=st.sampled_from(sorted(facts.FACTS)), data=st.data())
def test_fields_of_any_type_never_raise_nor_pass_as_another(code: Fact, data: st.DataObject) -> None:
    keys = sorted(facts.FACTS[code]().to_json())
    value = data.draw(st.dictionaries(st.sampled_from(keys) | st.text(), VALUES))
    read = facts.FACTS[code].from_json(value)
    assert facts.FACTS[code].from_json(read.to_json()) == read or "nan" in repr(read)


@pytest.mark.parametrize("wrong", [{"tp": True}, {"tp": "2"}, {"prefix_caching": 1}, {"kv_groups": {}}])
def test_a_field_of_another_type_is_unknown(wrong: dict[str, object]) -> None:
    assert facts.EngineFact.from_json(wrong) == facts.EngineFact()


def test_a_later_document_adds_to_an_earlier_one() -> None:
    later = facts.EngineFact(tag=7, connector=3)
    assert ENGINE.updated(later).connector == 3 and ENGINE.updated(later).vllm == "0.32.0"
    assert facts.EngineFact().updated(ENGINE) == ENGINE


# The keys of each document on disk, in the order in which they are written. Never rename: spools of
# older versions hold them.
KEYS = {
    facts.Header: "kvtrace run pid ppid role process python argv host wall_ns perf_ns vllm boot",
    facts.TargetFact: "id module attr status detail",
    facts.EngineFact: "tag vllm torch platform model dp_rank tp pp dp block_size "
    "max_num_batched_tokens max_num_seqs max_model_len prefix_caching "
    "chunked_prefill enforce_eager cudagraph_mode scheduler kv_transfer "
    "connector_created connector kv_groups multimodal hash_algo",
    facts.KvTransfer: "connector role module_path engine_id extra",
    facts.KvGroup: "kind block_size layers window dtype",
    facts.WorkerFact: "ordinal rank tp_rank pp_rank dp_rank worker_class "
    "kv_layers direct_call backends connector_live connector other_layers slot_bytes",
    facts.ConnectorFact: "ordinal role parent configured class module file ok error_type error where proxy "
    "noop overrides ints resolves requires_piecewise",
    facts.EngineArgsFact: "given",
    facts.HookExceptionFact: "hook layer step connector type message where count_so_far",
    facts.AgentErrorFact: "where error",
    facts.ClientIdFact: "client engine",
    facts.HandOverFact: "request returned ids asks flags",
    facts.SwallowedFact: "hook layer step connector type message where asked_by ended went_on "
    "observed_calls count logged broad far",
    facts.LogFact: "logger level message hook layer step connector shown count",
    facts.ConfigKeysFact: "connector given read asked hidden",
    facts.DeviceTimingFact: "on why",
    facts.GraphsFact: "tag mode captured breakable v2",
    facts.StartFailedFact: "stage type message where",
    facts.WatchLimitsFact: "connector kind what where hook step",
    facts.CacheResetFact: "step",
    facts.LoadErrorsFact: "request loaded places layers largest mean differing",
    facts.UnreadableMetadataFact: "connector class field shape load steps",
}


@pytest.mark.parametrize("kind", KEYS, ids=lambda kind: kind.__name__)
def test_the_keys_on_disk_stay(kind: type[facts.Document]) -> None:
    assert set(facts.FACTS.values()) <= set(KEYS)
    assert list(kind().to_json()) == KEYS[kind].split()
