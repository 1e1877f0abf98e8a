"""What stands at the files of a run once it is over."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvtrace.launch import rest
from kvtrace.ledger.rest_file import GONE, STILL

SALT = b"s" * 16


def piece(path: Path, layer: int, data: bytes) -> tuple[str, int, int, int, int]:
    digest = hashlib.blake2b(data, key=SALT, digest_size=8).digest()
    return str(path), 0, len(data), layer, int.from_bytes(digest, "little") & rest._MASK


@pytest.mark.parametrize(("layer", "then"), [(1, STILL), (2, GONE)])
def test_the_same_bytes_in_another_place_stand_for_what_was_there_in_one_layer(
    tmp_path: Path, layer: int, then: str
) -> None:
    """Those of layer 1 in layer 2's file are what a load or a save put there that mixes layers up."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"other KV")
    second.write_bytes(b"some KV.")
    found = [piece(first, 1, b"some KV."), piece(second, layer, b"some KV.")]
    assert rest._still(found, SALT, ()) == then + STILL
