"""One row of the matrix on a real engine: its four runs, and the row is right."""

from __future__ import annotations

from collections.abc import Mapping

import matrix
import pytest
from matrix_rows import measure, tables
from matrix_rows.row import Row
from side_by_side import Place, Ran, Script

((_, ROW),) = tables.wanted("topologies", ["in-process"])


def plain_row(place: Place) -> list[Row]:
    return list(measure.run_all([ROW], place.folder, print))


SCRIPTS = (plain_row,)


@pytest.mark.engine
def test_the_plain_row_is_right(ran: Mapping[Script, Ran]) -> None:
    assert ran[plain_row].done == [ROW]
    kept = matrix.judge(ROW, ran[plain_row].place.folder)
    assert not kept["cannot"], kept["cannot"]
    assert not kept["wrong"], kept["wrong"]
