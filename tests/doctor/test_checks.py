"""Each check on facts that are as they should be, and on facts that are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from kvtrace.agent.facts.connector_facts import does_nothing
from kvtrace.agent.preflight import facts, signatures
from kvtrace.agent.preflight.facts import (
    Class,
    ExtraKeys,
    Parsed,
    Planned,
    Python,
    Signature,
)
from kvtrace.agent.reads import Reads
from kvtrace.agent.targets import Target
from kvtrace.doctor import checks, class_checks, place_checks
from kvtrace.doctor.answer import DoctorAnswer, Level, Line
from kvtrace.doctor.child import LookStep
from kvtrace.doctor.command import ServeCommand
from kvtrace.doctor.gather import DoctorFacts
from kvtrace.doctor.places import ConfigPlace, PlaceSeen
from kvtrace.doctor.vllm_sources import FoundTarget
from kvtrace.launch.spy import FORBIDDEN, MISSING
from kvtrace.render.doctor import doctor_page
from kvtrace.render.markdown import markdown
from kvtrace.render.page import Screen
from kvtrace.render.terminal import terminal
from kvtrace.trace.mask import mask_text

OK, WARNING, PROBLEM, NOT_KNOWN = Level.OK, Level.WARNING, Level.PROBLEM, Level.NOT_KNOWN
HOOKS = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "build_connector_meta")
COMMAND = ServeCommand(
    ("vllm", "serve", "M"), {}, "/bin/vllm", "/bin/python", "/bin", "serve", ("serve", "M")
)
PYTHON = Python("3.11.7", "/bin/python", "0.32.0", "2.9.0", "/site/vllm")
CLASS = Class(
    "Mine",
    name="Mine",
    module="mine.kv",
    file="/mine/kv.py",
    overrides=HOOKS,
    idle=("wait_for_layer_load",),
    signatures=(Signature("wait_for_save", (), (), True),),
    piecewise=False,
    role="kv_both",
    extra={},
)
ENGINE = Planned(16, True, 1, False, "NONE", 8192, "Mine")
MULTI = replace(CLASS, name="MultiConnector", module="vllm.multi_connector")
HYBRID = replace(ENGINE, several_groups=True, states=True, one_group=False)


def facts_with(
    python: Python = PYTHON,
    classes: tuple[Class, ...] = (CLASS,),
    keys: tuple[ExtraKeys, ...] = (ExtraKeys(("root",), True),),
    engine: Planned = ENGINE,
    parsed: Parsed | None = None,
    steps: dict[str, LookStep] | None = None,
    **others: Any,
) -> DoctorFacts:
    """What a look at a healthy connector found, with some of it replaced; through JSON, as it comes."""
    found = {
        facts.PYTHON: asdict(python),
        facts.IMPORT: {"version": python.vllm},
        facts.PLUGINS: {},
        facts.PARSE: asdict(parsed or Parsed(transfer={"kv_connector": "Mine"})),
        facts.CONNECTOR: {"classes": [asdict(one) for one in classes]},
        facts.KEYS: {"keys": [asdict(one) for one in keys]},
        facts.ENGINE: asdict(engine),
    }
    whole = {name: LookStep("done", json.loads(json.dumps(one))) for name, one in found.items()}
    targets = [hooked("scheduler"), replace(hooked("older", "no module x"), expected=False)]
    given: dict[str, Any] = {"targets": targets, "spy": "", "kvtrace": "0.1.0", **others}
    return DoctorFacts(given.pop("command", COMMAND), steps={**whole, **(steps or {})}, **given)


def hooked(ident: str, *problems: str) -> FoundTarget:
    """A place that the agent hooks."""
    return FoundTarget(Target(ident, "", "", "", print), True, problems)


def of_class(**fields: Any) -> DoctorFacts:
    """The same with these fields of the class; ``steps``: those that end otherwise."""
    steps = fields.pop("steps", None)
    return facts_with(classes=(replace(CLASS, **fields),), steps=steps)


def of_engine(**fields: Any) -> DoctorFacts:
    return facts_with(engine=replace(ENGINE, **fields))


def of_python(**fields: Any) -> DoctorFacts:
    others = {name: fields.pop(name) for name in ("steps", "command") if name in fields}
    return facts_with(python=replace(PYTHON, **fields), **others)


def of_command(**fields: Any) -> DoctorFacts:
    return facts_with(command=replace(COMMAND, **fields))


def when(step: str, ended: LookStep) -> DoctorFacts:
    return facts_with(steps={step: ended})


Check = Callable[[DoctorFacts], Iterator[Line]]


def levels(check: Check, found: DoctorFacts) -> list[Level]:
    return [line.level for line in check(found)]


def test_a_healthy_run_is_all_ok() -> None:
    """What cannot be known before a run is the only thing that is not."""
    answer = checks.answer(facts_with())
    assert {line.level for line in answer.lines} == {OK, NOT_KNOWN} and not answer.failed
    assert [line.check for line in answer.lines if line.level is NOT_KNOWN] == ["least prompt", "store"]
    assert all(line.text and not line.remedy for line in answer.lines if line.level is OK)


def test_what_is_known_of_keys_and_places_is_said() -> None:
    (line,) = class_checks.config_keys(
        facts_with(classes=(MULTI,), keys=(ExtraKeys(("connectors",), False),))
    )
    assert line.level is OK
    (line,) = checks.store(of_command(words=(), kind=""))
    assert line.level is NOT_KNOWN and "shows with the command" in line.text


RAISED, HUNG = LookStep("raised", error="ValueError: no"), LookStep("hung", where="/mine/kv.py:7")
DIED = LookStep("died", error="signal SIGSEGV")
CASES: dict[Check, dict[str, tuple[DoctorFacts, Level, str]]] = {
    checks.python: {
        "no certain Python": (of_command(python=None), NOT_KNOWN, "/bin/vllm"),
        "Python does not start": (when(facts.PYTHON, DIED), WARNING, "SIGSEGV"),
        "Python is too old": (of_python(version="3.9.2"), PROBLEM, "3.10"),
    },
    checks.versions: {
        "vLLM is not there": (
            of_python(vllm=None, folder=None, steps={facts.IMPORT: RAISED}),
            PROBLEM,
            "no vLLM",
        ),
        "vLLM is not in kvtrace's Python": (
            of_python(
                vllm=None,
                folder=None,
                steps={facts.IMPORT: RAISED},
                command=replace(COMMAND, kind="", words=()),
            ),
            NOT_KNOWN,
            "no vLLM",
        ),
        "vLLM raises at import": (when(facts.IMPORT, RAISED), PROBLEM, "no"),
        "vLLM's import takes long": (when(facts.IMPORT, HUNG), NOT_KNOWN, "long"),
        "vLLM is newer": (of_python(vllm="9.0.0"), WARNING, "9.0.0"),
        "vLLM is older": (of_python(vllm="0.7.0"), WARNING, "0.7.0"),
        "vLLM has no number": (of_python(vllm="dev"), NOT_KNOWN, "dev"),
    },
    checks.targets: {
        "a target is missing": (
            facts_with(targets=[hooked("scheduler", "no Scheduler")]),
            WARNING,
            "no Scheduler",
        ),
        "a name is missing": (
            facts_with(targets=[FoundTarget(Reads("request", "", (), ""), True, ("no x",))]),
            WARNING,
            "request",
        ),
        "no sources": (facts_with(targets=None), NOT_KNOWN, "sources"),
    },
    checks.way_in: {
        "python -I": (of_command(isolated=True), WARNING, "-I"),
        "a plugin raises": (when(facts.PLUGINS, RAISED), WARNING, "ValueError"),
    },
    checks.command: {
        "a script": (of_command(kind="", words=("python", "x.py")), NOT_KNOWN, "only when it runs"),
        "refused": (facts_with(parsed=Parsed(refused="unrecognized --nope")), PROBLEM, "--nope"),
        "no parser": (when(facts.PARSE, RAISED), NOT_KNOWN, "words alone"),
    },
    checks.configuration: {
        "vLLM refuses": (when(facts.ENGINE, RAISED), WARNING, "ValueError"),
        "a download": (when(facts.ENGINE, HUNG), NOT_KNOWN, "too long"),
        "configuration crashes": (when(facts.ENGINE, DIED), WARNING, "SIGSEGV"),
    },
    checks.blocks: {
        "several groups": (of_engine(several_groups=True), NOT_KNOWN, "several kinds"),
        "a state, and a connector of one group": (
            facts_with(engine=replace(HYBRID, one_group=True)),
            PROBLEM,
            "refuses to start",
        ),
        "a state, its blocks not known": (
            facts_with(engine=HYBRID),
            NOT_KNOWN,
            "several kinds",
        ),
        "an encoder with a decoder": (
            facts_with(engine=replace(HYBRID, states=False, encoder=True)),
            PROBLEM,
            "encoder with a decoder",
        ),
        "no block size": (when(facts.ENGINE, RAISED), NOT_KNOWN, "engine starts"),
    },
    class_checks.found_class: {
        "import hangs": (when(facts.CONNECTOR, HUNG), WARNING, "kv.py:7"),
        "import crashes": (when(facts.CONNECTOR, DIED), PROBLEM, "SIGSEGV"),
        "look fails": (when(facts.CONNECTOR, RAISED), NOT_KNOWN, "failed"),
        "none configured": (facts_with(classes=()), WARNING, "no KV connector"),
        "import raises": (
            facts_with(classes=(Class("Mine", "ImportError: x", "/mine/kv.py:3"),)),
            PROBLEM,
            "/mine/kv.py:3",
        ),
        "another base": (of_class(based=False), PROBLEM, "KVConnectorBase"),
        "another class of that name": (of_class(resolves=False), WARNING, "mine.kv.Mine"),
    },
    class_checks.whole: {
        "abstract": (of_class(abstract=("wait_for_save",)), PROBLEM, "wait_for_save"),
    },
    class_checks.overridden: {
        "old parameters": (
            of_class(signatures=(Signature("f", ("a", "b"), ("a",), False),)),
            PROBLEM,
            "Mine.f(a)",
        ),
        "named like a hook": (
            of_class(like=(("wait_for_saves", "wait_for_save"),)),
            WARNING,
            "wait_for_saves",
        ),
    },
    class_checks.graphs: {
        "full graphs": (of_engine(graph_mode="FULL_AND_PIECEWISE"), WARNING, "Mine.save_kv_layer"),
        "work of single layers, without a command": (
            facts_with(steps={facts.ENGINE: LookStep("done")}, command=replace(COMMAND, words=(), kind="")),
            NOT_KNOWN,
            "graphs may leave out Mine.save_kv_layer",
        ),
        "no graph mode": (when(facts.ENGINE, RAISED), NOT_KNOWN, "engine starts"),
    },
    class_checks.smallest: {
        "rounds to the batch": (
            of_class(batched=("mine.kv:7",)),
            WARNING,
            "at mine.kv:7: where these are a prompt's, nothing of prompts below 8192 tokens",
        ),
        "rounds to a batch that is not known": (
            of_class(batched=("mine.kv:7",), steps={facts.ENGINE: RAISED}),
            NOT_KNOWN,
            "mine.kv:7",
        ),
        "rounds to another unit": (of_class(), NOT_KNOWN, "shows only in a run"),
    },
    class_checks.config_keys: {
        "a key that a MultiConnector does not know": (
            facts_with(classes=(MULTI,), keys=(ExtraKeys(("connectors", "path"), False),)),
            WARNING,
            "never asks for the key 'path'",
        ),
        "an unread key": (
            facts_with(keys=(ExtraKeys(("rot",), True, ("rot",), ("root",)),)),
            WARNING,
            "'rot'",
        ),
        "keys unknown": (facts_with(keys=(ExtraKeys(("root",), False),)), NOT_KNOWN, "source"),
    },
    place_checks.stuck: {
        "py-spy is missing": (facts_with(spy=MISSING), WARNING, "not installed"),
        "py-spy is forbidden": (facts_with(spy=FORBIDDEN), WARNING, "may not look"),
        "py-spy says something else": (facts_with(spy="py-spy: odd"), NOT_KNOWN, "odd"),
        "py-spy gave no answer": (facts_with(spy=None), NOT_KNOWN, "whether"),
    },
}


@pytest.mark.parametrize(("check", "case"), [(check, case) for check in CASES for case in CASES[check]])
def test_what_is_not_as_it_should_be_has_its_line(check: Check, case: str) -> None:
    found, level, text = CASES[check][case]
    lines = [line for line in check(found) if line.level is not OK]
    assert [line.level for line in lines] == [level]
    assert text in lines[0].text
    assert (
        OK in levels(check, facts_with())
        or check in (class_checks.whole, class_checks.smallest)
        or check is checks.configuration
    )
    if level is PROBLEM:
        assert lines[0].remedy and checks.answer(found).failed


def test_what_may_be_meant_so_is_no_fault() -> None:
    fine = (
        replace(CLASS, elsewhere=("register_cross_layers_kv_cache",)),
        replace(CLASS, idle=("save_kv_layer", "wait_for_save", "wait_for_layer_load")),
        replace(CLASS, role="kv_consumer"),
        replace(CLASS, name="MultiConnector"),
    )  # fmt: skip
    for one in fine:
        for check in class_checks.CLASS_CHECKS:
            assert not {WARNING, PROBLEM} & set(levels(check, facts_with(classes=(one,))))


def test_full_graphs_lose_nothing_without_work_in_layers() -> None:
    full = replace(ENGINE, graph_mode="FULL_AND_PIECEWISE")
    for one in (replace(CLASS, piecewise=True), replace(CLASS, idle=HOOKS), replace(CLASS, piecewise=None)):
        assert levels(class_checks.graphs, facts_with(engine=full, classes=(one,))) == [OK]


def test_what_is_added_to_the_allowed_plugins_is_said() -> None:
    (line,) = checks.way_in(of_command(environ={"VLLM_PLUGINS": "mine"}))
    assert line.level is OK and "kvtrace run adds kvtrace" in line.text


def test_the_least_prompt_of_vllms_own_example() -> None:
    own = replace(CLASS, name="ExampleConnector", module="vllm.x.example_connector")
    engine = replace(ENGINE, context_parallel=2)
    (line,) = class_checks.smallest(facts_with(classes=(own,), engine=engine))
    assert line.level is OK and "whole blocks of 32" in line.text and "below 33 tokens" in line.text
    mine = replace(own, module="mine.kv")
    assert levels(class_checks.smallest, facts_with(classes=(mine,))) == [NOT_KNOWN]
    assert levels(class_checks.smallest, facts_with(classes=(own,), engine=HYBRID)) == [NOT_KNOWN]


def test_without_the_hybrid_manager_layers_are_one_group() -> None:
    (line,) = checks.blocks(of_engine(several_groups=True, one_group=True))
    assert line.level is OK and "16 tokens a block" in line.text


PATH = ConfigPlace("path", "/store")
STATES: list[tuple[PlaceSeen, Level, Level]] = [
    (PlaceSeen(PATH, "directory", free=1 << 40), OK, OK),
    (PlaceSeen(PATH, "directory", free=1 << 20), WARNING, WARNING),
    (PlaceSeen(PATH, "refused"), WARNING, PROBLEM),
    (PlaceSeen(PATH, "absent", free=1 << 40), OK, OK),
    (PlaceSeen(PATH, "refused", "/"), WARNING, PROBLEM),
    (PlaceSeen(PATH, "blocked", "/store"), WARNING, PROBLEM),
    (PlaceSeen(PATH, "file"), OK, PROBLEM),
    (PlaceSeen(PATH, "hung"), WARNING, WARNING),
    (PlaceSeen(ConfigPlace("peer", host="h", port=1), "open"), OK, OK),
    (PlaceSeen(ConfigPlace("peer", host="h", port=1), "closed", "refused"), WARNING, WARNING),
]


@pytest.mark.parametrize(("seen", "level", "sure"), STATES)
def test_a_path_is_a_problem_only_where_it_is_surely_the_store(
    seen: PlaceSeen, level: Level, sure: Level
) -> None:
    assert levels(place_checks.store, facts_with(places=(("Mine", seen),))) == [level]
    example = replace(CLASS, name="ExampleConnector")
    place = replace(seen.place, key="shared_storage_path" if seen.place.path else "peer")
    found = facts_with(classes=(example,), places=(("ExampleConnector", replace(seen, place=place)),))
    assert levels(place_checks.store, found) == [sure]


def test_who_only_loads_need_not_write() -> None:
    seen = PlaceSeen(PATH, "refused")
    reader = replace(CLASS, role="kv_consumer")
    assert levels(place_checks.store, facts_with(classes=(reader,), places=(("Mine", seen),))) == [OK]


def test_a_path_that_is_no_place_says_nothing() -> None:
    seen = PlaceSeen(ConfigPlace("prefix", "/v1/kv"), "blocked", "/v1")
    assert levels(place_checks.store, facts_with(places=(("Mine", seen),))) == [NOT_KNOWN]


def test_the_page_says_every_line_in_every_format() -> None:
    bad = "a\x1b[2J"
    lines = (
        Line("hooks", PROBLEM, bad, "mend it"),
        Line("store", WARNING, "full"),
        Line("x", NOT_KNOWN, "y"),
    )
    answer = DoctorAnswer((*lines, Line("vllm", OK, "fine")))
    for text in (terminal(doctor_page(answer), Screen()), markdown(doctor_page(answer))):
        assert "\x1b" not in text and "1 problem, 1 warning." in text
        assert all(word in text for word in ("PROBLEM", "warning", "not known", "ok", "mend it", "full"))
    document = answer.document()
    assert document["schema"] == "kvtrace.doctor/1" and document["problem"] == 1
    assert document["lines"][0] == {"check": "hooks", "level": "problem", "text": bad, "remedy": "mend it"}


def test_what_vllms_offloading_cannot_start_without() -> None:
    module = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
    one = replace(CLASS, name="OffloadingConnector", module=module)
    (line,) = class_checks.required(facts_with(classes=(one,)))
    assert line.level is PROBLEM and "cpu_bytes_to_use" in line.text and "--kv-offloading-size" in line.remedy
    assert '{"cpu_bytes_to_use": 8589934592}' in mask_text(line.remedy), "as people read it"
    for extra in ({"cpu_bytes_to_use": 1 << 30}, {"spec_name": "MySpec"}):
        assert levels(class_checks.required, facts_with(classes=(replace(one, extra=extra),))) == []
    words = replace(COMMAND, words=(*COMMAND.words, "--kv-offloading-size=4"))
    assert levels(class_checks.required, facts_with(classes=(one,), command=words)) == []
    assert levels(class_checks.required, facts_with(classes=(replace(one, module="mine"),))) == []


def test_hooks_are_given_their_arguments_by_place() -> None:
    class Base:
        def handle_preemptions(self, kv_connector_metadata): ...
        def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    class Own(Base):
        def handle_preemptions(self, **kwargs): ...
        def save_kv_layer(self, name, *args, **kwargs): ...

    Own.__module__ = "mine"
    rows = {row.name: row.fits for row in signatures.signatures(Own, Base)}
    assert rows == {"handle_preemptions": False, "save_kv_layer": True}


def test_a_body_of_one_del_does_nothing() -> None:
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata):
        """Saved in wait_for_save."""
        del layer_name, kv_layer, attn_metadata

    assert does_nothing(save_kv_layer)
