"""Loads of requests that were preempted and let in anew: seen beside the ledger of loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from synth import Chunk, Prompt, Sim

from kvtrace.causes import diagnose
from kvtrace.ledger import Run, read_run
from kvtrace.ledger.ends import LoadEnd
from kvtrace.trace.format import Flag
from kvtrace.verify.evidence import read

LAYERS, PROMPT, TAKEN = 2, 128, 96


def resumed(
    folder: Path, written: int, failed: int = 0, asynchronous: bool = False, b: str = "b", times: int = 1
) -> Run:
    """``b`` is computed, preempted, and let in anew with tokens from the connector, of which ``written`` are
    written. What ``a`` loads shows that writes are seen."""
    sim = Sim(folder, layers=LAYERS, kv_blocks=64)
    for request, answer in (("a", TAKEN), (b, 0)):
        sim.arrive(Prompt(request, PROMPT, digest=len(request) + ord(request[0])))
        sim.grow(request, PROMPT)
        sim.lookup(request, 0, answer, answer)
        sim.step([Chunk(request, answer, PROMPT - answer, first=True)], prompts={request: PROMPT})
        if answer:
            sim.write_kv(request, 0, answer)
    for _ in range(times):
        sim.preempt(b, PROMPT)
        sim.free(b)
        sim.grow(b, PROMPT, resumed=True)
        sim.lookup(b, 0, TAKEN, TAKEN, int(Flag.ASYNC) if asynchronous else 0)
        chunk = Chunk(b, TAKEN, PROMPT - TAKEN, resumed=True)
        step = sim.step([] if asynchronous else [chunk], prompts={b: PROMPT})
        if written:
            sim.write_kv(b, 0, written)
        if asynchronous:
            sim.done(b, flags=int(Flag.LOAD))
            sim.step([chunk], prompts={b: PROMPT})
        if failed:
            sim.load_errors(0, step, failed)
    for request in ("a", b):
        sim.finish(request, PROMPT)
    sim.write()
    run = read_run(folder)
    run.loads.check()
    assert run.loads.total == 2 * PROMPT * LAYERS, "a prompt counts once"
    return run


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("written", "end"), [(0, LoadEnd.NOT_WRITTEN), (32, LoadEnd.PARTLY)])
def test_a_resumed_load_that_never_came_is_a_fault(
    tmp_path: Path, written: int, end: LoadEnd, asynchronous: bool
) -> None:
    run = resumed(tmp_path, written, asynchronous=asynchronous)
    (lost,) = run.lost_resumed
    assert (lost.request, lost.tokens, lost.ends) == (1, TAKEN, {end: (TAKEN - written) * LAYERS})
    (found,) = (one for one in diagnose(run).findings if one.id == "load-not-injected")
    assert (found.severity, found.requests, found.tokens) == ("fault", 1, 0)
    assert "resumed_req_ids" in found.remedy[0] and "let in anew" in found.events[0].text


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"written": TAKEN}, id="written"),
        pytest.param({"written": 0, "failed": 3}, id="reported as failed: vLLM computes it anew"),
        pytest.param({"written": TAKEN, "asynchronous": True}, id="in the background"),
    ],
)
def test_a_resumed_request_that_got_its_kv_is_no_fault(tmp_path: Path, more: dict[str, int]) -> None:
    run = resumed(tmp_path, **more)
    assert not run.lost_resumed
    assert "load-not-injected" not in {one.id for one in diagnose(run).findings}


def test_verify_counts_each_load_that_a_resumed_request_lost(tmp_path: Path) -> None:
    resumed(tmp_path, written=0, b="kvverify-7", times=2)
    seen = read([tmp_path]).of(7)
    assert seen is not None and seen.lost(LoadEnd.NOT_WRITTEN) == 2 * TAKEN * LAYERS
    assert seen.reasons[LoadEnd.NOT_WRITTEN]
    assert seen.accepted == TAKEN  # it is one that loads, though nothing was accepted at first
