"""The documents name what is there (commands, options, files, causes, report fields), in plain words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvtrace.causes.registry import CATALOGUE
from kvtrace.cli.commands import app
from kvtrace.trace import hooks
from kvtrace.versions import NEWEST

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "scenarios" / "README.md",
        *(ROOT / "reports").glob("*.md"),
        *(ROOT / "kvtrace").rglob("*.md"),
    )
)
SCHEMA = json.loads((ROOT / "kvtrace/report/schema/kvtrace.report.2.json").read_text(encoding="utf-8"))
OF_VLLM = {"--block-size", "--enforce-eager", "--kv-transfer-config", "--max-num-batched-tokens"}
OF_OTHERS = {"--kvtrace"}  # pytest's, by kvtrace's plugin


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_of(text: str) -> Iterator[str]:
    """Inline code, and the lines of indented and fenced blocks."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (line for block in fenced for line in block.splitlines())
    yield from re.findall(r"^(?: {4}|\t)(.*)$", text, re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", text)


def options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def verbs() -> dict[str, Any]:
    """Name -> click command, those of ``kvtrace scenario`` by both their words."""
    top: Any = typer.main.get_command(app)
    found = dict(top.commands)
    for name, command in top.commands.items():
        found |= {f"{name} {sub}": inner for sub, inner in getattr(command, "commands", {}).items()}
    return found


VERBS = verbs()


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(verb, the words after it up to ``--``) of each kvtrace command that is shown."""
    names = "|".join(sorted(VERBS, key=len, reverse=True))
    for code in code_of(text):
        for match in re.finditer(rf"\bkvtrace ({names})\b(?![-/.])([^`#]*)", code):
            yield match[1], re.split(r"\s\[?--\]?\s|`", match[2] + " ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_options_that_a_page_shows_exist(page: Path) -> None:
    for verb, words in commands(text_of(page)):
        shown = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", words))
        assert shown <= options_of(VERBS[verb]) | {"--help"}, (verb, words)


def script_options() -> set[str]:
    texts = [text_of(path) for path in (*ROOT.glob("scripts/*.py"), *ROOT.glob("scenarios/*.py"))]
    return {name for text in texts for name in re.findall(r'"(--[a-z][a-z-]+)"', text)}


def test_options_named_by_themselves_exist() -> None:
    known = {name for verb in VERBS.values() for name in options_of(verb)}
    known |= script_options() | OF_VLLM | OF_OTHERS | {"--help"}
    for page in PAGES:
        for code in re.findall(r"`(--[a-z][a-z-]+)[^`\n]*`", text_of(page)):
            assert code in known, f"{page.relative_to(ROOT)}: {code}"


def test_every_verb_stands_in_the_readme() -> None:
    text = text_of(ROOT / "README.md")
    for name in VERBS:
        assert f"`kvtrace {name}" in text, name


READERS = {"ci.md": ("tests/", "kvtrace/scripts"), "gate.md": ("tests/",)}
"""What stands in the reader's own project."""


def test_files_that_a_page_names_are_there() -> None:
    tops = "kvtrace|docs|scripts|scenarios|reports|tests"
    for page in PAGES:
        made = re.findall(r"New file `([^`]+)`", text_of(page))
        for code in code_of(text_of(page)):
            for name in re.findall(rf"(?<![\w/.-])((?:{tops})/[\w./-]*[\w/])", code):
                if (
                    name.startswith(READERS.get(page.name, ()))
                    or name in made
                    or "VERSION" in name
                    or "<" in code
                ):
                    continue
                assert (ROOT / name).exists(), f"{page.relative_to(ROOT)}: {name}"


def field(path: str) -> bool:
    """Whether ``findings[].stage`` is a field of the report's schema."""
    node: Any = SCHEMA
    for part in re.split(r"\[\]\.|\.", path):
        while "$ref" in node:
            node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
        node = node.get("items", node)
        while "$ref" in node:
            node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
        if part not in node.get("properties", {}):
            return False
        node = node["properties"][part]
    return True


def glossary() -> dict[str, str]:
    """Word -> where it shows, of the table in concepts.md."""
    part = text_of(ROOT / "docs" / "concepts.md").partition("## Glossary")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\*\*.*?) \| .* \| (.*?) \|$", part, re.MULTILINE)
    return {word: where for names, where in rows for word in re.findall(r"\*\*(.+?)\*\*", names)}


def test_the_glossary_points_at_what_is_there() -> None:
    assert field("ledger.saves.accounts") and not field("ledger.saves.nonsense") and not field("road")
    words = glossary()
    assert {"stage", "outcome", "ledger", "gate", "watched call", "token-layer", "dispatch"} <= set(words)
    for word, where in words.items():
        for code in re.findall(r"`([\w.\[\]/-]+)`", where):
            if code in CATALOGUE or code == "not-observed":
                continue
            assert (ROOT / code).exists() if "/" in code else field(code), f"{word}: {code}"


def test_causes_in_the_pages_exist() -> None:
    """What looks like a cause's id after ``not-saved:`` and the like, and in the README's words."""
    for page in PAGES:
        for ident in re.findall(r"(?:not-saved|not-loaded|missed|clamped):([a-z-]+)", text_of(page)):
            assert ident in CATALOGUE, f"{page.relative_to(ROOT)}: {ident}"


PLAIN = {
    r"\bbooks?\b|\bbooked\b": "a ledger assigns each token one outcome",
    r"\bto the unit\b": "totals match exactly",
    r"\broads?\b(?!`)": "save pipeline; dispatch",
    r"\blanes?\b(?!`)": "(layer, rank) pairs; connector index",
    r"\bseven gates\b": "stages",
    r"\bto mend\b": "needs a fix",
    r"\bof a make\b|\bother people's making\b": "connectors kvtrace was not developed against",
    r"\bat a glance\b": "fast path",
    r"\bof its own would\b|\bunder a key of its own\b": "under a unique key",
    r"\btells? of\b|\b(is|are) told\b": "reports",
    r"\bdark\b": "not observed",
}
"""Idioms that one had to read twice -> what stands there instead."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_plain_words(page: Path) -> None:
    text = re.sub(r"<!-- demo -->.*?<!-- /demo -->", "", text_of(page), flags=re.DOTALL)  # printed
    for pattern, instead in PLAIN.items():
        found = re.search(pattern, text, re.IGNORECASE)
        assert not found, f"{page.relative_to(ROOT)}: {found and found[0]!r}: say: {instead}"


def test_hooks_that_the_readme_names_are_in_the_table() -> None:
    part = text_of(ROOT / "README.md").partition("the connector's hooks (")[2].partition(")")[0]
    named = re.findall(r"`(\w+)`", part)
    assert named and set(named) <= set(hooks.NAMES)


def test_the_readme_names_the_versions_of_the_table_of_targets() -> None:
    assert f"covers 0.11.1 to {NEWEST} by their sources" in text_of(ROOT / "README.md")


def words_of(*pages: Path) -> int:
    return sum(len(text_of(page).split()) for page in pages)


def test_the_readme_counts_the_real_runs_as_their_page_does() -> None:
    page, readme = (text_of(ROOT / path) for path in ("reports/real-connectors.md", "README.md"))
    told = re.search(r"\*\*(\d+) of (\d+) runs are right", page)
    said = re.search(r"\[(\d+) runs of real\s+connectors\]\(reports/real-connectors.md\): all right", readme)
    assert told and said and told[1] == told[2] == said[1]


def test_the_documents_can_be_read_by_a_person() -> None:
    assert words_of(ROOT / "README.md") < 700
    assert words_of(ROOT / "docs" / "architecture.md") < 900
    assert words_of(*(ROOT / "docs").glob("*.md")) < 9000, "cut as much elsewhere in docs/ as you add"
    assert words_of(ROOT / "CHANGELOG.md") < 800
