"""How Python 3.12 and later are observed (sys.monitoring), in whatever such Python there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pythons import pythons

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys
from pathlib import Path
from kvtrace.agent.hooks.connector import traced
from kvtrace.agent.state import AGENT
from kvtrace.trace.config import AgentConfig
from kvtrace.trace.format import Role, Fact
from agent import fakes, swallowing
written = []
class Recorder:
    written, alive = 0, True
    def name(self, text): return 1
    def fact(self, document, role=0): written.append((int(document.CODE), document.to_json()))
    def flush(self): pass
AGENT.config = AgentConfig(Path("."), b"k" * 16, "t", 1)
AGENT.recorder = Recorder()
AGENT.add = lambda words: None
connector = swallowing.Careful()
connector = traced(connector, Role.WORKER, "Careful")
AGENT.worker.step = 1
connector.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(range(4))))
connector.save_kv_layer("layer.0", None, None)
free = [tool for tool in range(6) if sys.monitoring.get_tool(tool) is None]
kinds = (Fact.SWALLOWED, Fact.AGENT_ERROR)
print(json.dumps([[v for f, v in written if f == int(kind)] for kind in kinds] + [free]))
"""

CONNECTOR = """
from agent import fakes
def write():
    raise OSError("disk full")
class Careful(fakes.KVConnectorBase_V1):
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        try:
            write()
        except OSError:
            pass
        try:
            {}["x"]
        except KeyError:
            pass
        return list(number for number in range(3))
"""


def test_swallowed_exceptions_are_seen_with_one_tool_id(tmp_path):
    others = pythons(["python3.12", "python3.13", "python3.14"], "import sys; sys.monitoring")
    python = sys.executable if hasattr(sys, "monitoring") else next(others, None)
    if python is None:
        pytest.skip("no Python 3.12 or later here")
    package = tmp_path / "agent"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "fakes.py").write_text((ROOT / "tests/agent/fakes.py").read_text())
    (package / "swallowing.py").write_text(CONNECTOR)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    run = subprocess.run(
        [python, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    facts, errors, free = json.loads(run.stdout)
    assert errors == []
    assert [(fact["type"], fact["hook"]) for fact in facts] == [("OSError", "save_kv_layer")]
    assert facts[0]["where"].endswith("in write") and "swallowing.py:4" in facts[0]["where"]
    assert set(range(6)) - set(free) == {4}, "ours, from the first use on"
