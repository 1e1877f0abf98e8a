"""What the first screen of ``kvtrace explain`` has to be, for every run."""

from __future__ import annotations

import re

from kvtrace.render.brief import ROWS, brief_text
from kvtrace.render.page import Screen
from kvtrace.render.terminal import height
from kvtrace.report.model import Report

SCREEN = Screen(80)
WHERE = "reports/20261120-181500-vllm"


def shown(report: Report, screen: Screen = SCREEN) -> str:
    return brief_text(report, screen, f"{WHERE}/report.json", WHERE)


GLOSSARY = re.compile(
    r"(?i:grade|token-layer|further way|not.observed|local-hit|with work|layer-step|proved|declared|ledger"
    r"|rule-out|outcome\b)|LIMIT"
)
"""Words of kvtrace's own, which need its glossary."""
FRACTION = re.compile(r"\d\.\d+ (?:prompt )?(?:tokens?|were|was)\b")
NAMES = re.compile(r"(?:FAULT|CHOICE|NOTE) [\w-]+|, ledgers of \d+ connectors inside|Next kvtrace .*")
"""Ids of findings, which ``kvtrace docs`` explains, and what -v shows."""


def judged(report: Report, screen: Screen = SCREEN) -> str:
    """The first screen, held to what it has to be for every run."""
    text = shown(report, screen)
    lines = text.splitlines()
    assert len(lines) <= ROWS and max(map(len, lines)) <= screen.width, text
    assert height(text, screen) == len(lines)
    words = " ".join(text.split())
    assert " ".join(report["verdict"].split()) in words, text
    said = NAMES.sub("", words)
    assert not GLOSSARY.search(said), (GLOSSARY.findall(said), text)
    assert not FRACTION.search(words), text
    place = re.search(
        r"Stored in \S|Written to|Nothing was stored|No token was seen|Where to (is|was) not", words
    )
    assert place, text
    bad = [one for one in report["findings"] if one["severity"] != "note"]
    if bad:  # a reason with what to do, or the cause that is named
        first = report["findings"][0]
        word = {"limit": "CHOICE"}.get(first["severity"], first["severity"].upper())
        assert f"{word} {first['id']}" in words, text
        assert not first["remedy"] or "Remedy " in words, text
    else:
        assert report["findings"] or "Nothing is wrong" in words
    assert lines[-1].startswith("Next  kvtrace ") and "ruled out" in f"{lines[-3]} {lines[-2]}"
    return text
