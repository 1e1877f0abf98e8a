"""The table of hooks and that of ops: codes that stay, and what derives from a row."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvtrace
from kvtrace.trace import config, hooks, ops
from kvtrace.trace.format import Flag, Role

PACKAGE = Path(kvtrace.__file__).parent


def test_codes_are_distinct_stable_and_fit_into_a_head() -> None:
    for table in (hooks, ops):
        codes = [row.code for row in table.TABLE]
        expected = list(range(1, len(codes) + 1))
        assert sorted(codes) == expected, "a new row takes the next code, and none is left out"
        assert table.CODES == len(codes) + 1 <= 128
        assert len(set(table.NAMES)) == len(codes)
        assert table.name_of(0) == table.name_of(127) == ""
    assert hooks.name_of(5) == "save_kv_layer" and ops.name_of(2) == "unified_attention_with_output"


def test_what_derives_from_a_row() -> None:
    for hook in hooks.TABLE:
        assert (hook.direction is not None) == (hook.watch is hooks.Watch.COPY)
        assert hook.role is Role.WORKER or not (hook.layered or hook.timed or hook.in_step)
        assert not hook.layered or hook.needs == ((0, "layer_name"),)
    assert hooks.SAVING == (hooks.SAVE_LAYER, hooks.WAIT_SAVE)
    assert hooks.LOADING == (hooks.START_LOAD, hooks.WAIT_LAYER)
    assert {hook.direction for hook in hooks.SAVING} == {Flag.STORE}


def test_the_agents_configuration_goes_through_one_text(tmp_path) -> None:  # type: ignore[no-untyped-def]
    given = config.AgentConfig(tmp_path, config.new_salt(), "mine", 1 << 20, "full", 0.5)
    assert config.AgentConfig.from_text(given.to_text()) == given
    least = config.AgentConfig.from_text(f'{{"dir": "{tmp_path}"}}')
    assert (least.limit_bytes, least.device_timing, least.budget, least.run) == (1 << 30, "sampled", 0.01, "")
    assert len(least.salt) == 16
    for wrong in ("[]", "{}", '{"dir": 1}', '{"dir": "x", "device_timing": "often"}'):
        with pytest.raises(ValueError):
            config.AgentConfig.from_text(wrong)


@pytest.mark.parametrize("room", ["agent", "gate", "launch", "pytest_plugin"])
def test_no_other_module_spells_a_hooks_name(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in hooks.BY_NAME, f"{path}:{node.lineno}: take it from trace/hooks.py"
