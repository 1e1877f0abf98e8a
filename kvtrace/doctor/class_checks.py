"""The checks of a connector's class: found, whole, and its hooks against the installed vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from kvtrace import mend
from kvtrace.agent.preflight import facts
from kvtrace.agent.preflight.facts import Class, ExtraKeys, Planned, Signature
from kvtrace.doctor.answer import NOT_KNOWN, OK, PROBLEM, WARNING, Line
from kvtrace.doctor.gather import DoctorFacts
from kvtrace.trace import hooks
from kvtrace.words import listed

_MULTI = "MultiConnector"
_SAVING = (hooks.SAVE_LAYER.name, hooks.WAIT_SAVE.name)
_LAYERED = (hooks.SAVE_LAYER.name, hooks.WAIT_LAYER.name)
_LEAST: dict[str, int] = {"ExampleConnector": 1, "SharedStorageConnector": 1}
"""Connectors of vLLM that store whole blocks of a prompt without its last token: tokens beside a block."""


def _name(one: Class) -> str:
    return one.name or one.configured


def found_class(found: DoctorFacts) -> Iterator[Line]:
    """Which class would be live; why there is none."""
    step = found.steps.get(facts.CONNECTOR)
    if step is None:
        if found.connector or found.command.transfer:
            yield Line("connector", NOT_KNOWN, "vLLM is not there to ask for the connector's class")
        return
    if step.state == "hung":
        at = f" (it stood in {step.where})" if step.where else ""
        yield Line(
            "connector", WARNING, f"importing the connector did not end{at}",
            "what a module does at import keeps every process of vLLM waiting: move it into the constructor; "
            "or give more time: --timeout 600",
        )  # fmt: skip
    elif step.state == "died":
        yield Line(
            "connector", PROBLEM, f"importing the connector ended the process: {step.error}",
            "import it alone in this Python to see why",
        )  # fmt: skip
    elif step.state == "raised":
        yield Line("connector", NOT_KNOWN, f"looking at its class failed: {step.error}")
    elif not found.classes and found.command.kind and found.parsed and not found.parsed.refused:
        yield Line(
            "connector", WARNING, "no KV connector is configured: nothing will be saved or loaded",
            "add --kv-transfer-config '{\"kv_connector\": ..., \"kv_role\": \"kv_both\"}'",
        )  # fmt: skip
    for one in found.classes:
        yield _live(one)


def _live(one: Class) -> Line:
    if one.error:
        at = f" ({one.where})" if one.where else ""
        return Line(
            "connector", PROBLEM, f"{one.configured} is not to be had: {mend.in_short(one.error)}{at}",
            mend.remedy(one.error) or "vLLM would end at its start with the same error",
        )  # fmt: skip
    where = f"{one.module}.{one.name}" + (f" in {one.file}" if one.file else "")
    if not one.based:
        return Line(
            "connector", PROBLEM, f"{where} is no subclass of KVConnectorBase_V1", "derive it from that class"
        )
    if one.resolves is False:
        return Line(
            "connector", WARNING, f"{where} is live, not the {one.configured} of the configured module",
            "another class has the same name: see kvtrace docs wrong-connector-class",
        )  # fmt: skip
    role = f", {one.role}" if one.role else ""
    return Line("connector", OK, f"{where}{role}")


def whole(found: DoctorFacts) -> Iterator[Line]:
    for one in _there(found):
        if one.abstract:
            yield Line(
                "hooks", PROBLEM, f"{_name(one)} has no {listed(one.abstract, 8)}: vLLM cannot make it",
                "every connector must define these methods",
            )  # fmt: skip


def overridden(found: DoctorFacts) -> Iterator[Line]:
    """Hooks of its own: how many, and those that this vLLM never calls."""
    for one in _there(found):
        wrong = [row for row in one.signatures if not row.fits]
        for row in wrong:
            yield _misfit(one, row)
        for method, hook in one.like:
            yield Line(
                "hooks", WARNING, f"{_name(one)}.{method} is no hook of this vLLM, and nothing uses it",
                f"if it is meant to be {hook}, rename it",
            )  # fmt: skip
        if not wrong and not one.like and not one.abstract:
            never = (
                f"; of other versions, never called here: {listed(one.elsewhere)}" if one.elsewhere else ""
            )
            yield Line(
                "hooks", OK, f"{_name(one)} has {len(one.overrides)} methods of vLLM's API of its own{never}"
            )


def _misfit(one: Class, row: Signature) -> Line:
    takes, given = ", ".join(row.takes), ", ".join(row.given)
    return Line(
        "hooks", PROBLEM, f"{_name(one)}.{row.name}({takes}): this vLLM calls it with ({given})",
        "give it the parameters of the installed KVConnectorBase_V1",
    )  # fmt: skip


def saves(found: DoctorFacts) -> Iterator[Line]:
    """Where it saves, by its own code."""
    for one in _there(found):
        if one.name == _MULTI:
            continue
        active = [name for name in _SAVING if name in one.overrides and name not in one.idle]
        if active:
            each = {hooks.SAVE_LAYER.name: "for each layer", hooks.WAIT_SAVE.name: "once a step"}
            text = " and ".join(f"in {name} ({each[name]})" for name in active)
            yield Line("saves", OK, f"{_name(one)} has code {text}")
        elif all(name in one.idle for name in _SAVING):
            yield Line(
                "saves", OK, f"{_name(one)} saves elsewhere or not at all: {' and '.join(_SAVING)} do nothing"
            )


def graphs(found: DoctorFacts) -> Iterator[Line]:
    """What a step that is replayed as one graph leaves out."""
    engine = found.engine
    layered = [
        f"{_name(one)}.{name}"
        for one in _there(found)
        for name in _LAYERED
        if one.name != _MULTI and one.piecewise is False and name in one.overrides and name not in one.idle
    ]
    mode, names = engine.graph_mode if engine else None, listed(layered)
    if mode is None:
        if found.command.words and found.classes:
            yield Line("graphs", NOT_KNOWN, "the graph mode shows only when the engine starts")
        elif layered:
            yield Line(
                "graphs", NOT_KNOWN,
                f"requires_piecewise_for_cudagraph says that graphs may leave out {names}: the graph mode "
                "shows with the command",
            )  # fmt: skip
        return
    if "FULL" not in mode:
        yield Line("graphs", OK, f"graph mode {mode}: every layer's hooks run in Python")
    elif not layered:
        yield Line(
            "graphs", OK, f"graph mode {mode}; no work in hooks of single layers, which it may leave out"
        )
    else:
        yield Line(
            "graphs", WARNING,
            f"graph mode {mode}: in steps that are replayed as one graph vLLM does not call {names}, and "
            "requires_piecewise_for_cudagraph says that it need not",
            "return True from requires_piecewise_for_cudagraph, or set the graph mode to PIECEWISE, if these "
            "steps have KV to save or to wait for",
        )  # fmt: skip


def smallest(found: DoctorFacts) -> Iterator[Line]:
    """The shortest prompt of which anything is stored."""
    for one in _there(found):
        if one.name == _MULTI:
            continue
        size = _size(found.engine)
        if one.batched:
            yield _batched(one, found.engine)
        elif not found.command.words:
            continue
        elif one.name in _LEAST and one.module.startswith("vllm.") and size:
            least = size + _LEAST[one.name]
            text = f"{one.name} stores whole blocks of {size}: nothing of prompts below {least} tokens"
            yield Line("least prompt", OK, text)
        else:
            yield Line(
                "least prompt", NOT_KNOWN, f"in which unit {_name(one)} stores shows only in a run",
                "kvtrace run, then explain: below-save-granularity names the unit",
            )  # fmt: skip


def _batched(one: Class, engine: Planned | None) -> Line:
    limit = engine.max_num_batched_tokens if engine else None
    where = f"{_name(one)} rounds down to multiples of max_num_batched_tokens at {listed(one.batched)}"
    remedy = "round to a unit of the connector's own; see kvtrace docs below-save-granularity"
    if limit is None:
        text = f"{where}; how many these are shows with the command"
        return Line("least prompt", NOT_KNOWN, text, remedy)
    text = f"{where}: where these are a prompt's, nothing of prompts below {limit} tokens is stored"
    return Line("least prompt", WARNING, text, remedy)


def _size(engine: Planned | None) -> int:
    """Tokens in a block; 0 where that is not known."""
    if engine is None or engine.states or (engine.several_groups and not engine.one_group):
        return 0
    return (engine.block_size or 0) * engine.context_parallel


def config_keys(found: DoctorFacts) -> Iterator[Line]:
    for one, row in zip(found.classes, found.keys, strict=False):
        if not row.given or one.error:
            continue
        if one.name == _MULTI and one.module.startswith("vllm."):
            row = ExtraKeys(
                row.given, True, tuple(key for key in row.given if key != "connectors"), ("connectors",)
            )
        if not row.known:
            yield Line("config", NOT_KNOWN, f"which keys {_name(one)} asks for does not show in its source")
        elif not row.unread:
            yield Line("config", OK, f"{_name(one)} asks for every key that it is given")
        for key in row.unread:
            near = difflib.get_close_matches(key, row.asked, n=1)
            remedy = (
                f"did you mean {near[0]}?"
                if near
                else f"it asks for {listed(row.asked, 6)}"
                if row.asked
                else ""
            )
            yield Line("config", WARNING, f"{_name(one)} never asks for the key {key!r}", remedy)


_REQUIRED = {"OffloadingConnector": ("cpu_bytes_to_use", "spec_name", "--kv-offloading-size")}
"""Connector of vLLM -> a key that it can't start without; a key that brings another store, whose own keys are
not known here; an option of vLLM's that sets the first one."""


def required(found: DoctorFacts) -> Iterator[Line]:
    for one in _there(found):
        key, other, option = _REQUIRED.get(one.name, ("", "", ""))
        if not key or not one.module.startswith("vllm.") or not found.command.words:
            continue
        extra = one.extra or {}
        by_option = any(word.partition("=")[0] == option for word in found.command.words)
        if not extra.get(key) and other not in extra and not by_option:
            yield Line(
                "config", PROBLEM,
                f"{one.name} has no {key} in kv_connector_extra_config: vLLM ends at its start",
                f'add "kv_connector_extra_config": {{"{key}": 8589934592}} (8 GiB), or use '
                f"{option} GIB alone",
            )  # fmt: skip


def _there(found: DoctorFacts) -> list[Class]:
    return [one for one in found.classes if not one.error and one.based]


CLASS_CHECKS: tuple[Callable[[DoctorFacts], Iterator[Line]], ...] = (
    found_class, whole, overridden, saves, graphs, smallest, config_keys, required,
)  # fmt: skip
