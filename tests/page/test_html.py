"""The HTML page as text: one file, everything of the run escaped, bounded; what the shell says about it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sample import sample, with_loads
from synth import Prompt, Rounding, Sim, run_json

from kvtrace.picture.draw import draw
from kvtrace.picture.picture import Picture
from kvtrace.render.html.markup import embedded, tag, text
from kvtrace.render.html.page import page
from kvtrace.report.build import build_report

ROOT = Path(__file__).resolve().parents[2]
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028<!--"
LARGEST = 3_000_000


class Elements(HTMLParser):
    """Tags with their attributes, ids, and the text outside scripts."""

    VOID = frozenset({"meta", "br", "hr", "link", "input", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data

    def ids(self) -> list[str]:
        return [str(attrs["id"]) for _, attrs in self.tags if "id" in attrs]


def spoiled(value: Any) -> Any:
    """The same, with EVIL in every string that no schema fixes."""
    if isinstance(value, dict):
        fixed = ("schema", "severity", "status", "clock", "trust", "role", "unit", "kind", "created")
        return {key: one if key in fixed else spoiled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [spoiled(one) for one in value]
    return value + EVIL if isinstance(value, str) else value


def run_with(folder: Path, connector: str = "ChunkStore", request: str = "r") -> Path:
    sim = Sim(folder, layers=2, tp=2, connector=connector)
    prompts = [Prompt(f"{request}{at}", length, digest=at + 1) for at, length in enumerate((100, 900, 512))]
    sim.serve(prompts, Rounding(512).policy())
    sim.write()
    run_json(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The report of a run, and its page."""
    run = run_with(tmp_path_factory.mktemp("made"))
    report = build_report(run)
    return report, page(report, draw(run))


def test_parts_stand_in_their_order(made: tuple[Any, str]) -> None:
    found = Elements(made[1])
    parts = [
        "verdict", "findings", "ledger", "flow", "ruled-out", "map", "requests", "times", "processes",
        "glossary",
    ]  # fmt: skip
    assert [one for one in found.ids() if one in parts] == parts
    assert not found.open and len(set(found.ids())) == len(found.ids())
    links = {str(attrs["href"])[1:] for name, attrs in found.tags if name == "a"}
    assert links <= set(found.ids())


def test_the_page_says_what_the_report_says(made: tuple[Any, str]) -> None:
    report, html = made
    said = " ".join(Elements(html).text.split())
    assert report["verdict"] in said
    for finding in report["findings"]:
        assert finding["id"] in said and finding["title"] in said
        assert all(line in said for line in (*finding["evidence"], *finding["remedy"]))
    assert all(one["evidence"] in said for one in report["ruled_out"])


def test_it_is_one_file_that_loads_nothing(made: tuple[Any, str]) -> None:
    html = made[1]
    for name, attrs in Elements(html).tags:
        assert not {"src", "srcset", "background", "action", "data"} & attrs.keys()
        assert name not in ("link", "iframe", "object")
        assert str(attrs.get("href", "#")).startswith("#")
        assert not any(key.startswith("on") for key in attrs)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy and policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert (
        "unsafe-inline" not in policy[1].split("style-src")[0] and "@import" not in html.split("</style>")[0]
    )


def test_every_string_of_a_report_is_escaped() -> None:
    for make in (sample, with_loads):
        html = page(spoiled(make()))
        assert "alert(1)</script>" not in html and "<img" not in html and "\u2028" not in html
        found = Elements(html)
        assert not found.open and sum(name == "script" for name, _ in found.tags) == 3
        assert "alert(2)" in found.text


def test_every_string_of_a_run_is_escaped(tmp_path: Path) -> None:
    run = run_with(tmp_path, connector=EVIL, request=EVIL)
    html = page(build_report(run), draw(run))
    assert "<img" not in html and sum(name == "script" for name, _ in Elements(html).tags) == 3
    data = re.search(r'id="kvtrace-picture">(.*?)</script>', html, re.S)
    assert data and json.loads(data[1])["lanes"][0]["id"].startswith(EVIL)


def test_markup() -> None:
    assert (
        tag("p", ["<", tag("b", "&")], title='"', hidden=True, lang=None)
        == '<p title="&quot;" hidden>&lt;<b>&amp;</b></p>'
    )
    assert text("\x1b[2J\u202e") == "\\x1b[2J\\u202e"
    assert embedded({"<": "&\u2029>"}) == '{"\\u003c":"\\u0026\\u2029\\u003e"}'


def test_a_report_alone_says_what_is_missing() -> None:
    html = page(sample())
    said = Elements(html).text
    assert "A report alone holds no steps" in said and "Ruled out" in said
    assert 'data-map="' not in html.split("<script", 1)[0]


def test_a_run_without_steps_or_workers(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=1)
    sim.write()
    run_json(tmp_path)
    html = page(build_report(tmp_path), draw(tmp_path))
    assert "No worker of this run recorded a step" in Elements(html).text
    assert len(page(sample(), Picture())) < LARGEST


def test_the_page_is_bounded(tmp_path: Path) -> None:
    """A report at its limits, and a picture of a long run with many layers."""
    report: Any = sample()
    row = report["requests"]["rows"][0]
    report["requests"]["rows"] = [{**row, "id": f"r{at}" + "x" * 100} for at in range(1000)]
    sim = Sim(tmp_path, layers=48, tp=2)
    for number in range(420):
        sim.serve(
            [Prompt(f"r{number}" * 30, 64, digest=number + 1)], Rounding(32 if number % 3 else 64).policy()
        )
    sim.write()
    run_json(tmp_path)
    assert len(page(report, draw(tmp_path)).encode()) < LARGEST / 2


# ----------------------------------------------------------------------------- the command


def kvtrace(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtrace", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_it_is_written_to_a_file_and_replaces_nothing(tmp_path: Path) -> None:
    run, out = run_with(tmp_path / "run"), tmp_path / "report.html"
    done = kvtrace("explain", run, "--format", "html", "-o", out)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert out.read_text().startswith("<!doctype html>") and 'data-map="0"' in out.read_text()
    assert kvtrace("explain", run, "--format", "html").stdout == out.read_text()
    out.write_text("mine")
    again = kvtrace("explain", run, "--format", "html", "-o", out)
    assert again.returncode == 2 and out.read_text() == "mine" and again.stderr.count("\n") == 1
    assert kvtrace("explain", run, "--format", "html", "-o", out, "--force").returncode == 0
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["charts.min.js", "page.css", "page.js"])
def test_what_is_put_into_the_page_cannot_end_its_element(name: str) -> None:
    said = (ROOT / "kvtrace" / "render" / "html" / name).read_text(encoding="utf-8").lower()
    assert "</script" not in said and "</style" not in said and "<!--" not in said
