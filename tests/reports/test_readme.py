"""The README and the sample report show what `kvtrace explain` really prints of the demo's report."""

from __future__ import annotations

import readme


def test_the_readme_shows_the_demos_real_output() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert text == readme.rewritten(text), "run: python scripts/readme.py"


def test_the_sample_report_is_the_whole_of_it() -> None:
    assert readme.SAMPLE.read_text(encoding="utf-8") == readme.sample(), "run: python scripts/readme.py"


def test_the_readme_has_the_short_answer_on_one_screen() -> None:
    shown = readme.short()
    assert len(shown.splitlines()) <= 23 and max(map(len, shown.splitlines())) <= 80
    parts = ("vLLM 0.32.0", "CPU_ATTN", "FAULT  kv-stale", "later chunks of prompts", "Remedy")
    assert all(part in shown for part in parts)
