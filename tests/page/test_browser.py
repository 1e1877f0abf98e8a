"""The page in a real headless Chromium: it draws, it says no error, keys work, it fits small screens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Tab
from sample import sample, with_loads
from synth import run_json
from test_html import EVIL, run_with
from test_picture import run_with_loads

from kvtrace.picture.draw import draw
from kvtrace.render.html.page import page
from kvtrace.report.build import build_report

DRAWN = """[...document.querySelectorAll('figure .chart')]
.map((one) => one.querySelector('canvas, svg').clientHeight)"""
COLOURS = """(() => {
  const canvas = document.querySelector('figure[data-map] canvas'), seen = {};
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, 60).data;
  for (let i = 0; i < data.length; i += 4) {
    const key = data.slice(i, i + 3).join();
    if (data[i + 3] === 255) seen[key] = (seen[key] || 0) + 1;
  }
  return Object.values(seen).filter((n) => n > 300).length;
})()"""
"""How many colours large parts of the map have."""
FOCUSED = "document.activeElement.closest('figure')?.dataset.map ?? document.activeElement.tagName"


def written(text: str, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    run = run_with(folder / "run")
    return written(page(build_report(run), draw(run)), folder)


@pytest.fixture
def tab(browser: Browser, html: Path) -> Iterator[Tab]:
    """The page, on a screen of the usual width."""
    opened = browser.open(html)
    yield opened
    opened.close()


def said(tab: Tab, figure: str) -> str:
    return str(tab.js(f"document.querySelector('{figure} .readout').textContent"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [380, 1280])
def test_it_draws_without_a_word_in_the_console(browser: Browser, html: Path, width: int, dark: bool) -> None:
    tab = browser.open(html, width, dark=dark)
    assert tab.js("document.documentElement.dataset.ready") == "yes"
    assert tab.troubles() == []
    drawn = tab.js(DRAWN)
    assert len(drawn) == 2 and min(drawn) > 40
    # nothing is wider than the screen
    assert tab.js("document.documentElement.scrollWidth") <= width
    tab.close()


def test_the_findings_begin_above_the_fold(browser: Browser, tmp_path: Path) -> None:
    """On a laptop's screen, under a title that says what ran."""
    html = page(sample(), draw(run_with(tmp_path / "run")))
    tab = browser.open(written(html, tmp_path), 1280, 800)
    assert tab.js("document.title") == "kvtrace: ChunkStore on tiny"
    assert tab.js("document.querySelector('article').getBoundingClientRect().top") < 800
    tab.close()


def test_a_run_that_loads_has_a_second_map_that_keys_walk(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_with_loads(run).write()
    run_json(run)
    tab = browser.open(written(page(build_report(run), draw(run)), tmp_path))
    assert len(tab.js(DRAWN)) == 3
    second = 'figure[data-map="1"]'
    tab.js(f"document.querySelector('{second} .chart').focus()")
    tab.press("ArrowRight")
    assert "loaded" in said(tab, second) and said(tab, second).startswith("step 1, model.layers.0.")
    tab.press("ArrowDown")
    assert "load without work" in said(tab, second) and tab.troubles() == []
    tab.close()


def test_the_map_shows_more_than_one_colour(tab: Tab) -> None:
    assert tab.js(COLOURS) >= 2


def test_arrow_keys_walk_the_map(tab: Tab) -> None:
    map_ = "figure[data-map]"
    tab.js(f"document.querySelector('{map_} .chart').focus()")
    before = said(tab, map_)
    tab.press("ArrowRight")
    first = said(tab, map_)
    assert first != before and first.startswith("step 1, model.layers.0.")
    tab.press("ArrowDown")
    assert said(tab, map_).startswith("step 1, model.layers.1.")
    tab.press("ArrowRight", "ArrowUp")
    assert said(tab, map_).startswith("step 2, model.layers.0.")
    tab.press("End")
    last = said(tab, map_)
    tab.press("ArrowRight")
    assert said(tab, map_) == last  # there is nothing behind the end
    tab.press("+", "-", "PageUp", "Home")
    assert said(tab, map_).startswith("step 1,")
    tab.press("Escape")
    assert said(tab, map_) == before and tab.troubles() == []


def test_arrow_keys_walk_the_requests(tab: Tab) -> None:
    tab.js("document.querySelector('figure[data-lanes] .chart').focus()")
    tab.press("ArrowDown")
    assert said(tab, "figure[data-lanes]").startswith("r0, 100 prompt tokens")
    tab.press("End")
    assert said(tab, "figure[data-lanes]").startswith("r2, 512 prompt tokens")


def test_the_tab_key_reaches_everything_and_enter_opens(tab: Tab) -> None:
    seen = []
    for _ in range(60):
        tab.press("Tab")
        seen.append(tab.js(FOCUSED))
        if tab.js("document.activeElement.tagName") == "SUMMARY" and tab.js(
            "!document.activeElement.parentElement.open"
        ):
            tab.press("Enter")
            assert tab.js("document.activeElement.parentElement.open") is True
    assert seen[0] == "A" and "BUTTON" in seen and "SUMMARY" in seen and "0" in seen
    nameless = tab.js(
        "[...document.querySelectorAll('[tabindex], button, a, summary')]"
        ".filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim())).length"
    )
    assert nameless == 0


def test_the_button_turns_the_colours(tab: Tab) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.js(background)
    tab.js("document.getElementById('theme').click()")
    assert tab.js(background) != light
    tab.js("document.getElementById('theme').click()")
    assert tab.js(background) == light and tab.troubles() == []


def test_it_prints(browser: Browser, html: Path) -> None:
    tab = browser.open(html, dark=True)
    pdf = tab.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 20_000 and tab.troubles() == []
    assert tab.js("document.documentElement.dataset.theme") is None  # as it was before
    tab.close()


def test_foreign_text_runs_nowhere(browser: Browser, tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", connector=EVIL, request=EVIL)
    tab = browser.open(written(page(build_report(run), draw(run)), tmp_path))
    tab.js("window.alerts = 0; window.alert = () => { window.alerts += 1; }")
    tab.js("document.querySelector('figure[data-lanes] .chart').focus()")
    tab.press("ArrowDown")
    assert EVIL.split("\u2028")[0] in said(tab, "figure[data-lanes]")
    assert tab.js("document.querySelectorAll('img, iframe').length") == 0 and tab.js("window.alerts") == 0
    assert tab.troubles() == []
    tab.close()


def test_what_a_script_would_load_is_refused(tab: Tab) -> None:
    refused = "fetch('https://192.0.2.1/').then(() => 'loaded', () => 'refused')"
    assert tab.js(refused) == "refused"
    assert any("Content Security Policy" in line for line in tab.troubles())


def test_a_report_alone_is_a_page_too(browser: Browser, tmp_path: Path) -> None:
    tab = browser.open(written(page(with_loads()), tmp_path))
    assert tab.js("document.documentElement.dataset.ready") == "yes" and tab.troubles() == []
    tab.close()


def test_what_is_printed_is_the_whole_map(tab: Tab) -> None:
    """On paper a chart is narrower than on the screen: the last step is still there, at its right edge."""
    last = (
        "(() => { const c = document.querySelector('figure[data-map] canvas'), w = c.width - 20;"
        "return [c.width, [...c.getContext('2d').getImageData(w, 18, 1, 1).data].join()]; })()"
    )
    wide, on_screen = tab.js(last)
    tab.js("dispatchEvent(new Event('beforeprint'))")
    narrow, on_paper = tab.js(last)
    assert narrow < wide and on_paper == on_screen
    tab.js("dispatchEvent(new Event('afterprint'))")
    assert tab.js(last) == [wide, on_screen]


def test_the_mouse_gets_a_tooltip(tab: Tab) -> None:
    where = tab.js(
        "(() => { const box = document.querySelector('figure[data-map] .chart');"
        "document.documentElement.style.scrollBehavior = 'auto'; box.scrollIntoView();"
        "const at = box.getBoundingClientRect(); return [at.left + 100, at.top + 20]; })()"
    )
    # the tooltip's own text, as soon as the chart has put it there
    shown = (
        (
            "new Promise((done) => { const box = document.querySelector('figure[data-map] .chart');"
            "const look = () => { const tip = box.lastElementChild; if (tip.textContent) { seen.disconnect();"
            "done(tip.textContent); } }; const seen = new MutationObserver(look);"
            "seen.observe(box, { childList: true, subtree: true, characterData: true });"
            "const event = (type) => new MouseEvent(type, { bubbles: true, clientX: X, clientY: Y });"
            "box.firstElementChild.dispatchEvent(event('mousemove')); look(); })"
        )
        .replace("X,", f"{where[0]},")
        .replace("Y }", f"{where[1]} }}")
    )
    assert tab.js(shown).startswith("step 1, model.layers.0.")
    assert tab.troubles() == []
