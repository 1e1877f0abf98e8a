"""kvtrace.load: frames, made when they are asked for, and a notebook's view with nothing unescaped."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synth import Policy, Prompt, Sim, nothing, run_json

import kvtrace
from kvtrace.errors import KvtraceError
from kvtrace.export.tables import DTYPES, PARTITIONS, TABLES
from kvtrace.report.build import build_report


def test_the_package_itself_stays_light() -> None:
    code = (
        "import sys; before = set(sys.modules); import kvtrace; "
        "print(sorted(set(sys.modules) - before - {'kvtrace'}))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['__future__']"
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        kvtrace.lod  # type: ignore[attr-defined]  # noqa: B018


def test_frames_have_the_columns_and_types_of_the_tables(run: Path) -> None:
    loaded = kvtrace.load(run)
    for table in TABLES:
        frame = getattr(loaded, table.name)
        columns = (*PARTITIONS, *table.columns)
        assert list(frame.columns) == [one.name for one in columns]
        assert [str(kind) for kind in frame.dtypes] == [DTYPES[one.type] for one in columns]
        assert len(frame) and getattr(loaded, table.name) is frame
    saves = loaded.events.query("name == 'save_kv_layer' and kind == 'hook' and slots > 0")
    assert saves.groupby("rank")["slots"].sum().to_dict() == {0: 1024, 1: 1024}
    assert (
        loaded.ledger.query("ledger == 'saves'")["token_layers"].sum()
        == loaded.report["ledger"]["saves"]["total"]
    )


def test_a_part_of_a_run(run: Path) -> None:
    for steps in ("5:5", (5, 5)):
        assert set(kvtrace.load(run, steps=steps).steps["step"]) == {5}
    one = kvtrace.load(run, request="mine", layers="0")
    assert list(one.requests["client"]) == ["mine"]
    assert set(one.events["layer"].dropna()) == {"model.layers.0.self_attn.attn"}
    nothing_there = kvtrace.load(run, steps=(1000, 2000))
    assert len(nothing_there.events) == len(nothing_there.steps) == 0
    assert list(nothing_there.steps.columns) == list(one.steps.columns)
    with pytest.raises(KvtraceError, match="no range of steps"):
        kvtrace.load(run, steps=(5, 1))
    with pytest.raises(KvtraceError, match="no such file"):
        kvtrace.load(run / "nowhere")


def test_a_report_without_its_run(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(build_report(run)), encoding="utf-8")
    loaded, whole = kvtrace.load(path), kvtrace.load(run)
    assert loaded.findings.drop(columns="run").equals(whole.findings.drop(columns="run"))
    assert list(loaded.requests["id"]) == list(whole.requests["id"])
    with pytest.raises(KvtraceError, match="load the run directory"):
        loaded.events  # noqa: B018
    with pytest.raises(KvtraceError, match="needs the run directory"):
        kvtrace.load(path, steps="1:2")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= {"class", "style", "border"}
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_notebook_shows_the_answer_and_escapes_everything(tmp_path: Path) -> None:
    sim = Sim(tmp_path, connector="<img src=x onerror=alert(1)>")
    sim.serve([Prompt("a", 64)], Policy(nothing))
    sim.write()
    run_json(tmp_path)
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    (tmp_path / "run.json").write_text(text.replace('"name": "test"', '"name": "</div><script>x</script>"'))
    loaded = kvtrace.load(tmp_path)
    page = Tags()
    page.feed(loaded._repr_html_())
    assert set(page.tags) <= {"div", "p", "b", "br", "table", "thead", "tbody", "tr", "th", "td", "code"}
    shown = " ".join(page.words)
    assert loaded.report["verdict"] in shown and "</div><script>x</script>, vLLM 0.32.0, 1 request" in shown
    assert "below" in shown or loaded.report["findings"][0]["id"] in shown
    assert repr(loaded) == "<kvtrace run '</div><script>x</script>': 1 request>"
