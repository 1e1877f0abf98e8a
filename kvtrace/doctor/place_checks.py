"""The checks of what lies outside of vLLM: the store's places, and the right to look into what hangs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvtrace.doctor.answer import NOT_KNOWN, OK, PROBLEM, WARNING, Line
from kvtrace.doctor.gather import DoctorFacts
from kvtrace.doctor.places import PlaceSeen
from kvtrace.launch.spy import FORBIDDEN, MISSING
from kvtrace.words import size

_STORES = {"ExampleConnector": "shared_storage_path", "SharedStorageConnector": "shared_storage_path"}
"""Connectors of vLLM -> the key of the directory that they store in: of others a path may be anything."""
_LIKE_A_STORE = re.compile(r"path|dir|root|folder|stor|disk|cache|location|mount|where|place", re.IGNORECASE)
_LITTLE = 1 << 30


def store(found: DoctorFacts) -> Iterator[Line]:
    roles = {one.name or one.configured: one.role for one in found.classes}
    lines = [line for name, seen in found.places for line in _place(name, seen, roles.get(name))]
    if found.classes and not lines:
        text = "its configuration names no path and no host"
        if not found.command.words and not any(one.extra for one in found.classes):
            text = "where it stores shows with the command"
        lines = [Line("store", NOT_KNOWN, text)]
    yield from lines


def stuck(found: DoctorFacts) -> Iterator[Line]:
    if found.spy is None:
        yield Line("stuck hooks", NOT_KNOWN, "whether py-spy may look into a process that hangs")
    elif found.spy == "":
        yield Line("stuck hooks", OK, "py-spy may look into a process that hangs")
    elif found.spy in (MISSING, FORBIDDEN):
        what, _, remedy = found.spy.partition(": ")
        yield Line("stuck hooks", WARNING, f"where a hook hangs will not be seen: {what}", remedy)
    else:
        yield Line(
            "stuck hooks", NOT_KNOWN, f"whether py-spy may look into a process that hangs: {found.spy}"
        )


def _place(name: str, seen: PlaceSeen, role: str | None) -> Iterator[Line]:
    place = seen.place
    what = f"{place.key}: {place.shown}"
    if place.host:
        yield _host(what, seen)
        return
    sure = _STORES.get(name) == place.key
    if not (sure or _LIKE_A_STORE.search(place.key)):
        return
    reads_only = role == "kv_consumer"
    if seen.state == "hung":
        yield Line(
            "store", WARNING, f"{what} gave no answer on this host", "see whether its file system is there"
        )
    elif seen.state == "file":
        level = PROBLEM if sure else OK
        yield Line("store", level, f"{what} is a file", "name a directory" if sure else "")
    elif seen.state == "blocked":
        level = PROBLEM if sure else WARNING
        yield Line(
            "store", level, f"{what} cannot be made: {seen.detail} is no directory", "name another path"
        )
    elif seen.state == "refused":
        if reads_only:
            yield Line("store", OK, f"{what}: this user may only read there; {role} is to load")
        else:
            level = PROBLEM if sure else WARNING
            where = seen.detail or "it"
            yield Line("store", level, f"{what}: this user may not write to {where}", "change its rights")
    else:
        yield _free(what, seen)


def _free(what: str, seen: PlaceSeen) -> Line:
    there = "is writable" if seen.state == "directory" else "is not there yet and can be made"
    if seen.free is None:
        return Line("store", OK, f"{what} {there}")
    if seen.free < _LITTLE:
        return Line(
            "store", WARNING, f"{what} {there}, {size(seen.free)} free", "make room, or name another path"
        )
    return Line("store", OK, f"{what} {there}, {size(seen.free)} free")


def _host(what: str, seen: PlaceSeen) -> Line:
    if seen.state == "open":
        return Line("store", OK, f"{what} takes connections")
    why = f" ({seen.detail})" if seen.detail else ""
    return Line(
        "store", WARNING, f"{what} takes no connection from this host now{why}",
        "start what listens there, unless the connector itself does",
    )  # fmt: skip
