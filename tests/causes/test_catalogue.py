"""The catalogue, the rules and the pages agree."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from kvtrace.causes import registry
from kvtrace.causes.catalogue import CATALOGUE, STAGES, stage_of
from kvtrace.render.pages import main, pages

DOCS = Path(__file__).resolve().parents[2] / "docs" / "causes"


def test_pages_are_up_to_date() -> None:
    made = pages()
    assert {path.name for path in DOCS.glob("*.md")} == set(made)
    for name, text in made.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, (
            f"{name}: run python -m kvtrace.render.pages"
        )


def test_pages_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "new")]) == 0
    assert len(list((tmp_path / "new").glob("*.md"))) == len(CATALOGUE) + 1
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_rules_and_catalogue_agree() -> None:
    with_rule = {inspect.getmodule(rule).ID for rule in registry.RULES}  # type: ignore[union-attr]
    claims = {ident for ident, _ in (*registry.WIRING, *registry.SCHEDULE, *registry.UNREAD)}
    assert claims <= with_rule
    implemented = {cause.id for cause in CATALOGUE.values() if cause.implemented}
    # These have a rule that only rules out, or only says that it can't be seen.
    assert with_rule - {"local-hit"} == implemented


def test_what_was_seen_live_has_a_scenario() -> None:
    folder = DOCS.parents[1] / "scenarios"
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.toml")]
    causes = {match[1] for text in texts if (match := re.search(r'^cause = "([a-z-]+)"', text, re.MULTILINE))}
    live = {cause.id for cause in CATALOGUE.values() if cause.live}
    # Found beside the first finding wherever single ranks lose their tokens.
    assert live - {"ranks-diverge"} == causes
    assert all(cause.implemented for cause in CATALOGUE.values() if cause.live)


def test_catalogue_is_well_formed() -> None:
    for cause in CATALOGUE.values():
        assert cause.severity in ("fault", "limit", "note")
        assert cause.ledger in ("saves", "loads", "note")
        assert cause.stage is None or 0 <= cause.stage < len(STAGES)
        assert cause.meaning.endswith(".") and cause.seen_as.endswith(".") and cause.remedy
    assert stage_of("hook-raised") == 4 and stage_of("unknown") == 1
