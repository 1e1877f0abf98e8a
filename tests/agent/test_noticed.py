"""What a connector finds when it asks, traced and untraced, without an engine: the probes that need no other
process. (All of them, on a real engine: tests/engine/test_identity.py.)"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import probes
import pytest

from kvtrace.agent.hooks.connector import traced
from kvtrace.agent.state import AGENT
from kvtrace.trace.format import Fact, Role

from . import fakes

pytest.importorskip("torch")
_OTHERS = (
    "SQLite",
    "fcntl.",
    "os.lockf",
    "lockf of",
    "subprocess",
    "what a child",
    "os.fork",
    "multiprocessing",
)
_SLOW = ("torch.", "frames that dynamo", "make_fx", "sparse and nested")
ASKED = [name for name in probes.PROBES if not name.startswith(_OTHERS + _SLOW)]


class Probing(probes.Climbing, fakes.Copying):
    """A connector's own documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, str] = {}

    def own(self) -> type:
        return Probing

    def hooks(self) -> list[str]:
        return ["save_kv_layer", "wait_for_layer_load", "bind_connector_metadata", "get_finished"]

    def wait_for_save(self) -> None:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            warnings.warn("from a hook", stacklevel=2)
        probes.BEFORE.update(warned=[one.filename for one in warned], caller=sys._getframe(1).f_code)
        for name in ASKED:
            try:
                self.answers[name] = repr(probes.PROBES[name](self))
            except Exception as error:
                self.answers[name] = f"{type(error).__name__}: {error}"


class Below(Probing):
    pass


def answers(tmp_path: Path, way: str) -> dict[str, str]:
    connector: Any = Probing()
    folder = tmp_path / way
    folder.mkdir()
    probes.BEFORE.update(
        folder=folder, caches={}, logged=[], given=[], references=sys.getrefcount(connector),
        descriptors=len(probes._descriptors()), atexit=0, below=Below,
    )  # fmt: skip
    held = traced(connector, Role.WORKER, "Probing") if way == "traced" else connector
    AGENT.worker.step = 1
    AGENT.worker.watch_store = True if way == "traced" else None
    held.wait_for_save()
    AGENT.worker.watch_store = None
    return connector.answers


def test_only_what_the_page_lists_can_be_noticed(trace: Any, tmp_path: Path) -> None:
    answers(tmp_path, "first")  # what is imported and cached by asking is there from now on
    found = []
    for way in ("plain", "traced"):
        Probing.counter = 0
        found.append(answers(tmp_path, way))
    plain, seen = found
    assert len(plain) > 90 and trace.facts(Fact.AGENT_ERROR) == []
    listed = probes.noticed()
    assert {n: (plain[n], seen[n]) for n in plain if plain[n] != seen[n] and n not in listed} == {}


def test_the_page_says_how_many_questions_are_asked() -> None:
    assert f" {len(probes.PROBES)} questions" in probes.page()
