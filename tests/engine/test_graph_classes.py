"""What the trace says of CUDA graphs where vLLM's own dispatcher and wrappers decide (graph_steps.py)."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from side_by_side import Place, Ran, Script

from kvtrace.trace import hooks
from kvtrace.trace.config import AgentConfig
from kvtrace.trace.format import STEP_SHIFT, Flag, Kind
from kvtrace.trace.reader import Spool, spool_paths

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).parent / "graph_steps.py"
NONE, PIECEWISE, FULL = 0, 1, 2
STEPS = [[20, 2], [3, 3], [8, 8], [40, 2]]  # tokens, requests: a prefill, decodes, more than any graph has


MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "V2")


class Seen(NamedTuple):
    steps: list[tuple[int, int, int, int]]  # mode, padded tokens, bodies, saves
    captured: int  # bodies that ran while capturing
    replays: dict[str, int]


def graphs(place: Place) -> dict[str, Seen]:
    """All modes one after the other in one process, as engines 1, 2, 3, ..."""
    folder = place.run
    folder.mkdir()
    # without device times: there is a stand-in for the graph, not for the device
    config = AgentConfig(folder, b"k" * 16, "run", 1 << 20, "off").to_text()
    asked = json.dumps({"modes": MODES, "sizes": [1, 4, 8, 32], "steps": STEPS})
    found = place.start(
        sys.executable, SCRIPT, traced=False, KVTRACE_CONFIG=config, GRAPH_STEPS=asked, VLLM_PLUGINS=""
    )
    assert found.returncode == 0, found.stderr[-3000:]
    replays = json.loads(found.stdout.splitlines()[-1])
    (path,) = spool_paths(folder)
    (table,) = Spool(path).chunks()
    steps: list[list[tuple[int, int, int, int]]] = [[] for _ in MODES]
    captured = [0] * len(MODES)
    bodies: Counter[int] = Counter()
    saves: Counter[int] = Counter()
    engine = 0
    for row in table.tolist():
        what, step, marks = row[0] & 0xFF, row[3], row[0] >> 32 & 0xFFFF
        if what == Kind.OP:
            bodies[step] += 1
            if not step and steps[engine]:
                engine += 1  # the next engine captures
            captured[engine] += bool(marks & Flag.CAPTURE)
            assert not (step and marks & Flag.CAPTURE), "a body of a step is no capture"
        elif what == Kind.HOOK and row[0] >> 16 & 0xFF == hooks.SAVE_LAYER.code:
            assert step, "no metadata is bound outside of steps"
            saves[step] += 1
        elif what == Kind.EXEC:
            engine = (step >> STEP_SHIFT) - 1
            steps[engine].append((row[6], row[7], bodies[step], saves[step]))
    parts = zip(MODES, steps, captured, replays, strict=True)
    return {mode: Seen(*rest) for mode, *rest in parts}


SCRIPTS = (graphs,)


@pytest.fixture
def seen(ran: Mapping[Script, Ran]) -> dict[str, Seen]:
    found: dict[str, Seen] = ran[graphs].done
    return found


def test_full_graphs_run_no_body_and_captures_are_marked(seen: dict[str, Seen]) -> None:
    assert seen["FULL"].steps == [
        (FULL, 32, 0, 0), (FULL, 4, 0, 0), (FULL, 8, 0, 0),
        (NONE, 40, 2, 2),  # larger than the largest graph
    ]  # fmt: skip
    assert seen["FULL"].captured == 4 * 2 and seen["FULL"].replays == {"FULL": 3}


def test_piecewise_graphs_run_every_body(seen: dict[str, Seen]) -> None:
    bodies = [(PIECEWISE, 32, 2, 2), (PIECEWISE, 4, 2, 2), (PIECEWISE, 8, 2, 2), (NONE, 40, 2, 2)]
    assert seen["PIECEWISE"].steps == bodies
    # attention lies between the graphs
    assert seen["PIECEWISE"].captured == 0 and seen["PIECEWISE"].replays == {"PIECEWISE": 3 * 3}


def test_prefills_piecewise_and_decodes_full(seen: dict[str, Seen]) -> None:
    both = seen["FULL_AND_PIECEWISE"]
    assert both.steps == [(PIECEWISE, 32, 2, 2), (FULL, 4, 0, 0), (FULL, 8, 0, 0), (NONE, 40, 2, 2)]
    assert both.captured == 4 * 2 and both.replays == {"PIECEWISE": 3, "FULL": 2}


def test_the_second_runner_s_full_replay_has_no_forward_context(seen: dict[str, Seen]) -> None:
    assert seen["V2"].steps == [(FULL, 16, 0, 0)] and seen["V2"].replays == {"FULL": 1}
