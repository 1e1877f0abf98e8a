"""Requests between a prefill and a decode engine: those that ask for no transfer get none."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosed import analyse, said, the, words
from synth import Entry, Policy, Prompt, Sim, nothing
from test_load_rules import again

from kvtrace.trace.format import Fact

ASKED = "none of these requests asks for a transfer"
PROXY = "Send these requests through the proxy"


def asks(sim: Sim, request: str, what: str = "do_remote_decode", returned: bool = False) -> None:
    fact = {"request": request, "returned": returned, "ids": {}, "asks": [what]}
    sim.scheduler.fact(Fact.HAND_OVER, fact)


@pytest.mark.parametrize(
    ("connector", "asking", "told"),
    [
        ("NixlConnector", [], True),
        ("MooncakeConnector", [], True),
        ("NixlConnector", ["r1"], False),
        ("SomeConnector", [], False),
    ],
)
def test_requests_past_the_proxy_are_told_apart(
    tmp_path: Path, connector: str, asking: list[str], told: bool
) -> None:
    sim = Sim(tmp_path, connector=connector)
    sim.serve([Prompt("r0", 64), Prompt("r1", 128)], Policy(nothing))
    for request in asking:
        asks(sim, request)
    text = said(analyse(sim), "metadata-has-no-store")
    assert (ASKED in text, PROXY in text, "as they ask for no transfer" in text) == (told,) * 3
    assert ("by a rule that is not known" in text) is not told


@pytest.mark.parametrize("opt_in", [False, True])
def test_a_flag_that_tells_requests_apart_is_named(tmp_path: Path, opt_in: bool) -> None:
    """LMCache's skip_save: those left out ask for it, the others do not. Or the others ask to be stored."""
    prompts = [Prompt(f"r{at}", 128, digest=at + 1) for at in range(8)]

    def store(prompt: Prompt, *_: object) -> list[Entry]:
        return [Entry(prompt.id, 128, -1, 0)] if prompt.id in ("r0", "r1", "r2", "r3", "r4") else []

    sim = Sim(tmp_path)
    for request in ("r0", "r1", "r2", "r3", "r4") if opt_in else ("r5", "r6", "r7"):
        told = {"request": request, "returned": False, "ids": {}, "asks": [], "flags": {"save": True}}
        sim.scheduler.fact(Fact.HAND_OVER, told)
    sim.serve(prompts, Policy(store))
    found = the(analyse(sim), "metadata-has-no-store")
    assert (found.pattern == "with kv_transfer_params 'save' = true") is not opt_in
    meant = "ask for it" if opt_in else "mean that"
    assert found.remedy[0] == f"Nothing to mend where 'save' = true in kv_transfer_params is to {meant}"


@pytest.mark.parametrize(("asking", "told"), [(["r0"], True), ([], False), (["r0", "r1"], False)])
def test_any_connector_that_served_those_that_ask(tmp_path: Path, asking: list[str], told: bool) -> None:
    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, end - start, end, start)] if prompt.id == "r0" else []

    sim = Sim(tmp_path, connector="SomeConnector")
    sim.serve([Prompt("r0", 64), Prompt("r1", 128)], Policy(store))
    for request in asking:
        asks(sim, request)
    asks(sim, "r1", returned=True)  # what the connector answers is no order
    text = said(analyse(sim), "metadata-has-no-store")
    assert (ASKED in text) is told
    assert ("those that were served (1) do" in text) is told


def test_a_consumer_past_the_proxy_is_told(tmp_path: Path) -> None:
    sim = Sim(tmp_path / "past", connector="NixlConnector", role="kv_consumer")
    again(sim, [100, 120], [0, 0], [0, 0])
    text = said(analyse(sim), "lookup-miss")
    assert ASKED in text and PROXY in text
    sim = Sim(tmp_path / "asked", connector="NixlConnector", role="kv_consumer")
    again(sim, [100, 120], [0, 0], [0, 0])
    asks(sim, "r0", "do_remote_prefill")
    assert ASKED not in said(analyse(sim), "lookup-miss")


def test_a_prompt_that_was_offered_in_part_was_served(tmp_path: Path) -> None:
    sim = Sim(tmp_path, connector="NixlConnector")
    sim.one_step("r0", 64, [Entry("r0", 32, 64, 0)])
    assert not any(ASKED in words(one) for one in analyse(sim).findings)
