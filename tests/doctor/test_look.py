"""The look at vLLM in a process of its own: what a connector's module does there costs one line."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtrace.agent.preflight import facts
from kvtrace.doctor import checks, child, spy
from kvtrace.doctor.answer import Level, Line
from kvtrace.doctor.gather import DoctorFacts, gather

Shell = Callable[..., tuple[int, str, str]]
PLENTY = 600.0
WHOLE = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

class Mine(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config):
        self.extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.root = self.extra["root"]
    def start_load_kv(self, forward_context, **kwargs): pass
    def wait_for_layer_load(self, layer_name): pass
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): print(layer_name)
    def wait_for_save(self): pass
    def update_state_after_alloc(self, request, blocks, num_external_tokens): pass
"""


def config(**extra: Any) -> str:
    return json.dumps(
        {
            "kv_connector": "Mine",
            "kv_connector_module_path": "mine",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    )


def look(site: Path, source: str, give_up: child.GiveUp | None = None, **extra: Any) -> DoctorFacts:
    """The facts of a script's command line whose configuration names the class ``Mine`` of that source."""
    (site / "mine.py").write_text(source)
    words = [sys.executable, "serve.py", "--kv-transfer-config", config(**extra)]
    environ = os.environ | {"PYTHONPATH": str(site)}
    return gather(words, "", environ, PLENTY, give_up or (lambda step, seconds: False))


def lines(found: DoctorFacts, check: str) -> list[Line]:
    return [line for line in checks.answer(found).lines if line.check == check]


def test_a_whole_connector_has_no_problem(vllm: Path, tmp_path: Path) -> None:
    found = look(vllm, WHOLE, root=str(tmp_path))
    answer = checks.answer(found)
    assert not [line for line in answer.lines if line.level is Level.PROBLEM]
    bad = {line.check for line in answer.lines if line.level is Level.WARNING}
    assert bad <= {"targets", "stuck hooks"}  # a stand-in for vLLM has no targets
    assert "mine.Mine" in lines(found, "connector")[0].text
    assert "save_kv_layer" in lines(found, "saves")[0].text
    assert lines(found, "config")[0].level is Level.OK
    assert str(tmp_path) in lines(found, "store")[0].text


def test_an_import_that_hangs_is_one_line_and_says_where(vllm: Path) -> None:
    found = look(
        vllm,
        "import threading\nthreading.Event().wait()\n",
        give_up=lambda step, seconds: step == facts.CONNECTOR,
    )
    assert found.steps[facts.CONNECTOR].state == "hung" and facts.KEYS not in found.steps
    (line,) = lines(found, "connector")
    assert line.level is Level.WARNING and "did not end" in line.text


def test_stacks_name_the_users_own_line() -> None:
    stacks = (
        "Timeout (0:01:00)!\nThread 0x01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait\n\n'
        "Thread 0x02 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait\n'
        '  File "/home/u/mine.py", line 2 in <module>\n'
        '  File "<frozen importlib._bootstrap>", line 1 in _call\n'
    )
    assert child.stands_in(stacks) == "/home/u/mine.py:2"
    assert child.stands_in("") == ""


@pytest.mark.parametrize(
    ("source", "level", "says"),
    [
        ("raise ValueError('no licence')\n", Level.PROBLEM, "no licence (SITE/mine.py:1)"),
        ("import nothing_of_that_name\n", Level.PROBLEM, "nothing_of_that_name"),
        ("Other = 1\n", Level.PROBLEM, "Mine"),
        ("import os\nos._exit(3)\n", Level.PROBLEM, "exit code 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", Level.PROBLEM, "SIGSEGV"),
        ("class Mine:\n    pass\n", Level.PROBLEM, "no subclass of KVConnectorBase_V1"),
        ("import sys\nsys.exit('bye')\n", Level.PROBLEM, "bye"),
    ],
)
def test_an_import_that_fails_is_one_line(vllm: Path, source: str, level: Level, says: str) -> None:
    (line,) = lines(look(vllm, source), "connector")
    assert line.level is level and says.replace("SITE", str(vllm)) in line.text and line.remedy


def test_secrets_of_an_error_are_masked(vllm: Path) -> None:
    found = look(vllm, "raise ValueError('redis://me:hunter22@host:1')\n")
    assert "hunter22" not in json.dumps(checks.answer(found).document())


HOOKS = [
    ("update_state_after_alloc(self, request, num_external_tokens)", Level.PROBLEM),
    ("update_state_after_alloc(self, request, blocks, num_external_tokens, more)", Level.PROBLEM),
    ("update_state_after_alloc(self, r, b, n)", Level.OK),
    ("update_state_after_alloc(self, *args, **kwargs)", Level.OK),
    ("update_state_after_alloc(self, *, request, blocks, num_external_tokens)", Level.PROBLEM),
    ("update_state_after_alloc(self, request, blocks, num_external_tokens, more=1)", Level.OK),
    ("reset(self)", Level.OK),
    ("reset(self, hard)", Level.OK),
    ("handle_preemptions(self, metadata)", Level.OK),
    ("request_finishd(self, request, block_ids)", Level.WARNING),
    ("request_finish_later_on(self, request, block_ids)", Level.OK),
    ("register_cross_layers_kv_cache(self, cache, backend)", Level.OK),
]


def test_hooks_are_held_against_the_installed_base_class(vllm: Path) -> None:
    """All at once: one process, a class for each."""
    classes = "".join(
        f"class C{at}(Mine):\n    def {text}: return print()\n" for at, (text, _) in enumerate(HOOKS)
    )
    source = f"{WHOLE}{classes}\nclass MultiConnector(Mine): pass\nMine = MultiConnector\n"
    names = [f"C{at}" for at in range(len(HOOKS))]
    seen: list[Level] = []
    for part in (names[:8], names[8:]):
        connectors = [{"kv_connector": name, "kv_connector_module_path": "mine"} for name in part]
        told = lines(look(vllm, source, connectors=connectors), "hooks")
        for name in part:
            seen += [one.level for one in told if f"{name}." in one.text or f"{name} " in one.text]
    assert seen == [level for _, level in HOOKS]


def test_a_method_that_the_connector_uses_is_no_misspelt_hook(vllm: Path) -> None:
    source = (
        WHOLE + "    def request_finishd(self): return 1\n    def take(self): return self.request_finishd()\n"
    )
    assert {line.level for line in lines(look(vllm, source), "hooks")} == {Level.OK}


def test_a_misspelt_hook_is_found_where_a_base_class_has_it(vllm: Path) -> None:
    source = WHOLE.replace("class Mine(", "class Whole(") + (
        "\nclass Mine(Whole):\n    def save_kv_layr(self, layer_name, kv_layer, attn_metadata): print(1)\n"
    )
    (line,) = lines(look(vllm, source), "hooks")
    assert line.level is Level.WARNING and "Mine.save_kv_layr is no hook" in line.text


def test_a_method_of_a_class_beside_the_base_class_is_a_hook(vllm: Path) -> None:
    source = WHOLE.replace("base import KVConnectorBase_V1", "base import KVConnectorBase_V1, SupportsHMA")
    source = source.replace("Mine(KVConnectorBase_V1)", "Mine(KVConnectorBase_V1, SupportsHMA)")
    (line,) = lines(look(vllm, source), "hooks")
    assert line.level is Level.PROBLEM and "has no request_finished_all_groups" in line.text
    source += "    def request_finished_all_groups(self, request, block_ids): return False, None\n"
    (line,) = lines(look(vllm, source), "hooks")
    assert line.level is Level.OK and "never called" not in line.text


def test_what_a_decorator_takes_counts_and_not_what_it_wraps(vllm: Path) -> None:
    source = (
        "import functools\ndef locked(f):\n    @functools.wraps(f)\n"
        "    def inner(self, *args): return f(self, 1, *args)\n    return inner\n"
        + WHOLE.replace("    def wait_for_save(self)", "    @locked\n    def wait_for_save(self, lock)")
    )
    assert {line.level for line in lines(look(vllm, source), "hooks")} == {Level.OK}


def test_an_abstract_method_that_is_missing(vllm: Path) -> None:
    source = WHOLE.replace("    def wait_for_save(self): pass\n", "")
    (line,) = lines(look(vllm, source), "hooks")
    assert line.level is Level.PROBLEM and "wait_for_save" in line.text


EACH = WHOLE.replace('self.root = self.extra["root"]', "for key in self.extra: print(key)")
KEYS: list[tuple[str, dict[str, Any], list[Level]]] = [
    (WHOLE, {"root": "/tmp", "rooot": 1}, [Level.WARNING]),
    (WHOLE, {"root": "/tmp"}, [Level.OK]),
    (EACH, {"x": 1}, [Level.NOT_KNOWN]),
    (WHOLE + "import helper\n", {"root": "/tmp", "deep": 1}, [Level.OK]),
    (WHOLE + "    def later(self):\n        import helper\n", {"root": "/tmp", "deep": 1}, [Level.OK]),
    (WHOLE + "import importlib\nimportlib.import_module('json')\n", {"deep": 1}, [Level.NOT_KNOWN]),
]


@pytest.mark.parametrize(("source", "extra", "expected"), KEYS, ids=range(len(KEYS)))
def test_keys_that_nothing_asks_for(
    vllm: Path, source: str, extra: dict[str, Any], expected: list[Level]
) -> None:
    (vllm / "helper.py").write_text(
        "def at(c):\n    return c.kv_transfer_config.get_from_extra_config('deep', 1)\n"
    )
    assert [line.level for line in lines(look(vllm, source, **extra), "config")] == expected


def test_the_command_line(vllm: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(vllm))
    (vllm / "mine.py").write_text(WHOLE)
    code, out, err = shell("doctor", "--connector", "mine:Mine", "--format", "json")
    document = json.loads(out)
    assert (code, err, document["problem"]) == (0, "", 0)
    assert document["connectors"][0]["module"] == "mine"
    code, out, _ = shell("doctor", "--connector", "mine:Nobody")
    assert code == 1 and "PROBLEM" in out and "Nobody" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--connector mine", "no class"),
        ("--connector mine:", "no class"),
        ("-- no-such-program-here", "command not found"),
        ("--format pdf", "no format"),
        ("--timeout 0", "--timeout"),
        ("--nope", "--nope"),
    ],
)
def test_usage_errors_are_one_line(shell: Shell, words: str, says: str) -> None:
    code, out, err = shell("doctor", *shlex.split(words))
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err


def test_a_broken_py_spy_is_one_clause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "py-spy"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    for module in ("kvtrace.doctor.spy", "kvtrace.launch.spy"):
        monkeypatch.setattr(f"{module}.program", lambda: str(broken))
    assert spy.may_look() == "py-spy cannot be started (Exec format error)"
