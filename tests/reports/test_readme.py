"""The README and the sample report show what `kvtrace explain` really prints of the demo's report."""

from __future__ import annotations

import readme


def test_the_readme_shows_the_beginning_of_the_demos_real_output() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert text == readme.rewritten(text), "run: python scripts/readme.py"


def test_the_sample_report_is_the_whole_of_it() -> None:
    assert readme.SAMPLE.read_text(encoding="utf-8") == readme.sample(), "run: python scripts/readme.py"


def test_the_readme_has_a_short_report_with_its_first_finding() -> None:
    shown = readme.beginning(readme.explained())
    assert len(shown.splitlines()) <= 26  # a glance, not a page
    assert all(part in shown for part in ("vLLM 0.32.0", "FAULT  first-chunk-only", "Evidence", "Remedy"))
    assert "request cmpl" not in shown


def test_examples_are_left_out_with_their_second_lines() -> None:
    finding = (
        "FAULT  x · 2 tokens\n"
        "  What is wrong.\n"
        "  Evidence   2 of 3\n"
        "             request a, step 1: long\n"
        "             and longer\n"
        "             request b, step 2: short\n"
        "  Remedy     do it"
    )
    assert readme.without_examples(finding).splitlines()[2:] == ["  Evidence   2 of 3", "  Remedy     do it"]
