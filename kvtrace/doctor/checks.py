"""The checks of ``kvtrace doctor``: pure functions from the facts to lines. A check that cannot know says so;
what would stop or lose nothing for sure is no problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvtrace import mend
from kvtrace.agent.preflight import facts
from kvtrace.doctor.answer import NOT_KNOWN, OK, PROBLEM, WARNING, DoctorAnswer, Line
from kvtrace.doctor.child import LookStep
from kvtrace.doctor.class_checks import CLASS_CHECKS
from kvtrace.doctor.gather import DoctorFacts
from kvtrace.doctor.place_checks import store, stuck
from kvtrace.doctor.vllm_sources import parse_version
from kvtrace.launch.environment import PLUGINS_VARIABLE
from kvtrace.launch.interpreter import ENTRY_POINT_NAME
from kvtrace.trace.mask import mask_text
from kvtrace.versions import NEWEST, OLDEST
from kvtrace.words import listed

Check = Callable[[DoctorFacts], Iterator[Line]]
_OLDEST_PYTHON = (3, 10)


def answer(found: DoctorFacts) -> DoctorAnswer:
    """Every check's lines, in the order of :data:`CHECKS`, without secrets."""
    lines = tuple(_masked(line) for check in CHECKS for line in check(found))
    return DoctorAnswer(lines, tuple(_row(one) for one in found.classes))


def _masked(line: Line) -> Line:
    return replace(line, text=mask_text(line.text), remedy=mask_text(line.remedy))


def _row(one: facts.Class) -> dict[str, object]:
    names = "configured", "name", "module", "file", "abstract", "overrides", "idle", "elsewhere", "piecewise"
    return {name: getattr(one, name) for name in names}


# --- the Python and vLLM ---------------------------------------------------------------------------


def python(found: DoctorFacts) -> Iterator[Line]:
    step = found.steps.get(facts.PYTHON)
    if found.command.python is None:
        yield Line(
            "python", NOT_KNOWN, f"which Python {found.command.program} starts does not show in it",
            "give the command that it runs in the end: kvtrace doctor -- vllm serve MODEL ...",
        )  # fmt: skip
    elif found.python is None:
        why = f": {step.error}" if step is not None and step.error else ""
        yield Line(
            "python", WARNING, f"{found.command.python} could not be asked{why}",
            f"see whether {found.command.python} starts",
        )  # fmt: skip
    else:
        version = found.python.version
        if parse_version(version) < _OLDEST_PYTHON:
            yield Line(
                "python", PROBLEM, f"Python {version}: kvtrace's agent needs 3.10 or newer",
                "run vLLM in a newer Python",
            )  # fmt: skip
        else:
            recorder = "in C" if found.python.in_c else "in Python: a hook's call costs twice as much as in C"
            yield Line("python", OK, f"Python {version}, {found.python.executable}; recorder {recorder}")


def versions(found: DoctorFacts) -> Iterator[Line]:
    if found.python is None:
        return
    step = found.steps.get(facts.IMPORT, LookStep(""))
    if found.python.folder is None and step.state != "done":
        level = PROBLEM if found.command.kind else NOT_KNOWN
        yield Line(
            "vllm", level, f"no vLLM is installed in {found.python.executable}",
            "give the command of your vLLM: kvtrace doctor -- vllm serve MODEL ...",
        )  # fmt: skip
        return
    vllm, torch = found.vllm or "(of no known version)", found.python.torch or "not installed"
    what = f"vLLM {vllm}, torch {torch}, kvtrace {found.kvtrace}"
    version = parse_version(found.vllm)
    if step.state in ("raised", "died"):
        yield Line("vllm", PROBLEM, f"{what}: importing vllm fails: {step.error}", "mend the installation")
    elif step.state == "hung":
        yield Line(
            "vllm", NOT_KNOWN, f"{what}: importing vllm took too long", "give more time: --timeout 600"
        )
    elif len(version) < 2:
        yield Line("vllm", NOT_KNOWN, f"{what}: a version that kvtrace cannot compare with its own tables")
    elif not parse_version(OLDEST) <= version <= parse_version(NEWEST):
        yield Line(
            "vllm", WARNING, f"{what}: kvtrace's tables cover {OLDEST} to {NEWEST}",
            "see the lines on targets" if version > parse_version(NEWEST) else "use a newer vLLM",
        )  # fmt: skip
    else:
        yield Line("vllm", OK, f"{what}; covered: {OLDEST} to {NEWEST}")


def targets(found: DoctorFacts) -> Iterator[Line]:
    if found.python is None or not found.vllm:
        return
    if found.targets is None:
        yield Line(
            "targets", NOT_KNOWN, "vLLM's sources could not be read, so neither could the hooks' places"
        )
        return
    due = [one for one in found.targets if one.hooked and one.expected]
    missing = [one for one in due if one.problems]
    read = [one for one in found.targets if not one.hooked and one.expected and one.problems]
    for one in missing:
        yield Line(
            "targets", WARNING, f"{one.target.id} will not be hooked: {'; '.join(one.problems)}",
            "what it would have shown is not observed; see docs/concepts.md",
        )  # fmt: skip
    if read:
        names = listed(one.target.id for one in read)
        yield Line(
            "targets", WARNING, f"names that kvtrace reads are not there: {names}",
            "what they tell is not observed; a newer kvtrace may know this vLLM",
        )  # fmt: skip
    if due and not missing and not read:
        yield Line("targets", OK, f"{len(due)} of {len(due)} places that kvtrace hooks are in this vLLM")


def way_in(found: DoctorFacts) -> Iterator[Line]:
    if found.command.python is None:
        return
    allowed = found.command.environ.get(PLUGINS_VARIABLE)
    if found.command.isolated:
        yield Line(
            "way in", WARNING, "this Python ignores PYTHONPATH (-I or -E), by which kvtrace comes in first",
            "leave out -I and -E, or install kvtrace in that Python",
        )  # fmt: skip
    elif allowed is None:
        yield Line("way in", OK, f"{PLUGINS_VARIABLE} is not set: vLLM loads every plugin, kvtrace's too")
    else:
        yield Line("way in", OK, f"{PLUGINS_VARIABLE}={allowed}: kvtrace run adds {ENTRY_POINT_NAME} to it")
    step = found.steps.get(facts.PLUGINS)
    if step is not None and step.state != "done":
        how = {"hung": "did not end", "died": f"ended the process ({step.error})"}.get(step.state, step.error)
        yield Line("way in", WARNING, f"loading vLLM's plugins: {how}", "see which plugin it is")


# --- the command line ------------------------------------------------------------------------------


def command(found: DoctorFacts) -> Iterator[Line]:
    words = found.command.words
    if not words:
        return
    parsed = found.parsed
    if not found.command.kind:
        seen = "; --kv-transfer-config was read from its words" if found.command.transfer else ""
        yield Line(
            "command", NOT_KNOWN,
            f"{words[0]}: how it configures vLLM shows only when it runs{seen}",
            "" if seen else "check the class alone: kvtrace doctor --connector module:Class -- COMMAND",
        )  # fmt: skip
    elif parsed is not None and parsed.refused:
        yield Line(
            "command", PROBLEM, f"vLLM's own parser refuses it: {mend.in_short(parsed.refused)}",
            mend.remedy(parsed.refused) or "mend the command line",
        )  # fmt: skip
    elif parsed is not None:
        yield Line("command", OK, "read with vLLM's own parser")
    elif facts.PARSE in found.steps:
        step = found.steps[facts.PARSE]
        yield Line(
            "command", NOT_KNOWN, f"vLLM's own parser could not be asked ({step.error or step.state}): what "
            "follows is from the words alone",
        )  # fmt: skip


def configuration(found: DoctorFacts) -> Iterator[Line]:
    """Whether vLLM accepts the whole of it, and what it makes of graphs and blocks."""
    step = found.steps.get(facts.ENGINE)
    if step is None or not found.command.kind:
        return
    if step.state == "raised":
        yield Line(
            "engine", WARNING, f"vLLM's configuration could not be made here: {step.error}",
            "started here, the run would end in the same way",
        )  # fmt: skip
    elif step.state == "hung":
        yield Line("engine", NOT_KNOWN, "making vLLM's configuration took too long (a download?)")
    elif step.state == "died":
        yield Line("engine", WARNING, f"making vLLM's configuration ended the process: {step.error}")


def blocks(found: DoctorFacts) -> Iterator[Line]:
    engine = found.engine
    if engine is None or not engine.block_size:
        if found.command.words and found.python is not None:
            yield Line("blocks", NOT_KNOWN, "the block size shows only when the engine starts")
        return
    size = engine.block_size * engine.context_parallel
    text = f"{size} tokens"
    if engine.context_parallel > 1:
        text += f" ({engine.block_size} x {engine.context_parallel} for context parallelism)"
    connector = engine.connector
    if engine.encoder and connector:
        yield Line(
            "blocks", PROBLEM, "vLLM starts no encoder with a decoder together with a KV connector",
            "serve this model without --kv-transfer-config",
        )  # fmt: skip
    elif engine.states and connector and engine.one_group:
        yield Line(
            "blocks", PROBLEM,
            f"this model has layers that keep a state (Mamba, linear attention), and {connector} does not "
            "support the hybrid KV cache manager: vLLM refuses to start",
            "a connector that is a SupportsHMA, with request_finished_all_groups",
        )  # fmt: skip
    elif engine.several_groups and not engine.one_group:
        yield Line(
            "blocks", NOT_KNOWN,
            f"{text} configured; this model has layers of several kinds, whose groups may have blocks of "
            "other sizes: that shows only when the engine starts",
        )  # fmt: skip
    else:
        later = "" if engine.set_by_user else "; the attention backend may still choose another"
        yield Line("blocks", OK, f"{text} a block{later}")


CHECKS: tuple[Check, ...] = (
    python, versions, targets, way_in, command, configuration, *CLASS_CHECKS, blocks, store, stuck,
)  # fmt: skip
