"""All that ``kvtrace doctor`` finds out, before anything is said of it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtrace.agent.preflight import facts
from kvtrace.agent.preflight.facts import Class, CommandLine, ExtraKeys, Parsed, Planned, Python
from kvtrace.doctor import child, places, spy, vllm_sources
from kvtrace.doctor.child import LookStep
from kvtrace.doctor.command import ServeCommand, read_command
from kvtrace.doctor.places import PlaceSeen
from kvtrace.doctor.vllm_sources import FoundTarget
from kvtrace.launch.errors import LaunchError, reason
from kvtrace.trace.facts import D


@dataclass(frozen=True)
class DoctorFacts:
    """What was found out.

    Attributes:
        command: as it was taken apart; its ``words`` are () where none was given.
        connector: ``module:Class`` as asked for, "" where none was.
        steps: of the look inside of the command's Python; {} where there was none.
        targets: None where vLLM's sources are not known.
        spy: as :func:`kvtrace.doctor.spy.may_look`.
    """

    command: ServeCommand
    connector: str = ""
    kvtrace: str = ""
    steps: Mapping[str, LookStep] = field(default_factory=dict)
    targets: list[FoundTarget] | None = None
    places: tuple[tuple[str, PlaceSeen], ...] = ()
    """(class of the connector whose configuration names it, what is there)"""
    spy: str | None = None

    def fact(self, step: str) -> dict[str, Any]:
        one = self.steps.get(step)
        return one.facts if one is not None and one.state == "done" else {}

    def _read(self, step: str, kind: type[D]) -> D | None:
        found = self.fact(step)
        return kind.from_json(found) if found else None

    @property
    def python(self) -> Python | None:
        return self._read(facts.PYTHON, Python)

    @property
    def vllm(self) -> str:
        """Its version, as far as it can be told; "" where there is none."""
        return str(self.fact(facts.IMPORT).get("version") or (self.python and self.python.vllm) or "")

    @property
    def parsed(self) -> Parsed | None:
        return self._read(facts.PARSE, Parsed)

    @property
    def classes(self) -> list[Class]:
        return [Class.from_json(row) for row in self.fact(facts.CONNECTOR).get("classes", ())]

    @property
    def keys(self) -> list[ExtraKeys]:
        return [ExtraKeys.from_json(row) for row in self.fact(facts.KEYS).get("keys", ())]

    @property
    def engine(self) -> Planned | None:
        return self._read(facts.ENGINE, Planned)


def gather(
    words: Sequence[str],
    connector: str,
    environ: Mapping[str, str],
    seconds: float,
    give_up: child.GiveUp | None = None,
) -> DoctorFacts:
    """Everything, for a command line (may be empty) or a connector's class.

    Args:
        connector: ``module:Class``, or "".
        seconds: how long each step of the look at vLLM may take.

    Raises:
        LaunchError: there is no such program, or no place for temporary files.
    """
    ours = ServeCommand((), environ, sys.executable, sys.executable, str(Path.cwd()))
    command = read_command(words, environ) if words else ours
    steps: Mapping[str, LookStep] = {}
    if command.python is not None:
        asked = CommandLine(connector, command.kind, command.parsed, command.transfer, command.path0)
        wait = give_up or (lambda step, taken: taken > seconds + 2)
        try:
            steps = child.look(command.python, command.environ, asked, wait, seconds)
        except OSError as error:
            raise LaunchError("cannot look at the command's Python", command.python, reason(error)) from error
    found = DoctorFacts(command, connector, importlib.metadata.version("kvtrace"), steps)
    return replace(found, targets=_targets(found), places=tuple(_places(found)), spy=spy.may_look())


def _targets(found: DoctorFacts) -> list[FoundTarget] | None:
    folder = found.python.folder if found.python else None
    version = vllm_sources.parse_version(found.vllm)
    if folder is None or not version:
        return None
    try:
        read = vllm_sources.open_sources(Path(os.path.dirname(folder)))
        return vllm_sources.check(read, version)
    except (vllm_sources.NoVllm, OSError, SyntaxError, ValueError):
        return None


def _places(found: DoctorFacts) -> list[tuple[str, PlaceSeen]]:
    """Those of each connector's configuration; of the command line's words where no class was found."""
    named = [(one.name or one.configured, one.extra or {}) for one in found.classes]
    if not named and found.command.transfer:
        extra = found.command.transfer.get("kv_connector_extra_config")
        named = [
            (str(found.command.transfer.get("kv_connector", "")), extra if isinstance(extra, dict) else {})
        ]
    owners = [(name, place) for name, extra in named for place in places.places(extra)]
    seen = places.look([place for _, place in owners])
    return [(name, one) for (name, _), one in zip(owners, seen, strict=True)]
