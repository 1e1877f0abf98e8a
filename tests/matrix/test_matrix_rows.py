"""The matrix's tables: each row can be run as it is written down."""

from __future__ import annotations

import json

import pytest
from matrix_rows import acts, proofs, serve, tables, weights
from matrix_rows.measure import root_error
from matrix_rows.page import HOW
from matrix_rows.row import CHUNKS, SHORT, STORE, Row, generate, multi, prompts

ROWS = [row for rows in tables.SECTIONS.values() for row in rows]


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_a_row_names_is_there(row: Row) -> None:
    assert row.how in HOW
    assert row.model in weights.MAKERS
    assert set(row.shows) <= set(proofs.PROOFS)
    assert {act["do"] for act in row.acts} <= set(acts.ACTS)
    assert not row.healthy.first and (row.planted.first or row.note)
    json.dumps([row.acts, row.engine_args("healthy", "model", "store")])


def test_prompts_of_one_seed_are_the_same_each_time() -> None:
    assert prompts("a", 4, 8) == prompts("a", 4, 8) != prompts("b", 4, 8)
    assert [len(one) for one in prompts("a", 4, 8)] == [4, 8]


def test_an_engine_is_told_of_its_connector_and_its_runs_store() -> None:
    row = Row("x", "x", (generate("x", 4),), engine={"block_size": 64})
    (args,) = row.engine_args("planted", "model", "/store")
    assert args["block_size"] == 64 and args["model"] == "model" and args["dtype"] == "float32"
    config = args["kv_transfer_config"]
    assert config["kv_connector"] == "ShortStore" and config["kv_connector_module_path"] == "saves"
    assert config["kv_connector_extra_config"] == {"path": "/store", "unit": 32}


def test_of_several_engines_each_has_its_own_role() -> None:
    row = Row("x", "x", (), engines=({"role": "kv_producer"}, {"role": "kv_consumer", "seed": 3}))
    first, second = row.engine_args("healthy", "model", "/store")
    assert first["kv_transfer_config"]["kv_role"] == "kv_producer"
    assert second["kv_transfer_config"]["kv_role"] == "kv_consumer" and second["seed"] == 3
    assert "role" not in second


def test_children_of_a_multi_connector_have_their_own_folders() -> None:
    inner = multi(CHUNKS, SHORT)
    children = multi(inner, CHUNKS).options("/store")["kv_connector_extra_config"]["connectors"]
    assert children[1]["kv_connector_extra_config"]["path"] == "/store/1"
    nested = children[0]["kv_connector_extra_config"]["connectors"]
    assert [one["kv_connector_extra_config"]["path"] for one in nested] == ["/store/0/0", "/store/0/1"]
    assert STORE not in json.dumps(children)


def test_arguments_become_options_of_vllm_serve() -> None:
    engine = {"model": "m", "block_size": 32, "enforce_eager": True, "enable_prefix_caching": False,
              "kv_transfer_config": {"kv_role": "kv_both"}}  # fmt: skip
    assert serve.options(engine) == [
        "--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching",
        "--kv-transfer-config", '{"kv_role": "kv_both"}',
    ]  # fmt: skip


def test_why_something_does_not_run_is_what_its_process_said() -> None:
    log = """
(Worker pid=7) ERROR 11-22 13:12:15 [core.py:1] ValueError: current platform cpu does not support ray.
(EngineCore pid=8) RuntimeError: Engine core initialization failed. See root cause above.
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert root_error(log, "RuntimeError: x") == "ValueError: current platform cpu does not support ray."
    assert root_error("nothing", "RuntimeError: x") == "RuntimeError: x"
    log = """pydantic_core.ValidationError: 1 validation error for X
  Value error, Failed to import Ray. [type=value_error, input_value=1]
"""
    said = "pydantic_core.ValidationError: 1 validation error for X: Value error, Failed to import Ray."
    assert root_error(log, "RuntimeError: x") == said


def test_an_unknown_row_is_named() -> None:
    with pytest.raises(tables.UnknownRow, match="no-such-row"):
        tables.wanted(None, ["no-such-row"])
    assert [row.name for _, row in tables.wanted("topologies", ["in-process"])] == ["in-process"]
