"""The pytest plugin, in pytest sessions of their own: synthetic recordings first, then a real engine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from side_by_side import Done, Place, Ran, Script
from stand_in import write_sources
from vllm_env import vllm_env

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]

# A recording as an engine would leave it in the test's run directory.
CONFTEST = f"""
import sys
import pytest
sys.path.insert(0, {str(ROOT / "tests" / "ledger")!r})
from synth import Fate, Prompt, Rounding, Sim

@pytest.fixture
def serve(kvtrace):
    def serve(unit=32, lengths=(64, 96, 128), tag=7, pid=100, **fate):
        sim = Sim(kvtrace.run_dir, tag=tag, pid=pid, tp=2, layers=3, ints={{"unit": unit}}, in_process=False)
        prompts = [Prompt(f"{{tag}}-req-{{n}}", n, digest=n) for n in lengths]
        sim.serve(prompts, Rounding(unit).policy(), fate=lambda step: Fate(**fate))
        sim.write()
    return serve
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("KVTRACE_CONFIG", "VLLM_ENABLE_V1_MULTIPROCESSING", "CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    # other people's plugins that load slowly
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:anyio -p no:hypothesispytest")
    pytester.makeconftest(CONFTEST)
    return pytester


def test_loading_the_plugin_loads_nothing_heavy() -> None:
    code = (
        "import sys, kvtrace.pytest_plugin\n"
        "tops = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(tops & {'numpy', 'pandas', 'rich', 'typer', 'torch', 'vllm'}),"
        " sorted(name for name in sys.modules if name.startswith('kvtrace')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = ["kvtrace", "kvtrace.pytest_plugin", "kvtrace.pytest_plugin.measured"]
    assert done.stdout.strip() == f"[] {expected}", done.stderr


def test_the_plugin_is_idle_until_it_is_used(inner: pytest.Pytester) -> None:
    inner.makeconftest("")
    inner.makepyfile(
        """
        import os, sys

        def test_plain(request):
            assert "KVTRACE_CONFIG" not in os.environ
            assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
            assert not [name for name in sys.modules if name.startswith(("kvtrace.agent", "pandas", "vllm"))]

        def test_no_alias(request):
            import pytest
            with pytest.raises(pytest.FixtureLookupError):
                request.getfixturevalue("trace")
        """
    )
    inner.runpytest_subprocess().assert_outcomes(passed=2)


def test_numbers_and_assertions_that_hold(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import json, os
        from types import SimpleNamespace
        import pytest
        from kvtrace.errors import KvtraceError
        from kvtrace.report.load import check_report

        SEEN = []

        def test_environment(kvtrace):
            config = json.loads(os.environ["KVTRACE_CONFIG"])
            assert config["dir"] == str(kvtrace.run_dir)
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            assert list((kvtrace.run_dir / "spool").glob("*.kvt"))  # the agent records already
            SEEN.append(kvtrace.run_dir)

        def test_environment_is_put_back(monkeypatch):
            assert "KVTRACE_CONFIG" not in os.environ
            assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
            assert not SEEN[0].exists()  # it passed: nothing is kept

        def test_the_users_own_settings_stay(request, monkeypatch):
            monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
            monkeypatch.setenv("VLLM_PLUGINS", "mine")
            request.getfixturevalue("kvtrace").keep = True
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
            assert os.environ["VLLM_PLUGINS"] == "mine,kvtrace"
            SEEN.append(request.getfixturevalue("kvtrace").run_dir)

        def test_healthy(kvtrace, serve):
            assert SEEN[1].exists()
            serve()
            trace = kvtrace
            assert trace.coverage("save_kv_layer") == 1
            assert trace.coverage("save_kv_layer", layer="model.layers.1.*", rank=1) == 1
            assert trace.coverage("unified_attention_with_output", layer=2) == 1
            assert trace.saved_tokens() == 64 + 96 + 128
            assert trace.saved_tokens("7-req-96") == 96
            assert trace.saved_tokens(SimpleNamespace(request_id="7-req-96")) == 96
            assert trace.saved_tokens(["7-req-96", "7-req-64"]) == 160
            assert trace.loaded_tokens() == trace.loaded_tokens("7-req-64") == 0
            trace.assert_no_findings()
            trace.assert_coverage("save_kv_layer")
            assert check_report(trace.report, "here") is trace.report  # made once
            assert "kvtrace explain" in trace.explain() or "kvtrace why" in trace.explain()
            assert trace.report["run"]["name"].endswith("::test_healthy")

        def test_made_anew_when_the_engine_went_on(kvtrace, serve):
            serve()
            before = kvtrace.saved_tokens()
            serve(tag=8, pid=200)
            assert kvtrace.saved_tokens() == 2 * before

        def test_wrong_questions(kvtrace, serve):
            with pytest.raises(KvtraceError, match="no step of a vLLM engine was recorded"):
                kvtrace.coverage("save_kv_layer")
            with pytest.raises(AssertionError, match="no step of a vLLM engine was recorded"):
                kvtrace.assert_no_findings()
            serve(unit=256)
            for ask, words in (
                (lambda: kvtrace.coverage("save_layer"), "knows no hook or op 'save_layer'"),
                (lambda: kvtrace.coverage("save_kv_layer", layer=9), "no layer 9 in this run: seen: model"),
                (lambda: kvtrace.coverage("save_kv_layer", rank=9), "no rank 9"),
                (lambda: kvtrace.saved_tokens("nobody"), "no request 'nobody'"),
                (lambda: kvtrace.saved_tokens(3), "3 is not a request"),
                (lambda: kvtrace.assert_no_findings(allow=["typo"]), "knows no cause typo"),
                (lambda: kvtrace.assert_no_findings(severity="bad"), "no severity 'bad'"),
            ):
                with pytest.raises(KvtraceError, match=words):
                    ask()
            assert kvtrace.findings[0]["id"] == "below-save-granularity"
            kvtrace.assert_no_findings(allow="below-save-granularity")
        """
    )
    inner.runpytest_subprocess().assert_outcomes(passed=6)


def test_failing_assertions_show_the_finding(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        def test_tokens(kvtrace, serve):
            serve(unit=256)
            assert kvtrace.saved_tokens() == 288

        def test_findings(kvtrace, serve):
            serve(unit=256)
            kvtrace.assert_no_findings(severity="limit")

        def test_one_rank(kvtrace, serve):
            serve(unhooked=frozenset({(1, 2)}))
            assert kvtrace.coverage("save_kv_layer") == 1

        def test_one_rank_minimum(kvtrace, serve):
            serve(unhooked=frozenset({(1, 2)}))
            kvtrace.assert_coverage("save_kv_layer", 0.9)

        def test_own(kvtrace, serve):
            serve()
            assert 1 == 2

        def test_nothing_recorded(kvtrace):
            assert 1 == 2
        """
    )
    result = inner.runpytest_subprocess()  # not -v: pytest shows eight lines of an explanation
    result.assert_outcomes(failed=6)
    parts = re.split(r"_{5,} (test_\w+) _{5,}", result.stdout.str())
    said = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert "assert 0 == 288 (tokens saved)" in said["test_tokens"]
    for name in ("test_tokens", "test_findings"):
        before, section = said[name].split(" kvtrace -", 1)
        for text in (before, section):
            assert "CHOICE  below-save-granularity" in text and "Remedy" in text
        assert "Evidence" in section
        assert "more: kvtrace explain " in section
    assert "AssertionError: 1 finding that the test does not allow" in said["test_findings"]
    assert "kvtrace/pytest_plugin" not in said["test_findings"]  # our own frames are hidden
    assert "save_kv_layer: " in said["test_one_rank"]
    assert "layer-not-hooked" in said["test_one_rank"]
    assert "model.layers.2.self_attn.attn, rank 1: 0 of " in said["test_one_rank"]
    assert "is below 0.9 (save_kv_layer: " in said["test_one_rank_minimum"]
    assert "No findings" not in said["test_own"] and "more: kvtrace explain" in said["test_own"]
    assert "no step of a vLLM engine was recorded" in said["test_nothing_recorded"]
    kept = re.search(r"kvtrace explain (\S+)", said["test_tokens"])
    assert kept and list(Path(kept[1]).glob("spool/*.kvt")) and (Path(kept[1]) / "run.json").is_file()


def test_xdist(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.parametrize("number", range(3))
        def test_own_directory(trace, serve, number):
            serve(lengths=[32 * (number + 1)])
            assert trace.saved_tokens() == 32 * (number + 1)
            assert os.environ["PYTEST_XDIST_WORKER"] in str(trace.run_dir)

        def test_fails(trace, serve):
            serve(unit=256)
            assert trace.saved_tokens() == 288
        """
    )
    result = inner.runpytest_subprocess("-n", "2", "--kvtrace")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*assert 0 == 288*", "*CHOICE  below-save-granularity*", "* kvtrace -*"])


# A package that looks like vLLM where the agent hooks it, with the order of imports that matters.
FAKE = {
    "vllm/model_executor/layers/attention/kv_transfer_utils.py": "def maybe_transfer_kv_layer(f): return f\n",
}


IMPORTS_FIRST = """
import sys
sys.path.insert(0, {path!r})
import pytest
from vllm.model_executor.layers.attention import kv_transfer_utils

@pytest.fixture
def trace():
    return "mine"
"""


@pytest.mark.parametrize("asked", [False, True])
def test_vllm_imported_by_a_conftest(inner: pytest.Pytester, asked: bool) -> None:
    """The hooks go in before the first conftest where the project asked; else the test says: too late."""
    inner.makeconftest(IMPORTS_FIRST.format(path=str(write_sources(inner.path / "fake", FAKE))))
    if asked:
        inner.makeini("[pytest]\nkvtrace = true\n")
    inner.makepyfile(
        """
        import sys

        def test_hooked(kvtrace):
            module = sys.modules["vllm.model_executor.layers.attention.kv_transfer_utils"]
            assert hasattr(module.maybe_transfer_kv_layer, "__wrapped__")

        def test_own_fixture(trace):
            assert trace == "mine"
        """
    )
    result = inner.runpytest_subprocess()
    if asked:
        result.assert_outcomes(passed=2)
    else:
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines(["*attention layers were imported before the fixture*kvtrace = true*"])


def test_inside_kvtrace_run(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the tests the outer run goes on recording."""
    outer = inner.path / "outer"
    outer.mkdir()
    monkeypatch.setenv("KVTRACE_CONFIG", f'{{"dir": "{outer}", "salt": "00", "run": "outer"}}')
    inner.makepyfile(
        """
        import os
        from pathlib import Path

        def test_inner(kvtrace):
            from kvtrace.agent.state import AGENT
            assert AGENT.recorder.path.is_relative_to(kvtrace.run_dir)
            assert '"salt": "00"' in os.environ["KVTRACE_CONFIG"]

        def test_after():
            from kvtrace.agent.state import AGENT
            assert AGENT.recorder.path.is_relative_to(Path("outer").resolve())
        """
    )
    inner.runpytest_subprocess().assert_outcomes(passed=2)


# --- a real engine ----------------------------------------------------------------------------------


def documented_files() -> dict[str, str]:
    """The files that docs/pytest.md tells people to copy."""
    text = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, re.S))


# each prompt below a block: rounded to nothing
ONE_BY_ONE = """
from vllm import SamplingParams
from test_my_connector import llm

def test_short_prompts(trace, llm):
    for n in (20, 21, 22, 23):
        prompt = {"prompt_token_ids": [n + i for i in range(n)]}
        llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert trace.coverage("save_kv_layer") == 1
    trace.assert_no_findings(severity="limit")
"""


def documented(place: Place) -> Done:
    for name, text in {**documented_files(), "test_one_by_one.py": ONE_BY_ONE}.items():
        (place.folder / name).write_text(text, encoding="utf-8")
    env = {name: value for name, value in vllm_env().items() if name not in ("CI", "BUILD_NUMBER")}
    return subprocess.run(
        [sys.executable, "-m", "pytest"],
        cwd=place.folder, env=env | {"MODEL": str(place.model)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


SCRIPTS = (documented,)


@pytest.mark.engine
def test_the_documented_example_on_a_real_engine(ran: Mapping[Script, Ran]) -> None:
    assert set(documented_files()) == {"pyproject.toml", "test_my_connector.py"}
    text = ran[documented].done.stdout
    assert "1 failed, 1 passed" in text, text[-3000:]
    assert "1 finding that the test does not allow: below-save-granularity" in text
    section = text.split(" kvtrace -", 1)[1]
    assert "CHOICE  below-save-granularity" in section and "Remedy" in section
