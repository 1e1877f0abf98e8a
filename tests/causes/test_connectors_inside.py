"""Several connectors inside one: each has its own books, and the engine's say what any of them saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from diagnosed import analyse, ids, not_observed, prompts, ruled_out, the, tokens, words
from synth import Chunk, Entry, Prompt, Several, Sim

from kvtrace.causes import Diagnosis
from kvtrace.causes.several import of_the_run
from kvtrace.ledger import read_run
from kvtrace.report.build import build_report
from kvtrace.report.model import Report
from kvtrace.trace.format import Fact

PROMPTS = {"req-1": 64, "req-2": 128, "req-3": 100}


def served(sim: Several, units: dict[str, int], reads: Iterable[str]) -> Several:
    """Each connector stores whole units; ``reads``: those of them that read what they name."""
    for prompt in prompts(list(PROMPTS.values())):
        sim.arrive(prompt)
        whole = {name: prompt.length // unit * unit for name, unit in units.items() if unit}
        entries = {name: [Entry(prompt.id, size, -1, 0)] for name, size in whole.items() if size}
        sim.store([Chunk(prompt.id, 0, prompt.length, first=True)], entries,
                  prompts={prompt.id: prompt.length})  # fmt: skip
        for name in reads:
            if whole[name]:
                sim.read(prompt.id, 0, whole[name], connector=sim.inner[name][1])
        sim.finish(prompt.id, prompt.length)
    return sim


def swallow(sim: Several, name: str) -> None:
    """``name`` catches an exception in each of its calls."""
    count = 0
    for n in range(1, sim.n + 1):
        for layer in sim.layer_names:
            count += 1
            sim.workers[0].fact(
                Fact.SWALLOWED,
                {"hook": "save_kv_layer", "connector": sim.inner[name][1], "type": "ConnectionRefusedError",
                 "message": "[Errno 111] refused", "where": "store.py:12 in put", "layer": layer,
                 "step": sim.tag << 32 | n, "count": count, "observed_calls": count, "logged": False},
            )  # fmt: skip


def dead_beside_good(folder: Path) -> Several:
    """Both are given the same; one catches an exception in each of its calls."""
    sim = Several(folder / "run", ["Good", "Dead"], kv_blocks=64)
    served(sim, {"Good": 32, "Dead": 32}, ["Good", "Dead"])
    swallow(sim, "Dead")
    return sim


def of(diagnosis: Diagnosis, name: str) -> Diagnosis:
    return dict(diagnosis.parts)[name]


def report_of(sim: Sim) -> Report:
    return build_report(sim.dir)


def test_healthy_ones_with_units_of_their_own_have_no_fault(tmp_path: Path) -> None:
    """The larger unit of one is no hole in what the other saved, and the other way round."""
    sim = served(
        Several(tmp_path / "run", ["Near", "Far"], kv_blocks=64), {"Near": 32, "Far": 64}, ["Near", "Far"]
    )
    diagnosis = analyse(sim)
    assert {one.severity for one in diagnosis.findings} == {"limit"}
    parts = (diagnosis, of(diagnosis, "Near"), of(diagnosis, "Far"))
    assert [tokens(one)["saved"] for one in parts] == [288, 288, 256]
    assert [sum(tokens(one).values()) for one in parts] == [292, 292, 292]
    assert {one.connector for one in diagnosis.findings} == {"Near"}  # it has what Far leaves out


def test_what_the_run_lost_by_the_unit_of_one_is_told(tmp_path: Path) -> None:
    """The sizes of what all of them store together need not follow from a unit."""
    served(sim := Several(tmp_path / "run", ["Near", "Far"], kv_blocks=64), {"Near": 32, "Far": 64}, [])
    (found,) = of(analyse(sim), "Far").findings
    assert of_the_run([found], {}, {found.id}) == [found]
    assert of_the_run([found], {}, set()) == []  # another has the tokens


def test_what_another_one_loads_the_scheduler_does_not_hold(tmp_path: Path) -> None:
    """Both offer the same tokens, and the first one's are taken: no request had its offer left for its
    options."""
    sim = Several(tmp_path / "run", ["First", "Second"], kv_blocks=64)
    sim.arrive(Prompt("a", 128, digest=1))
    sim.lookup("a", 0, 96, 96)
    sim.lookup("a", 0, 96, 96, connector=sim.inner["First"][0])
    sim.lookup("a", 0, 96, 0, connector=sim.inner["Second"][0])
    sim.step([Chunk("a", 96, 32, first=True)], prompts={"a": 128})
    sim.finish("a", 128)
    diagnosis = analyse(sim)
    assert "lookup-clamped" not in ids(diagnosis)  # of the run nothing was left
    finding = the(of(diagnosis, "Second"), "lookup-clamped")
    assert finding.severity == "note" and "Another connector loaded 96 of 96 tokens" in finding.title
    assert "prompt_logprobs" not in words(finding)


@pytest.mark.parametrize("taken", [32, 96])
def test_one_that_offered_more_than_the_first_is_named(tmp_path: Path, taken: int) -> None:
    """vllm#50546: MultiConnector takes the first one that answers, however little it has."""
    sim = Several(tmp_path / "run", ["First", "Second"], kv_blocks=64)
    sim.arrive(Prompt("a", 128, digest=1))
    sim.lookup("a", 0, taken, taken)
    sim.lookup("a", 0, taken, taken, connector=sim.inner["First"][0])
    sim.lookup("a", 0, 96, 0, connector=sim.inner["Second"][0])
    sim.step([Chunk("a", taken, 128 - taken, first=True)], prompts={"a": 128})
    sim.finish("a", 128)
    found = [one for one in analyse(sim).findings if one.id == "lookup-clamped"]
    assert [(one.connector, one.tokens, one.severity) for one in found] == (
        [("Second", 64, "limit")] if taken == 32 else []
    )
    assert all("put the one that holds most" in one.remedy[0] for one in found)


def test_a_dead_one_beside_a_good_one_comes_first(tmp_path: Path) -> None:
    diagnosis = analyse(dead_beside_good(tmp_path))
    assert tokens(diagnosis) == {"saved": 288, "not-saved:below-save-granularity": 4}
    first = diagnosis.findings[0]
    assert (first.id, first.connector, first.severity) == ("exception-swallowed", "Dead", "fault")
    assert first.tokens == 288 and first.title.startswith("Dead: ")
    assert "In Dead, the connector catches" in diagnosis.verdict
    assert "exception-swallowed" not in ruled_out(diagnosis)
    # What became of what the good one read was not seen: no fault of it, and no rule-out either.
    assert "exception-swallowed" not in ruled_out(of(diagnosis, "Good"))
    unseen = not_observed(of(diagnosis, "Good"))["exception-swallowed"]
    assert "no save is known to be lost" in unseen
    assert ids(of(diagnosis, "Good")) == ["below-save-granularity"]
    assert tokens(of(diagnosis, "Dead"))["not-saved:exception-swallowed"] == 288


def test_saved_by_one_and_declared_by_another_is_saved(tmp_path: Path) -> None:
    sim = Several(tmp_path / "run", ["Seen", "Unseen"], kv_blocks=64)
    served(sim, {"Seen": 32, "Unseen": 0}, ["Seen"])
    diagnosis = analyse(sim)
    assert [grade.label for grade in diagnosis.saves.grades["saved"]] == ["read"]
    assert diagnosis.saves.accounts["saved"] == 288 * sim.layers


@pytest.mark.parametrize("names", [["Twin", "Other"], ["Other", "Twin"]])
def test_a_loss_of_all_is_told_of_the_one_that_came_furthest(tmp_path: Path, names: list[str]) -> None:
    sim = Several(tmp_path / "run", names, kv_blocks=64)
    served(sim, {"Twin": 64, "Other": 32}, ["Twin", "Other"])
    swallow(sim, "Other")
    diagnosis = analyse(sim)
    # req-3 has 100 tokens: Twin takes 64, Other names 96 and loses them.
    found = tokens(diagnosis)
    assert found.pop("saved") == 256 and found.pop("not-saved:exception-swallowed") == 32
    assert sum(found.values()) == 4


@pytest.mark.parametrize("unit", [32, 0], ids=["a rest", "nothing offered"])
def test_one_that_only_loads_loses_nothing_for_another(tmp_path: Path, unit: int) -> None:
    """vllm#46865: why a prompt is not stored is told of the one that could have."""
    names, roles = ["Reader", "Writer"], {"Reader": "kv_consumer"}
    sim = Several(tmp_path / "run", names, roles=roles, kv_blocks=64)
    diagnosis = analyse(served(sim, {"Reader": 0, "Writer": unit}, ["Writer"] if unit else []))
    assert {one.connector for one in diagnosis.findings} == {"Writer"}
    assert ids(diagnosis) == ["below-save-granularity" if unit else "metadata-has-no-store"]


def test_those_nested_deeper_have_the_way_to_them_as_their_name(tmp_path: Path) -> None:
    sim = Several(tmp_path / "run", ["Near", "MultiConnector"], nested=["Disk", "Net"], kv_blocks=64)
    served(sim, {"Near": 32, "Disk": 32, "Net": 32}, ["Near", "Disk", "Net"])
    diagnosis = analyse(sim)
    assert [name for name, _ in diagnosis.parts] == ["Near", "MultiConnector > Disk", "MultiConnector > Net"]
    assert all(tokens(part)["saved"] == 288 for _, part in diagnosis.parts)


def test_an_engine_with_one_connector_keeps_its_findings(tmp_path: Path) -> None:
    """Its findings are its own, of its own tokens alone."""
    sim = served(Several(tmp_path / "run", ["A", "B"], kv_blocks=64), {"A": 32, "B": 32}, ["A", "B"])
    sim.write()
    other = Sim(tmp_path / "run", tag=3, pid=300, connector="Alone", ints={"unit": 128})
    other.asks = True
    for prompt in prompts([256, 200], start=9):
        other.arrive(prompt)
        other.step([Chunk(prompt.id, 0, prompt.length, first=True)],
                   [Entry(prompt.id, prompt.length // 128 * 128, -1, 0)],
                   prompts={prompt.id: prompt.length})  # fmt: skip
        other.finish(prompt.id, prompt.length)
    diagnosis = analyse(other)
    alone = [one for one in diagnosis.findings if not one.connector]
    assert [(one.id, one.tokens) for one in alone if one.tokens] == [("below-save-granularity", 72)]
    assert tokens(diagnosis)["saved"] == 288 + 384


def test_the_report_has_the_books_of_each(tmp_path: Path) -> None:
    sim = dead_beside_good(tmp_path)
    analyse(sim)
    report = report_of(sim)
    good, dead = report["connectors"]
    assert (good["name"], dead["name"]) == ("Good", "Dead")
    assert dead["findings"][0] == "exception-swallowed" and "exception-swallowed" not in good["findings"]
    assert good["ledger"]["saves"]["total"] == dead["ledger"]["saves"]["total"]
    assert report["findings"][0].get("connector") == "Dead"
    of_save = next(row for row in dead["coverage"] if row["hook"] == "save_kv_layer")
    assert (of_save["fired"], of_save["with_work"]) == (3 * sim.layers, 3 * sim.layers)


def test_one_that_holds_a_single_other_one_is_read_as_one(tmp_path: Path) -> None:
    sim = served(Several(tmp_path / "run", ["Only"], kv_blocks=64), {"Only": 32}, ["Only"])
    analyse(sim)
    assert not read_run(sim.dir).parts
    assert "connectors" not in report_of(sim)
