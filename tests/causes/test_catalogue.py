"""The catalogue, the rules and the pages agree."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from kvtrace.causes import outcomes
from kvtrace.causes.claims import Turn
from kvtrace.causes.registry import CATALOGUE, CLAIMS, ORDER, RULES
from kvtrace.labels import LABELS
from kvtrace.ledger.ends import LoadEnd, SaveEnd
from kvtrace.render.cause import cause_page
from kvtrace.render.markdown import markdown
from kvtrace.render.markdown import text as markdown_text
from kvtrace.render.page import Screen
from kvtrace.render.terminal import terminal
from kvtrace.terms import SEVERITIES, Stage

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "causes"


def test_pages_are_up_to_date() -> None:
    """Those of the causes with their list, and the tables of the spool, of an export and of native copies."""
    files = runpy.run_path(str(ROOT / "scripts" / "pages.py"))["files"]()
    assert set(DOCS.glob("*.md")) == {path for path in files if path.parent == DOCS}, (
        "run python scripts/pages.py"
    )
    assert len(files) == len(CATALOGUE) + 4
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python scripts/pages.py"


def test_a_page_says_the_same_in_a_terminal_and_in_docs() -> None:
    for cause in CATALOGUE.values():
        printed = terminal(cause_page(cause), Screen(width=2000))
        written = markdown(cause_page(cause))
        assert [line.strip("# ") for line in written.splitlines() if line.startswith("#")] == [
            cause.id,
            "What to do",
            "What it means",
            "How it shows",
        ]
        for text in (cause.id, cause.meaning, cause.seen_as, cause.remedy, cause.versions):
            assert text in printed and markdown_text(text) in written
        assert ("not yet seen live: tested" in printed) == (not cause.live)
        assert ("not yet seen live: tested" in written) == (not cause.live)


def test_the_list_names_every_rule_file_once() -> None:
    files = {path.stem for path in (ROOT / "kvtrace" / "causes" / "rules").glob("*.py")} - {"__init__"}
    assert sorted(ORDER) == sorted(files), "each file of kvtrace/causes/rules stands in registry.ORDER"
    assert list(CATALOGUE) == [name.replace("_", "-") for name in ORDER]
    assert len(RULES) == len(CATALOGUE)


def test_the_list_is_in_the_order_of_the_stages() -> None:
    stages = [cause.stage for cause in CATALOGUE.values() if cause.stage is not None]
    assert stages == sorted(stages)
    assert {cause.stage for cause in CATALOGUE.values()} == {*Stage, None}


def test_claims_are_asked_in_this_order() -> None:
    # Which of two causes gets a position that both explain: a change here is a change of results.
    assert {turn: [cause.id for cause, _ in claims] for turn, claims in CLAIMS.items()} == {
        Turn.ENGINE: [
            "no-connector-configured",
            "connector-failed-to-start",
            "connector-not-created",
            "role-does-not-save",
            "connector-disabled-itself",
        ],
        Turn.UNREAD: ["below-save-granularity", "already-stored", "decode-not-offered"],
        Turn.READ: ["hook-raised", "exception-swallowed"],
        Turn.POSITION: [
            "false-already-stored",
            "below-save-granularity",
            "already-stored",
            "decode-not-offered",
            "later-parts-not-offered",
        ],
        Turn.STEP: ["hook-raised", "exception-swallowed"],
        Turn.REQUEST: ["preempted-before-save", "aborted-before-save", "first-chunk-only"],
        Turn.WORKER: ["metadata-not-bound", "exception-swallowed", "stored-nothing"],
        Turn.LAST: ["metadata-has-no-store"],
    }


def test_what_a_cause_of_tokens_is_called_in_a_few_words() -> None:
    assert {cause.id for cause in CATALOGUE.values() if cause.ledger} <= LABELS.keys()


def test_each_end_of_a_save_has_one_cause() -> None:
    # SaveEnd.NOT_DECLARED is what the claims are about.
    kept = {SaveEnd.SAVED, SaveEnd.PENDING, SaveEnd.NOT_OBSERVED, SaveEnd.NOT_DECLARED}
    ends = [end for cause in CATALOGUE.values() for end in cause.save_ends]
    assert sorted(ends) == sorted(set(SaveEnd) - kept)
    assert all(cause.stage is not None for cause in CATALOGUE.values() if cause.save_ends)


def test_each_end_of_a_load_has_one_cause() -> None:
    kept = {LoadEnd.LOADED, LoadEnd.LOCAL_HIT, LoadEnd.PENDING, LoadEnd.NOT_OBSERVED}
    ends = [end for cause in CATALOGUE.values() for end in cause.load_ends]
    assert sorted(ends) == sorted(set(LoadEnd) - kept)
    assert all(cause.ledger == "loads" for cause in CATALOGUE.values() if cause.load_ends)


def test_what_was_seen_live_has_a_scenario() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "scenarios").glob("*.toml")]
    causes = {match[1] for text in texts if (match := re.search(r'^cause = "([a-z-]+)"', text, re.MULTILINE))}
    live = {cause.id for cause in CATALOGUE.values() if cause.live}
    # ranks-diverge is found beside the first finding wherever single ranks lose their tokens; local-hit is
    # never found, and ruled out in healthy-prefix-cache.
    assert live - {"ranks-diverge", "local-hit"} == causes


def test_catalogue_is_well_formed() -> None:
    for cause in CATALOGUE.values():
        assert cause.severity in SEVERITIES
        assert cause.ledger in ("saves", "loads", None)
        for text in (cause.meaning, cause.seen_as, cause.remedy):
            assert text.endswith((".", "?")) and "  " not in text and text == text.strip(), text
        if cause.ledger == "saves":
            assert cause.stage is not None


def test_each_end_of_a_load_has_a_name_of_its_own() -> None:
    assert len({outcomes.outcome_of_load(end) for end in LoadEnd}) == len(LoadEnd)
