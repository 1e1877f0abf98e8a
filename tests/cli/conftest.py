from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample import sample

from kvtrace.report.digest import seal


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A report without its run."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(seal(sample())))
    return path
