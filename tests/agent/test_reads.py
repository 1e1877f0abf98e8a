"""What the agent's code reads of vLLM's objects stands in the tables that ``check_targets.py`` checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtrace import agent
from kvtrace.agent.reads import READS
from kvtrace.agent.targets import TARGETS

# The modules that read vLLM's objects, and the variables that hold one where it is read by a plain dot.
READERS = (
    "engine/front", "engine/ops", "engine/scheduler", "engine/worker", "errors/startup",
    "facts/connector_facts", "facts/describe", "hooks/connector", "hooks/hook_records", "kv/caches",
    "kv/layout", "metadata/step_requests", "steps/block_tables", "steps/graphs", "steps/prefixes",
)  # fmt: skip
OBJECTS = {
    "cached", "config", "context", "kv_cache_config", "lora", "new", "one", "output", "request", "scheduler",
    "scheduler_output", "spec", "transfer", "wrapper",
}  # fmt: skip
NOT_VLLM = {
    "__code__", "__dataclass_fields__", "__dict__", "__file__", "__func__", "__name__", "__self__",
    "_value_", "busy", "compiler", "cuda", "get", "is_compiling", "is_current_stream_capturing",
    "name", "prefilling", "prompt", "sessions", "step", "tables", "tag",
}  # fmt: skip
"""Names of Python's, torch's and the agent's own objects."""


def names_read(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of ``getattr(x, "name")``, ``get(x, "a.b")``, ``x.name`` of one of OBJECTS."""
    dotted = path.stem in ("block_tables", "scheduler", "describe", "prefixes", "worker", "graphs")
    objects = OBJECTS | ({"self"} if path.stem in ("scheduler", "worker") else set())  # methods of vLLM's
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = getattr(node.args[1], "value", None)
            if function in ("getattr", "hasattr", "get") and isinstance(given, str):
                yield from ((node.lineno, name) for name in given.split("."))
        elif dotted and isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in objects:
            yield node.lineno, node.attr


@pytest.mark.parametrize("module", READERS)
def test_what_a_module_reads_stands_in_the_tables(module: str) -> None:
    lines = [line for row in READS for line in (*row.names, row.holder)]
    lines += [line for row in TARGETS for line in (*row.expects, row.attr)]
    known = NOT_VLLM | {word for line in lines for word in re.findall(r"\w+", line)}
    path = Path(next(iter(agent.__path__))) / f"{module}.py"
    unknown = sorted({(line, name) for line, name in names_read(path) if name not in known})
    assert not unknown, f"{module}.py reads names that agent/reads.py does not list: {unknown}"


def test_modules_that_the_agent_looks_up_stand_in_the_tables() -> None:
    known = [row.module for row in (*READS, *TARGETS)]
    for path in Path(next(iter(agent.__path__))).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "value", None)
            if isinstance(name, str) and re.fullmatch(r"vllm(\.\w+)+\.?", name):
                assert any(module.startswith(name) for module in known), f"{path.name}: {name}"
