"""One row of the matrix on a real engine: its four runs, and the row is right."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest
from matrix_rows import measure, tables


@pytest.mark.engine
def test_the_plain_row_is_right(tmp_path: Path) -> None:
    ((_, row),) = tables.wanted("topologies", ["in-process"])
    assert list(measure.run_all([row], tmp_path, print)) == [row]
    kept = matrix.judge(row, tmp_path)
    assert not kept["cannot"], kept["cannot"]
    assert not kept["wrong"], kept["wrong"]
