"""The parts of the page that hold charts, each with the same in words beside it."""

from __future__ import annotations

from kvtrace.picture.picture import Map, Picture, State
from kvtrace.render.html.markup import Content, Markup, section, tag, text
from kvtrace.render.html.sections import all_requests
from kvtrace.render.layout import names
from kvtrace.report.model import Report
from kvtrace.words import count, percent, plural

_CLASS = {"?": "Q", "-": "A"}
_KEYS = "Arrow keys move from cell to cell, Page Up and Page Down by a tenth, + and - zoom, Escape ends."
_EMPTY_CELL = "Point at a cell, or press an arrow key: what happened in it stands here."
_EMPTY_LANE = "Click a request, or press an arrow key: its story stands here."
WITHOUT = (
    "A report alone holds no steps. Give kvtrace explain the run directory that it came from, and the "
    "picture stands here."
)


def heat_maps(picture: Picture | None) -> Markup:
    """Layers x steps, one map for workers that look alike."""
    title = "Layers and steps"
    if picture is None or not picture.maps:
        none = "No worker of this run recorded a step of a layer."
        return section("map", title, tag("p", WITHOUT if picture is None else none))
    lead = (
        "What happened in each layer in each step. Where a step computed prompt tokens, the cell says what "
        "became of them in that layer; elsewhere, what was called."
    )
    if any(one.what == "loads" for one in picture.maps):
        lead += " A second map is that of loads."
    parts: list[Content] = [tag("p", lead, class_="dim"), _legend(picture)]
    parts += [_map(picture, at, one) for at, one in enumerate(picture.maps)]
    parts += [tag("p", note, class_="dim") for note in picture.notes]
    return section("map", title, *parts)


def _legend(picture: Picture) -> Markup:
    used = {picture.kinds[kind].state for one in picture.maps for kind, _ in one.counts}
    used |= {picture.kinds[bar.kind].state for lane in picture.lanes for bar in lane.bars}
    rows = [
        tag("li", [swatch(state), tag("span", [tag("b", state.label), text(f": {state.meaning}")])])
        for state in State
        if state in used
    ]
    return tag("ul", rows, class_="legend")


def swatch(state: State) -> Markup:
    css = _CLASS.get(state.letter, state.letter)
    return tag("span", state.letter, class_=f"sw {css}", aria_hidden="true")


def _map(picture: Picture, at: int, one: Map) -> Markup:
    who = names(one.workers)
    size = f"{plural(len(one.layers), 'layer')}, {plural(one.total, 'step')}"
    title = f"{'Loads, ' if one.what == 'loads' else ''}{who}: {size}"
    several = (
        f" Each cell is {count(one.per)} steps, with the share of each state. A fault takes "
        "half of its height at least, decode steps take a quarter at most where there are others."
    )
    alike = " These workers look alike." if len(one.workers) > 1 else ""
    timed = (
        " Below, on a logarithmic scale: the mean time of a step, and (blue) of the connector's hooks in it."
        if any(one.forward_ms)
        else ""
    )
    total = max(1, sum(n for _, n in one.counts))
    words = []
    for kind, n in one.counts:
        it = picture.kinds[kind]
        why = f" ({it.why})" if it.why else ""
        share = f"{it.state.label}{why}: {plural(n, 'layer-step')}, {percent(n, total)}"
        words.append(tag("li", [swatch(it.state), text(share)]))
    label = f"Heat map of {'loads of ' if one.what == 'loads' else ''}{who}, {size}. {_KEYS}"
    chart = tag("div", "", class_="chart", tabindex=0, role="application", aria_label=label)
    hint = tag("p", [_KEYS, " Ctrl and the wheel zoom, the bar below the map moves."], class_="dim noprint")
    readout = tag("output", _EMPTY_CELL, class_="readout noprint", aria_live="polite", data_empty=_EMPTY_CELL)
    caption = tag("figcaption", [tag("b", title), text(f".{alike}{several * (one.per > 1)}{timed}")])
    return tag("figure", [caption, chart, readout, hint, tag("ul", words, class_="legend")], data_map=at)


_MARKS = (
    ("●", "arrival"), ("◆", "the connector answers a lookup"), ("▼", "load asked for, finished"),
    ("▲", "save asked for, finished"), ("✕", "preempted"), ("▮", "end"),
)  # fmt: skip


def request_lanes(picture: Picture | None, report: Report) -> Markup:
    """Requests in time."""
    title = "Requests"
    if picture is None or not picture.lanes:
        why = WITHOUT if picture is None else "No request was recorded."
        return section("requests", title, tag("p", why), all_requests(report))
    shown = plural(len(picture.lanes), "request")
    few = len(picture.lanes) < picture.requests
    of = f" of {count(picture.requests)}: those that lost most, and the first ones" if few else ""
    lead = (
        f"{shown}{of}, in order of arrival. A bar is a prefill chunk, in the colour of what became of its "
        "tokens; time is the run's."
    )
    marks = tag("p", "   ".join(f"{sign} {words}" for sign, words in _MARKS), class_="dim")
    label = f"Timeline of {shown}. Up and down arrow keys go from request to request."
    chart = tag("div", "", class_="chart", tabindex=0, role="application", aria_label=label)
    readout = tag("output", _EMPTY_LANE, class_="readout noprint", aria_live="polite")
    figure = tag("figure", [tag("div", [chart], class_="scroll"), readout], data_lanes=True)
    return section("requests", title, tag("p", lead, class_="dim"), marks, figure, all_requests(report))
