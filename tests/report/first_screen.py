"""What the first screen of ``kvtrace explain`` has to be, for every run."""

from __future__ import annotations

import re

from kvtrace.labels import label
from kvtrace.render.brief import ROWS, brief_text
from kvtrace.render.page import Screen
from kvtrace.render.terminal import height
from kvtrace.report.model import FindingRow, Report
from kvtrace.words import count, percent

SCREEN = Screen(80)
WHERE = "reports/20261120-181500-vllm"


def shown(report: Report, screen: Screen = SCREEN) -> str:
    return brief_text(report, screen, f"{WHERE}/report.json", WHERE)


GLOSSARY = re.compile(
    r"(?i:grade|token-layer|further way|not.observed|local-hit|with work|layer-step|proved|declared|ledger"
    r"|rule-out|outcome\b|store entr|\bspool)|LIMIT"
)
"""Words of kvtrace's own, which need its glossary."""
FRACTION = re.compile(r"\d\.\d+ (?:of |prompt |generated )*(?:tokens?|were|was)\b")
NAMES = re.compile(r"(?:FAULT|CHOICE|NOTE) [\w-]+|, ledgers of \d+ connectors inside|Next kvtrace .*")
"""Ids of findings, which ``kvtrace docs`` explains, and what -v shows."""
COMMANDS = re.compile(r"Next  kvtrace (?:docs [a-z-]+|why \S+ --request \S+|explain \S+ -v|verify \S.*)")


def judged(report: Report, screen: Screen = SCREEN) -> str:
    """The first screen, held to what it has to be for every run."""
    text = shown(report, screen)
    lines = text.splitlines()
    assert len(lines) <= ROWS and max(map(len, lines)) <= screen.width, text
    assert height(text, screen) == len(lines)
    words = " ".join(text.split())
    assert lines[0].startswith("vLLM "), text
    assert " ".join(report["verdict"].split()) in words, text
    said = NAMES.sub("", words)
    assert not GLOSSARY.search(said), (GLOSSARY.findall(said), text)
    assert not FRACTION.search(words), text
    _place(report, words)
    _amounts(report, words)
    _reason(report, words)
    assert COMMANDS.fullmatch(lines[-1]), text
    assert "ruled out" in f"{lines[-3]} {lines[-2]}"
    return text


def _place(report: Report, words: str) -> None:
    """Where it was stored: every place that was seen, up to three; else that nothing was, or was not seen."""
    place = re.search(
        r"Stored in [^\s(]|Written to|Opened|Nothing was stored|No token was|Where to (is|was) not",
        words,
    )
    assert place, words
    for one in [one for one in report.get("places", []) if one["kind"] == "directory"][:3]:
        assert one["name"] in words.replace(" ", "") or one["name"] in words, words


def _amounts(report: Report, words: str) -> None:
    """The verdict, and the table under it, count the same tokens."""
    prompts = report["ledger"]["saves"].get("prompts", {})
    whole = sum(sum(of.values()) for of in prompts.values())
    if not whole:
        return
    tokens = f"{count(whole)} prompt token{'s' if whole > 1 else ''} computed here"
    assert tokens in report["verdict"] or "was seen" in report["verdict"], words
    assert f"Of {tokens} tokens" in words, words
    for name in [name for name in prompts if name.startswith("not-saved:")][:1]:
        lost = sum(prompts[name].values())
        row = f"not stored: {label(name)} {count(lost)} {percent(lost / whole)}"
        assert row in words or "more (-v)" in words, words


def _reason(report: Report, words: str) -> None:
    """The first finding that asks for something: what, how much, what was seen, and what to do."""
    bad: list[FindingRow] = [one for one in report["findings"] if one["severity"] != "note"]
    if not bad:
        assert report["findings"] or "Nothing is wrong" in words
        return
    first = report["findings"][0]
    word = {"limit": "CHOICE"}.get(first["severity"], first["severity"].upper())
    assert f"{word} {first['id']}" in words, words
    headline = first.get("headline", "")
    title = " ".join(first["title"].split(". ")[0].split())
    said = headline and headline.lower() in report["verdict"].lower()
    assert said or (title and title in words), words
    assert not first["remedy"] or "Remedy " in words, words
