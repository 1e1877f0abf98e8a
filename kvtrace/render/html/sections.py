"""The report's parts of the page, without the charts: they can be read without JavaScript, and printed."""

from __future__ import annotations

from kvtrace.causes.registry import CATALOGUE
from kvtrace.gate.shares import grade_of
from kvtrace.render.answers import outcomes, uneven, where
from kvtrace.render.html.markup import (
    Content,
    Markup,
    bullets,
    definitions,
    section,
    table,
    table_of,
    tag,
    text,
)
from kvtrace.render.report import (
    device_table,
    event_words,
    finding_facts,
    headline,
    outcome_label,
    state_lines,
    timing_table,
)
from kvtrace.report.model import FindingRow, LedgerRow, Report, Stage
from kvtrace.terms import FAULT, KEPT, MEANS, NOT_OBSERVED, Grade, severity_word
from kvtrace.terms import Stage as StageNumber
from kvtrace.words import count, percent, plural, size

MOST_REQUESTS = 60
_ORDER = [grade.label for grade in Grade]
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
    """Prompt tokens by stage: in, out, why, grade."""
    stages = report["stages"]
    if not stages:
        return section("flow", "Token flow", tag("p", "No prompt token reached the first stage."))
    most = max(1, *(stage["in"] for stage in stages))
    rows = [_stage(report, stage, most, stage is stages[-1]) for stage in stages]
    note = "Prompt tokens on their way into the connector's store. Striped: lost at that stage."
    return section(
        "flow", "Token flow by stage", tag("p", note, class_="dim"), tag("ol", rows, class_="flow")
    )


def _stage(report: Report, stage: Stage, most: int, last: bool) -> Markup:
    lost = max(0, stage["in"] - stage["out"])
    why = (
        [one for one in report["findings"] if one["stage"] == stage["stage"] and one["tokens"]]
        if lost
        else []
    )
    grades = [grade for one in why if (grade := one.get("grade") or "") in _ORDER]
    grade = min(grades, key=_ORDER.index, default="") or (grade_of(report["ledger"]["saves"]) if last else "")
    name = stage["name"] or StageNumber(stage["stage"]).label
    numbers = [f"{count(stage['in'])} in, {count(stage['out'])} out"]
    numbers += [f", {count(lost)} lost"] if lost else []
    pipe = [_width(stage["out"] / most), _width(lost / most, "lost")]
    words: list[Content] = []
    for one in why:
        amount = f" {plural(one['tokens'], 'token')}"
        words.append([tag("a", [tag("code", one["id"])], href=f"#finding-{one['id']}"), amount])
    words += [stage["note"]] if stage["note"] else []
    words += [f"grade {grade}"] if grade else []
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


def _width(share: float, kind: str | None = None) -> Markup:
    """A bar; a share above nothing shows."""
    if share <= 0:
        return Markup()
    return tag("i", "", class_=kind, style=f"width:{max(0.5, min(1.0, share) * 100):.2f}%")


# --------------------------------------------------------------------------------- ledgers


def ledgers(report: Report) -> Markup:
    saves, loads = report["ledger"]["saves"], report["ledger"]["loads"]
    parts: list[Content] = [_ledger(saves, "Saves: every token, in each layer and rank")]
    if loads["total"]:
        parts.append(_ledger(loads, "Loads: every prompt token"))
    else:
        parts.append(tag("p", "Loads: no load was offered or asked for in this run.", class_="dim"))
    if lines := state_lines(report):
        parts.append(bullets(lines))
    return section("ledger", "Where the tokens went", *parts)


def _ledger(ledger: LedgerRow, caption: str) -> Markup:
    rows: list[list[Content]] = []
    for name, tokens, share, grade in outcomes(ledger):
        bar = tag("span", [_width(share, None if name in KEPT else "bad")], class_="bar", aria_hidden="true")
        rows.append(
            [outcome_label(name), count(tokens), percent(share), "" if name == NOT_OBSERVED else grade, bar]
        )
    rows.append(["all", count(ledger["total_tokens"]), percent(1.0) if ledger["total"] else "", "", ""])
    heads = (("outcome", False), ("tokens", True), ("share", True), ("grade", False), ("", False))
    note = f"{count(ledger['total'])} token-layers, totals match exactly. {ledger['trust_note']}"
    return text([table(heads, rows, caption), tag("p", note, class_="dim")])


# -------------------------------------------------------------------------------- findings


def findings(report: Report) -> Markup:
    if not report["findings"]:
        return section("findings", "Findings", tag("p", "No findings."))
    requests = report["requests"]["total"]
    seen: set[str] = set()
    return section("findings", "Findings", *[_finding(one, requests, seen) for one in report["findings"]])


def _finding(one: FindingRow, requests: int, seen: set[str]) -> Markup:
    severity = one["severity"]
    anchor = None if one["id"] in seen else f"finding-{one['id']}"
    seen.add(one["id"])
    facts = "".join(f" · {fact}" for fact in finding_facts(one, requests))
    badge = tag("span", severity_word(severity), class_=f"badge {severity}")
    evidence = [*one["evidence"], *(event_words(event) for event in one["events"])]
    cause = CATALOGUE.get(one["id"])
    rest: list[Content] = []
    for title, lines in (("Evidence", evidence), ("Remedy", one["remedy"])):
        rest += [tag("h4", title), bullets(lines)] if lines else []
    more: list[Content] = [tag("code", f"kvtrace docs {one['id']}")]
    more += [f" · {cause.meaning}"] if cause else []
    rest.append(tag("p", [text(part) for part in more], class_="dim"))
    head = tag("h3", [badge, text(" "), tag("code", one["id"]), text(facts)], id=anchor)
    body = tag("details", [tag("summary", "Evidence and remedy"), *(text(part) for part in rest)],
               open=severity == FAULT)  # fmt: skip
    return tag("article", [head, tag("p", one["title"]), body], class_=severity)


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


def requests_table(report: Report) -> Markup:
    part = report["requests"]
    rows = [
        [tag("code", row["id"]), count(row["prompt"]), count(row["saved"]), row.get("grade") or "",
         count(row["not_saved"]), count(row.get("not_observed", 0)), row["verdict"]]
        for row in part["rows"][:MOST_REQUESTS]
    ]  # fmt: skip
    heads = (
        ("request", False), ("prompt", True), ("saved", True), ("grade", False), ("not saved", True),
        ("not observed", True), ("verdict", False),
    )  # fmt: skip
    title = f"The requests as a table: {count(len(rows))} of {count(part['total'])}, worst first"
    return tag("details", [tag("summary", title), table(heads, rows, "Requests")]) if rows else Markup()


def timing(report: Report) -> Markup:
    if not report["timing"]:
        return tag("p", "No call of a hook was recorded.")
    return table_of(timing_table(report, len(report["timing"]), sums=True), "Hook times")


def device(report: Report) -> Markup:
    if "device" not in report:
        return tag("p", "No device times were taken: all times are the host's.", class_="dim")
    made = table_of(device_table(report["device"]), "The same calls on host and device")
    note = "Device time is from event to event: it includes the device's waits for the host."
    return text([made, tag("p", note, class_="dim")])


def processes(report: Report) -> Markup:
    run = report["run"]
    rows = [
        [one["name"], str(one["pid"]), one["role"], "yes" if one["agent"] else "no"]
        for one in run["processes"]
    ]
    heads = (("process", False), ("pid", True), ("role", False), ("traced", False))
    targets = [
        [tag("code", one["id"]), tag("code", f"{one['module']}:{one['attr']}"), one["status"], one["detail"]]
        for one in report["instrumentation"]["targets"]
    ]
    summary = report["instrumentation"]
    title = (
        f"{plural(len(targets), 'target')} in vLLM: {count(summary['found'])} hooked, "
        f"{count(summary['missing'])} not in this vLLM, {count(summary['failed'])} failed"
    )
    target_heads = (("target", False), ("where", False), ("status", False), ("why", False))
    tracer = report["limits"]["tracer"]
    limits: list[Content] = [
        *report["limits"]["notes"],
        *(f"{one['spool']}: {one['detail']}" for one in report["limits"]["damaged"]),
        f"tracing wrote {plural(tracer['records'], 'record')}, {size(tracer['spool_bytes'])}",
    ]
    return section(
        "processes",
        "Processes and targets",
        table(heads, rows, "Processes"),
        tag("details", [tag("summary", title), table(target_heads, targets, "Targets")]) if targets else "",
        tag("h3", "Limits"),
        bullets(limits),
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
