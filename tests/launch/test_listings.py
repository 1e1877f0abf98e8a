"""Listings of data files that only grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtrace.launch.listing import Listings

SIZE = 100


def store(folder: Path, lines: list[str], records: int = 4) -> Listings:
    (folder / "data").write_bytes(bytes(records * SIZE))
    (folder / "list").write_text("".join(f"{line}\n" for line in lines))
    return Listings([folder / "data", folder / "list"])


FORMATS = {
    "json list": lambda name, at: json.dumps([name, at, SIZE]),
    "json object": lambda name, at: json.dumps({"offset": at, "size": SIZE, "key": name}),
    "begin and end": lambda name, at: f"{name}\t{at}\t{at + SIZE}",
    "other numbers beside": lambda name, at: f"v1, {name}, 7, {SIZE}, {at}",
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_name_that_comes_again_leaves_its_earlier_record_behind(form: str, tmp_path: Path) -> None:
    names = ["a", "b", "a", "c"]
    listings = store(tmp_path, [FORMATS[form](name, at * SIZE) for at, name in enumerate(names)])
    data = tmp_path / "data"
    assert [listings.leads_to(data, at * SIZE + 50) for at in range(4)] == [False, True, True, True]
    assert not listings.leads_to(data, 0)
    assert not listings.leads_to(data, SIZE - 1)


NO_LISTINGS = {
    "empty": [],
    "two lines": ["a 0 200", "a 200 200"],
    "another line": ["a 0 100", "b 100 100", "a 200 200", "closed"],
    "one place twice": ["a 0 100", "b 0 100", "a 200 100", "c 300 100"],
    "of little": ["a 0 10", "b 10 10", "a 20 10", "c 30 10"],
    "beyond the end": ["a 0 100", "b 100 100", "a 200 100", "c 900 100"],
    "no names": ["0 100", "100 100", "200 100", "300 100"],
    "the same words": ["at: 0, size: 100", "at: 100, size: 100", "at: 200, size: 200"],
    "numbers for names": [
        "key: 5, at: 0, size: 100",
        "key: 6, at: 100, size: 100",
        "key: 7, at: 200, size: 200",
    ],
    "most again": ["a 0 100", "a 100 100", "a 200 100", "b 300 100"],
}


@pytest.mark.parametrize("lines", NO_LISTINGS.values(), ids=NO_LISTINGS)
def test_of_what_is_no_listing_of_the_file_nothing_is_said(lines: list[str], tmp_path: Path) -> None:
    listings = store(tmp_path, lines)
    assert all(listings.leads_to(tmp_path / "data", at * SIZE) for at in range(4))


def test_a_listing_in_another_folder_is_no_listing_of_this_file(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    store(tmp_path / "there", ["a 0 100", "b 100 100", "a 200 100", "c 300 100"])
    (tmp_path / "here" / "data").write_bytes(bytes(4 * SIZE))
    listings = Listings([tmp_path / "here" / "data", tmp_path / "there" / "list"])
    assert listings.leads_to(tmp_path / "here" / "data", 0)


def test_bytes_that_are_no_text_and_files_that_are_gone_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\xff\xfe" * 200)
    listings = Listings([tmp_path / "data", tmp_path / "gone", tmp_path / "other"])
    (tmp_path / "other").write_bytes(b"a 0 100\n\xff 100 100\n")
    assert listings.leads_to(tmp_path / "data", 0)
    assert listings.leads_to(tmp_path / "gone", 0)


def test_names_that_mostly_come_again_lead_to_the_last_record_where_some_come_only_once(
    tmp_path: Path,
) -> None:
    """Prompts that differ in their first unit, in a store whose keys are of each unit alone."""
    names = ["a", "x", "y", "b", "x", "y", "c", "x", "y"]
    listings = store(tmp_path, [f"{name} {at * SIZE} {SIZE}" for at, name in enumerate(names)], len(names))

    found = [listings.leads_to(tmp_path / "data", at * SIZE) for at in range(len(names))]

    assert found == [True, False, False, True, False, False, True, True, True]


def test_words_that_each_record_has_are_no_names(tmp_path: Path) -> None:
    """A cut file may hold one of them once less than the others."""
    lines = [f"put layer{at % 2} {at * SIZE} {SIZE}" for at in range(41)]
    listings = store(tmp_path, lines, len(lines))

    assert all(listings.leads_to(tmp_path / "data", at * SIZE) for at in range(len(lines)))
