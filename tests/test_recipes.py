"""The recipes of CONTRIBUTING.md, followed on a copy of the package as far as a program can.

A step says where its code block goes: "New file PATH", or "In PATH, after (before, in place of) LINE", where
that line stands once. A block of ``sh`` is run in the copy.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SUPPORT = (ROOT / "tests" / "ledger", ROOT / "tests" / "agent")
COPIED = ("kvtrace", "docs", "scripts")

_BLOCK = re.compile(r"^   ```(\w+)\n(.*?)^   ```$", re.MULTILINE | re.DOTALL)
_WHERE = re.compile(
    r"(?P<new>New file) `(?P<made>[^`]+)`"
    r"|In `(?P<path>[^`]+)`.*?(?P<how>after|before|in place of)\s+`(?P<at>[^`]+)`",
    re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    """One step of a recipe with its code block."""

    path: str
    """"" for a command."""
    how: str
    """new file, after, before, in place of; run for a command."""
    at: str
    block: str


def steps(title: str) -> Iterator[Step]:
    """The steps of a recipe that have a code block, in order."""
    part = CONTRIBUTING.partition(f"\n### {title}\n")[2]
    assert part, f"CONTRIBUTING.md has no recipe '{title}'"
    part = re.split(r"^#{2,3} ", part, maxsplit=1, flags=re.MULTILINE)[0]
    for text in re.split(r"^\d+\. ", part, flags=re.MULTILINE)[1:]:
        found = _BLOCK.search(text)
        if found is None:
            continue
        block = (
            textwrap.dedent(re.sub(r"^   ", "", found[2], flags=re.MULTILINE))
            if found[1] == "sh"
            else (re.sub(r"^   ", "", found[2], flags=re.MULTILINE))
        )
        if found[1] == "sh":
            yield Step("", "run", "", block.strip())
            continue
        where = _WHERE.search(text[: found.start()])
        assert where, f"{title}: where does this block go? {text[:80]}"
        if where["new"]:
            yield Step(where["made"], "new file", "", block)
        else:
            yield Step(where["path"], where["how"], where["at"], block)


@dataclass
class Copy:
    """A copy of the package, in which recipes are followed."""

    root: Path

    def follow(self, title: str, **words: str) -> list[str]:
        """Do the steps; ``words`` stand for words in capitals of its commands. Returns what they printed."""
        printed = [self.do(step, words) for step in steps(title)]
        for verb in (["check"], ["format", "--check"]):
            self.run(
                "-m", "ruff", *verb, "-q", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "kvtrace"
            )
        return printed

    def do(self, step: Step, words: dict[str, str]) -> str:
        if step.how == "run":
            command = shlex.split(step.block)
            assert command[0] == "python"
            return self.run(*(words.get(word, word) for word in command[1:])).stdout
        path = self.root / step.path
        if step.how == "new file":
            assert not path.exists(), step.path
            path.write_text(step.block, encoding="utf-8")
            return ""
        text = path.read_text(encoding="utf-8")
        lines = f"\n{text}"
        at = f"\n{step.at}\n"
        assert lines.count(at) == 1, f"{step.path}: {lines.count(at)} times: {step.at!r}"
        put = {
            "after": f"{at}{step.block}",
            "before": f"\n{step.block}{step.at}\n",
            "in place of": f"\n{step.block}",
        }[step.how]
        path.write_text(lines.replace(at, put)[1:], encoding="utf-8")
        return ""

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Python in the copy."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env={
                "PYTHONPATH": os.pathsep.join(map(str, (self.root, *SUPPORT))),
                "COLUMNS": "100",
                "NO_COLOR": "1",
                "PATH": "/usr/bin:/bin",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def python(self, code: str) -> str:
        return self.run("-c", textwrap.dedent(code)).stdout

    def kvtrace(self, *words: str, code: int = 0) -> str:
        return self.run("-m", "kvtrace", *words, code=code).stdout


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    root = tmp_path / "copy"
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("gpu"))
    return Copy(root)


def test_a_cause(copy: Copy, tmp_path: Path) -> None:
    copy.follow("A cause")
    page = copy.kvtrace("docs", "long-prompt-skipped")
    assert page.startswith("long-prompt-skipped\n") and "leaves longer ones out" in page
    listed = [cause["id"] for cause in json.loads(copy.kvtrace("docs", "--format", "json"))]
    assert listed[listed.index("long-prompt-skipped") - 1] == "first-chunk-only"
    pages = copy.root / "docs" / "causes"
    assert "(long-prompt-skipped.md)" in (pages / "README.md").read_text(encoding="utf-8")
    assert "not yet seen live" in (pages / "long-prompt-skipped.md").read_text(encoding="utf-8")

    serve = """
store = lambda prompt, index, start, end, last: [Entry(prompt.id, end - start, prompt.length, start)]
some = Policy(lambda prompt, *where: store(prompt, *where) if prompt.length <= LIMIT else [])
sim.serve([Prompt(f"r{n}", n, digest=n) for n in (64, 96, 128, 256)], some)
"""
    report, healthy = reports_of(copy, tmp_path, serve.replace("LIMIT", "96"), serve.replace("LIMIT", "999"))
    assert report["ledger"]["saves"]["tokens"]["not-saved:long-prompt-skipped"] == 128 + 256
    (finding,) = [one for one in report["findings"] if one["id"] == "long-prompt-skipped"]
    assert (finding["severity"], finding["stage"], finding["requests"]) == ("limit", 1, 2)
    assert "prompts longer than 96 tokens are left out" in report["verdict"]
    assert not healthy["findings"]
    assert "long-prompt-skipped" in {one["id"] for one in healthy["ruled_out"]}


def test_a_property(copy: Copy) -> None:
    copy.follow("A property of verify")
    printed = copy.python(
        """
        from kvtrace.verify.property import workloads
        from kvtrace.verify.observed import EngineFacts
        from kvtrace.verify.registry import of_suite

        facts = EngineFacts(block=32, budget=512, longest=2048, seqs=16, unit=32)
        print(dict((name, one.text) for name, one in workloads(of_suite("quick"), facts))["twins"])
        """
    )
    assert printed == "a112&a112 ; a112&a112\n"


def test_a_hook(copy: Copy, tmp_path: Path) -> None:
    copy.follow("A connector hook")
    assert "- 99: `finish_forward`" in (copy.root / "kvtrace" / "trace" / "records.md").read_text(
        encoding="utf-8"
    )
    # the proxy wraps it, and its calls are recorded
    copy.python(
        """
        import fakes
        from kvtrace.agent.hooks.connector import traced
        from kvtrace.trace import hooks
        from kvtrace.trace.format import Role

        class Mine(fakes.KVConnectorBase_V1):
            def finish_forward(self):
                return "done"

        connector = Mine()
        connector = traced(connector, Role.WORKER, "Mine")
        assert "finish_forward" in vars(type(connector)) and connector.finish_forward() == "done"
        assert hooks.name_of(99) == "finish_forward"
        """
    )
    step = "step = sim.step([], tokens=1)\nsim.hook(0, 'finish_forward', step)"
    (report,) = reports_of(copy, tmp_path, step)
    (row,) = [row for row in report["coverage"]["hooks"] if row["hook"] == "finish_forward"]
    assert row["fired"] == 1 and row["rank"] == 0
    assert "finish_forward" in {row["hook"] for row in report["timing"]}


def test_an_output_format(copy: Copy) -> None:
    copy.follow("An output format")
    demo = str(ROOT / "reports" / "demo" / "report.json")
    outline = copy.kvtrace("explain", demo, "--format", "outline").splitlines()
    assert outline[0] == "kvtrace: vllm"
    assert any(line.startswith("  ") and "first-chunk-only" in line for line in outline)
    shown = "".join(copy.kvtrace("explain", "--help").split())
    assert "text|markdown|outline|json|html" in shown
    raised = str(ROOT / "reports" / "vllm-0.32.0-cpu" / "hook-raised.json")
    assert "FAULT" in copy.kvtrace("check", raised, "--format", "outline", "--no-config", code=1)
    wrong = copy.run("-m", "kvtrace", "diff", demo, demo, "--format", "outlin", code=2)
    assert wrong.stdout == "" and "outline" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_an_export_format(copy: Copy, tmp_path: Path) -> None:
    copy.follow("An export format")
    reports_of(copy, tmp_path, "sim.serve([Prompt('a', 64)], Policy(nothing))")
    run, place = str(tmp_path / "0"), tmp_path / "out"
    assert "events" in copy.kvtrace("export", run, "--format", "jsonl", "-o", str(place))
    copy.kvtrace("export", run, "--format", "csv", "-o", str(tmp_path / "csv"))
    for name in ("events", "steps", "requests", "ledger", "findings"):
        lines = (place / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        table = (tmp_path / "csv" / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(table) - 1 and all(json.loads(line)["run"] for line in lines)
        assert lines or name == "findings"
    assert "jsonl" in copy.run("-m", "kvtrace", "export", run, "--format", "jsonx", code=2).stderr
    assert "jsonl" in copy.kvtrace("export", "--help")


def test_a_native_copy(copy: Copy) -> None:
    copy.follow("A native copy")
    page = (copy.root / "kvtrace" / "agent" / "watch" / "native.md").read_text(encoding="utf-8")
    assert "| `acme_kv.native.copy` | sources into targets" in page
    printed = copy.python(
        """
        from types import ModuleType

        from kvtrace.agent.watch import native

        (row,) = [one for one in native.rows() if one.where == "acme_kv.native.copy"]
        module = ModuleType("acme_kv.native")
        module.copy = lambda sources, targets, sizes: len(sources)
        assert native.wrap(row, module) and module.copy([4096], [8192], [64]) == 1
        known = native.copies_of(row, ([4096], [8192]), {"sizes": [64]}, None)
        print([(written, memory is not None) for written, memory in known])
        print(native.copies_of(row, (["x"], None, None), {}, None))
        """
    )
    assert printed == "[(False, True), (True, True)]\n[(False, None), (True, None)]\n"


def test_a_flag_that_reaches_the_agent(copy: Copy, tmp_path: Path) -> None:
    copy.follow("A CLI flag that reaches the agent")
    child = (
        "from kvtrace.agent.plugin import activate; from kvtrace.agent.state import AGENT\n"
        "activate(); print(AGENT.config.note, AGENT.config.budget)"
    )
    run = ("-m", "kvtrace", "run", "-o", str(tmp_path / "run"), "--note", "a word")
    assert copy.run(*run, "--", sys.executable, "-c", child).stdout == "a word 0.01\n"
    assert "--note TEXT" in copy.kvtrace("run", "--help")


def test_a_new_vllm_version_and_a_moved_target(copy: Copy, tmp_path: Path) -> None:
    same = sources(tmp_path / "same", "0.34.0", {})
    moved = sources(
        tmp_path / "moved", "0.34.0", {"vllm.forward_context": ("vllm.v1.forward_context", "make")}
    )
    said = "".join(copy.follow("A new vLLM version", PATH=str(same)))
    assert "vLLM 0.34.0: no targets missing" in said
    page = (copy.root / "docs" / "causes" / "hook-raised.md").read_text(encoding="utf-8")
    assert "0.8.5 .. 0.34.0" in page

    check = ("scripts/check_targets.py", str(moved))
    said = copy.run(*check, code=1).stdout
    assert "no create_forward_context" in said and "1 target missing" in said
    copy.follow("A moved vLLM target")
    said = copy.run(*check).stdout
    assert "no targets missing" in said
    assert re.search(r"^forward-context +not meant for it", said, re.MULTILINE)
    assert re.search(r"^forward-context-new +ok", said, re.MULTILINE)
    said = copy.python("from kvtrace.trace.targets import other_id; print(other_id('forward-context'))")
    assert said == "forward-context-new\n"


def test_a_field_of_the_report(copy: Copy, tmp_path: Path) -> None:
    copy.follow("A field of `report.json`")
    schema = json.loads(
        (copy.root / "kvtrace/report/schema/kvtrace.report.2.json").read_text(encoding="utf-8")
    )
    field = schema["$defs"]["EngineRow"]["properties"]["max_num_seqs"]
    assert field["description"] == "requests per step at most"
    (report,) = reports_of(copy, tmp_path, "sim.step([], tokens=1)")
    assert report["run"]["engines"][0]["max_num_seqs"] == 16
    older = ROOT / "reports" / "demo" / "report.json"
    assert "kv-stale" in copy.kvtrace("explain", str(older))


def sources(folder: Path, version: str, moved: dict[str, tuple[str, str]]) -> Path:
    """Sources of a vLLM that has what is hooked and what is read, and nothing else.

    Args:
        moved: module -> where its hooked function is instead, and what ``create`` is called there.
    """
    from kvtrace.agent.reads import READS
    from kvtrace.agent.targets import TARGETS
    from kvtrace.versions import NEWEST

    modules: dict[str, dict[str, list[str]]] = {}
    for row in READS:
        if row.versions.endswith(NEWEST):
            stubs = modules.setdefault(row.module, {}).setdefault(row.holder, ["..."])
            for line in row.names:
                name, bracket, parameters = line.partition("(")
                stubs.append(f"def {name}({parameters}: ..." if bracket else f"{name}: object")
    for target in TARGETS:
        if target.versions.endswith(NEWEST):
            where, create = moved.get(target.module, (target.module, "create"))
            for line in target.expects:
                dotted, bracket, parameters = line.replace("create_", f"{create}_").partition("(")
                holder, _, name = dotted.partition(" ")[0].rpartition(".")
                stub = f"def {name}({parameters}: ..." if bracket else f"{name}: object"
                modules.setdefault(where, {}).setdefault(holder, []).append(stub)
    for module, holders in modules.items():
        path = folder / f"{module.replace('.', '/')}{'' if '.' in module else '/__init__'}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = holders.pop("", [])
        for holder, methods in holders.items():
            lines += [f"class {holder}:", *(f"    {method}" for method in methods)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "vllm" / "_version.py").write_text(f"version = '{version}'\n")
    return folder


def reports_of(copy: Copy, folder: Path, *bodies: str) -> list[Any]:
    """Reports, made by the copy, of synthetic runs: each body drives a ``sim``."""
    lines = ["import json", "from pathlib import Path", "from kvtrace.report.load import read_report"]
    lines += ["from synth import *"]
    for number, body in enumerate(bodies):
        lines += [f"sim = Sim(Path({str(folder / str(number))!r}), layers=2)", body, "sim.write()"]
        lines += ["print(json.dumps(read_report(sim.dir)))"]
    return [json.loads(line) for line in copy.run("-c", "\n".join(lines)).stdout.splitlines()]
