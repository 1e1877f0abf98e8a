"""The report's parts of the page, without the charts: they can be read without JavaScript, and printed."""

from __future__ import annotations

from kvtrace.causes.registry import CATALOGUE
from kvtrace.gate.shares import grade_of
from kvtrace.render.answers import uneven, where
from kvtrace.render.html.markup import (
    Content,
    Markup,
    bullets,
    definitions,
    of_page,
    section,
    tag,
    text,
    width,
)
from kvtrace.render.listing import requests_table
from kvtrace.render.report import (
    connectors,
    coverage,
    device,
    finding,
    graphs,
    headline,
    hooked,
    limits,
    loads,
    logged,
    saves,
    state_lines,
    timing,
)
from kvtrace.report.model import FindingRow, Report, Stage
from kvtrace.terms import FAULT, MEANS
from kvtrace.terms import Stage as StageNumber
from kvtrace.words import count, plural

MOST_REQUESTS = 60
_MEANS = {grade.label: words for grade, words in MEANS.items()}


def title(report: Report) -> str:
    """The connector and the model; the run's name where they are not known."""
    engines = report["run"]["engines"]
    connector = engines[0]["connector"] if engines else None
    name = (connector["class"] or connector["name"]) if connector else ""
    model = engines[0]["model"].rstrip("/").rpartition("/")[2] if engines else ""
    return " on ".join(filter(None, (name, model))) or report["run"]["name"] or "run"


def top(report: Report) -> Markup:
    """What ran, and the answer."""
    button = tag("button", "Dark", id="theme", type="button", class_="noprint")
    facts = [tag("p", " · ".join(line), class_="facts") for line in headline(report)]
    grade = grade_of(report["ledger"]["saves"])
    seen = f"Grade of evidence for what was saved: {grade} ({_MEANS.get(grade, '')})"
    return tag(
        "header",
        [
            tag("div", [tag("h1", f"kvtrace: {title(report)}"), button], class_="top"),
            *facts,
            tag("p", report["verdict"], class_="verdict", id="verdict"),
            tag("p", " ".join(filter(None, (where(report), uneven(report)))), class_="where"),
            *([tag("p", seen, class_="dim")] if grade else []),
        ],
    )


# ------------------------------------------------------------------------------ token flow


def flow(report: Report) -> Markup:
    """Prompt tokens by stage: in, out, why."""
    stages = report["stages"]
    if not stages:
        return section("flow", "Token flow", tag("p", "No prompt token reached the first stage."))
    most = max(1, *(stage["in"] for stage in stages))
    rows = [_stage(report, stage, most) for stage in stages]
    note = "Prompt tokens on their way into the connector's store. Striped: lost at that stage."
    return section(
        "flow", "Token flow by stage", tag("p", note, class_="dim"), tag("ol", rows, class_="flow")
    )


def _stage(report: Report, stage: Stage, most: int) -> Markup:
    lost = max(0, stage["in"] - stage["out"])
    why = (
        [one for one in report["findings"] if one["stage"] == stage["stage"] and one["tokens"]]
        if lost
        else []
    )
    name = stage["name"] or StageNumber(stage["stage"]).label
    numbers = [f"{count(stage['in'])} in, {count(stage['out'])} out"]
    numbers += [f", {count(lost)} lost"] if lost else []
    pipe = [width(stage["out"] / most), width(lost / most, "lost")]
    words: list[Content] = []
    for one in why:
        amount = f" {plural(one['tokens'], 'token')}"
        words.append([tag("a", [tag("code", one["id"])], href=f"#finding-{one['id']}"), amount])
    words += [stage["note"]] if stage["note"] else []
    joined: list[Content] = [part for word in words for part in (" · ", word)][1:]
    return tag(
        "li",
        [
            tag("span", f"{stage['stage']} {name}", class_="name"),
            tag("span", pipe, class_="pipe", aria_hidden="true"),
            tag("span", numbers, class_="n bad" if lost else "n"),
            tag("span", [text(part) for part in joined], class_="why dim") if joined else Markup(),
        ],
    )


# --------------------------------------------------------------------------------- ledgers


def ledgers(report: Report) -> Markup:
    parts = [*saves(report), *loads(report), *connectors(report)]
    return section("ledger", "Where the tokens went", of_page(parts), bullets(state_lines(report)))


# -------------------------------------------------------------------------------- findings


def findings(report: Report) -> Markup:
    requests = report["requests"]["total"]
    seen: set[str] = set()
    found = [_finding(one, requests, seen) for one in report["findings"]]
    return section("findings", "Findings", *(found or [tag("p", "No findings.")]), of_page(logged(report)))


def _finding(one: FindingRow, requests: int, seen: set[str]) -> Markup:
    anchor = None if one["id"] in seen else f"finding-{one['id']}"
    seen.add(one["id"])
    head, title, *rest = finding(one, requests, whole=True)
    body = tag(
        "details", [tag("summary", "Evidence and remedy"), of_page(rest)], open=one["severity"] == FAULT
    )
    return tag("article", [of_page([head, title]), body], class_=one["severity"], id=anchor)


def ruled_out(report: Report) -> Markup:
    parts: list[Content] = []
    for title, rows in (
        ("checked, and not the cause", [(one["id"], one["evidence"]) for one in report["ruled_out"]]),
        ("not observed: nothing can be said", [(one["id"], one["why"]) for one in report["not_observed"]]),
    ):
        if rows:
            head = tag("summary", f"{count(len(rows))} {title}")
            terms = definitions(([tag("code", name)], words) for name, words in rows)
            parts.append(tag("details", [head, terms]))
    return section("ruled-out", "Ruled out", *(parts or [tag("p", "Nothing was ruled out.")]))


# ------------------------------------------------------------------------ the lower parts


def all_requests(report: Report) -> Markup:
    rows = report["requests"]["rows"][:MOST_REQUESTS]
    title = (
        f"The requests as a table: {count(len(rows))} of {count(report['requests']['total'])}, worst first"
    )
    body = of_page([requests_table(rows, "Requests")])
    return tag("details", [tag("summary", title), body]) if rows else Markup()


def hook_times(report: Report) -> Markup:
    parts = of_page([*timing(report, whole=True), *device(report)])
    told = parts or tag("p", "No call of a hook was recorded.")
    return section("times", "Hook times, host and device", told)


def processes(report: Report) -> Markup:
    run, targets = hooked(report)
    found = report["instrumentation"]
    title = (
        f"{plural(len(found['targets']), 'target')} in vLLM: {count(found['found'])} hooked, "
        f"{count(found['missing'])} not in this vLLM, {count(found['failed'])} failed"
    )
    return section(
        "processes",
        "Processes and targets",
        of_page([run, coverage(report, whole=False), *graphs(report)]),
        tag("details", [tag("summary", title), of_page([targets])]),
        tag("h3", "Limits"),
        bullets(limits(report)),
    )


_WORDS = (
    ("token-layer", "One token in one KV-owning layer on one rank: the unit in which the ledgers count."),
    ("outcome", "What became of a token. Every token of a request has exactly one in each layer and rank."),
    ("stage", "One of the places that a token passes on its way into the store, from wiring to completion."),
    ("step", "One call of the scheduler's schedule() and its execution on the workers."),
    ("prefill chunk", "The prompt tokens of one request that one step computes."),
    ("finding", "A cause with its evidence. A fault needs a fix, a limit works as built, a note informs."),
    ("ruled out", "A cause that was checked and is not it."),
)


def glossary(report: Report) -> Markup:
    grades = [(f"grade: {grade}", words) for grade, words in _MEANS.items()]
    named = [one["id"] for one in report["findings"]]
    causes = [(one, CATALOGUE[one].meaning) for one in dict.fromkeys(named) if one in CATALOGUE]
    return section("glossary", "Glossary", definitions((*_WORDS, *grades, *causes)))
