"""The rows of a spool: one type a kind, eight words each, read one by one and as columns."""

from __future__ import annotations

import numpy as np
import pytest

from kvtrace.trace import rows
from kvtrace.trace.format import Kind, pack_head


def test_every_kind_has_a_row_of_eight_words() -> None:
    assert set(rows.ROWS) == set(Kind) - {Kind.END}
    for row in rows.ROWS.values():
        assert len(row._fields) == 8 and row._fields[0] == "head"


@pytest.mark.parametrize("kind", sorted(rows.ROWS), ids=lambda kind: kind.name)
def test_what_a_row_says_is_read_back_one_by_one_and_as_columns(kind: Kind) -> None:
    made = rows.ROWS[kind](pack_head(kind), 1, 2, 3, 4, 5, 6, 7)
    assert rows.decode(tuple(made)) == made and type(rows.decode(list(made))) is rows.ROWS[kind]
    other = [pack_head(Kind.STEP if kind != Kind.STEP else Kind.OP), *[0] * 7]
    table = np.array([made, other, made], dtype=np.int64)
    columns = rows.of_kind(rows.ROWS[kind], table)
    for name, value in made._asdict().items():
        assert getattr(columns, name).tolist() == [value, value], name


def test_a_kind_of_another_version_is_no_row() -> None:
    with pytest.raises((KeyError, ValueError)):
        rows.decode([250, 0, 0, 0, 0, 0, 0, 0])
