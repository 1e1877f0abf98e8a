"""The README shows what `kvtrace explain` really prints of the demo's report."""

from __future__ import annotations

from pathlib import Path

import readme


def test_the_readme_shows_the_demos_real_output() -> None:
    text = Path(readme.README).read_text(encoding="utf-8")
    assert text == readme.rewritten(text), "run: python scripts/readme.py"
