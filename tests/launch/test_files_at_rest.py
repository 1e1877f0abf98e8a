"""What stands at the files of a run once it is over."""

from __future__ import annotations

import hashlib
import random
import sqlite3
from pathlib import Path

import pytest

from kvtrace.launch import rest
from kvtrace.ledger.rest_file import GONE, LEFT_BEHIND, STILL

SALT = b"s" * 16


def piece(path: Path, layer: int, data: bytes, at: int = 0, call: int = 1) -> rest._Piece:
    digest = hashlib.blake2b(data, key=SALT, digest_size=8).digest()
    return rest._Piece(str(path), at, len(data), call, layer, int.from_bytes(digest, "little") & rest._MASK)


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


@pytest.mark.parametrize(("second", "then"), [(b"layer 2.", STILL), (b"another.", GONE)])
def test_a_record_of_several_layers_stands_elsewhere_if_all_of_its_layers_do(
    tmp_path: Path, second: bytes, then: str
) -> None:
    """A first layer's KV is the same in other prompts that have the same tokens there."""
    old, new = tmp_path / "old", tmp_path / "new"
    new.write_bytes(b"layer 1." + second)
    found = [
        piece(old, 1, b"layer 1."),
        piece(old, 2, b"layer 2.", 8),
        piece(new, 1, b"layer 1.", call=2),
        piece(new, 2, second, 8, call=2),
    ]
    assert rest._still(found, SALT, ()) == then * 2 + STILL * 2


def test_what_a_listing_leads_to_no_more_is_left_behind(tmp_path: Path) -> None:
    """The bytes stand in the file still; by its name other ones may be found."""
    data, listing = tmp_path / "data", tmp_path / "index"
    data.write_bytes(b"some KV.other KVnew KV!!")
    listing.write_text("a 0 8\nb 8 8\na 16 8\n")
    old, other = piece(data, 1, b"some KV."), piece(data, 1, b"other KV", 8, 2)
    found = [old, other, piece(data, 1, b"new KV!!", 16, 3)]
    assert rest._still(found, SALT, (), [str(data), str(listing)]) == LEFT_BEHIND + STILL * 2
    data.write_bytes(b"some KV.other KVsome KV.")
    again = [old, other, piece(data, 1, b"some KV.", 16, 3)]
    assert rest._still(again, SALT, (), [str(data), str(listing)]) == STILL * 3


@pytest.mark.parametrize(("again", "then"), [(True, STILL), (False, GONE)])
def test_a_value_that_is_written_again_stands_on_other_pages_of_its_database(
    tmp_path: Path, again: bool, then: str
) -> None:
    """The same KV under the same key: its old pages are free, and go to the next value."""
    path = tmp_path / "kv.sqlite"
    kv = [random.Random(seed).randbytes(20_000) for seed in range(4)]
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE kv (name TEXT PRIMARY KEY, value BLOB)")
    for seed, value in enumerate(kv[:2]):
        with sqlite3.connect(path) as database:
            database.execute("INSERT INTO kv VALUES (?, ?)", (str(seed), value))
    first = [
        piece(path, 1, kv[0][at : at + 32], path.read_bytes().index(kv[0][at : at + 32]))
        for at in (9000, 18000)
    ]
    stays = piece(path, 2, kv[1][9000:9032], path.read_bytes().index(kv[1][9000:9032]), call=2)
    with sqlite3.connect(path) as database:
        database.execute("INSERT OR REPLACE INTO kv VALUES ('0', ?)", (kv[0] if again else kv[2],))
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO kv VALUES ('3', ?)", (kv[3],))
    assert rest._still([*first, stays], SALT, {str(path)}) == then * 2 + STILL
