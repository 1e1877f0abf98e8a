"""Real connectors: how their truth is read, and what the page says of a run. No engine, no registry."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import real_connectors as real

CASES = {case.name: case for case in real.cases()}


def vua_file(store: Path, tokens: list[int], rows: int, layer: int) -> None:
    """A record as VUA writes it: [K or V, rows, width] under the hash of all tokens before its end."""
    name = hashlib.sha1(b"".join(token.to_bytes(8, "little") for token in tokens)).hexdigest()
    header = json.dumps(
        {"x": {"dtype": "F32", "shape": [2, rows, 4], "data_offsets": [0, 32 * rows]}}
    ).encode()
    folder = store / f"0%{name}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"model.layers.{layer}.self_attn.attn.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32 * rows))


def test_rows_lie_before_the_end_of_their_prefix(tmp_path: Path) -> None:
    tokens = list(range(100, 200))
    for layer in range(real.LAYERS):
        vua_file(tmp_path / "store", tokens[:64], 64, layer)
        vua_file(tmp_path / "store", tokens[:96], 32, layer)
        vua_file(tmp_path / "store", [], 0, layer)
    case = CASES["vua-one-by-one"]
    truth = real.vua_truth(case, tmp_path, [tokens, [5] * 40])
    assert truth.tokens == 96
    assert "12 files (4 of them empty)" in truth.how
    next((tmp_path / "store").rglob("*layers.2*")).unlink()
    assert real.vua_truth(case, tmp_path, [tokens]).tokens in (32, 64, 96)
    assert real.vua_truth(replace(case, engine={"tensor_parallel_size": 2}), tmp_path, [tokens]).tokens == 0


def test_nothing_rests_with_a_server_that_is_down(tmp_path: Path) -> None:
    assert real.kvblockd_truth(CASES["kvblockd-down"], tmp_path, []).tokens == 0
    (tmp_path / "blobs.json").write_text(json.dumps({"a": 9, "b": 9}), encoding="utf-8")
    assert real.kvblockd_truth(CASES["kvblockd-up"], tmp_path, []).tokens == 2 * real.BLOCK


@pytest.mark.parametrize(
    ("grades", "number"),
    [
        ({"read": 64.0}, "right"),
        ({"proved": 32.0, "written": 32.0}, "right"),
        ({"read": 65.0}, "read, and not at rest"),
        ({"proved": 60.0, "read": 10.0}, "read, and not at rest"),
        ({"written": 65.0}, "too many"),
        ({"read": 32.0, "declared": 32.0}, "fewer"),
        ({}, "fewer"),
    ],
)
def test_numbers_of_grade_read_are_held_against_the_store(grades: dict[str, float], number: str) -> None:
    one = real.Result(CASES["vua-exact"], truth=real.Truth(64, "counted"), grades=grades)
    assert one.number == number
    assert one.right is (number not in ("too many", "fewer"))


def test_the_first_finding_decides() -> None:
    truth = real.Truth(0, "counted")
    limit, healthy, down = CASES["vua-one-by-one"], CASES["vua-exact"], CASES["kvblockd-down"]
    assert real.Result(limit, truth=truth, first="below-save-granularity").right
    assert not real.Result(limit, truth=truth, first="below-save-granularity", faults=1).right
    assert real.Result(healthy, truth=truth, first="config-key-unused").right
    assert not real.Result(healthy, truth=truth, first="save-lost", faults=1).right
    assert real.Result(down, truth=truth, first="store-failed", faults=2).right
    assert not real.Result(down, truth=truth).right


def test_the_page_says_what_was_not_run_and_what_broke() -> None:
    broken = real.Result(CASES["semblend-exact"], problem="ImportError: no such module")
    good = real.Result(CASES["vua-exact"], truth=real.Truth(1536, "rows"), grades={"read": 1536.0})
    page = real.page([broken, good], [CASES["vua-tp2"]])
    assert "**1 of 2 runs are right.**" in page
    assert "did not run: ImportError" in page
    assert "1,536: rows | 1,536 read (right)" in page
    assert "VUA, tensor parallel size 2: no source was given" in page
    assert "NIXL" in page
