"""What a command line starts, as far as it shows: the Python, the words for vLLM's parser, the connector.
Pure but for looking at the program's file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtrace.launch.commands import ignores_pythonpath, is_python, module_of
from kvtrace.launch.interpreter import find_program, interpreter_of
from kvtrace.trace.options import transfer_in

SERVE, API_SERVER = "serve", "api-server"
_API_SERVER = "vllm.entrypoints.openai.api_server"
_COMMANDS = ("vllm", "vllm.entrypoints.cli.main")


@dataclass(frozen=True)
class ServeCommand:
    """A command line, taken apart.

    Attributes:
        words: as typed, without a leading ``env NAME=VALUE ...``.
        environ: the environment that it runs in.
        program: the file that runs.
        python: the interpreter, None where that is not certain.
        path0: where that Python looks for modules first.
        kind: ``serve``, ``api-server``; "" where vLLM's parser is not for it.
        parsed: the words for vLLM's parser.
        transfer: the KV transfer configuration in its words, None where there is none that can be read.
        isolated: whether it makes Python ignore PYTHONPATH.
    """

    words: tuple[str, ...]
    environ: Mapping[str, str]
    program: str
    python: str | None
    path0: str
    kind: str = ""
    parsed: tuple[str, ...] = ()
    transfer: dict[str, Any] | None = field(default=None)
    isolated: bool = False


def read_command(words: Sequence[str], environ: Mapping[str, str]) -> ServeCommand:
    """Takes a command line apart.

    Raises:
        LaunchError: there is no such program.
    """
    words, environ = _without_env(list(words), dict(environ))
    program = find_program(words, environ)
    named = [os.path.basename(program), *words[1:]]
    if is_python(named):
        module, rest = module_of(words)
        kind, parsed = _of_module(module, rest)
        script = "" if module or not rest else rest[0]
        if script and os.path.basename(script) == "vllm":
            kind, parsed = _of_vllm(rest[1:])
        path0 = (
            os.path.dirname(os.path.realpath(script)) if script and os.path.isfile(script) else os.getcwd()
        )
        python: str | None = program
    else:
        found = interpreter_of(program, environ)
        python = None if found is None else str(found)
        path0 = os.path.dirname(os.path.realpath(program))
        kind, parsed = _of_vllm(words[1:]) if os.path.basename(program) == "vllm" else ("", ())
    transfer = transfer_in(words)
    isolated = ignores_pythonpath(list(words))
    return ServeCommand(tuple(words), environ, program, python, path0, kind, parsed, transfer, isolated)


def _without_env(words: list[str], environ: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """``env NAME=VALUE ... command`` as the command and its environment; with options of env as it is."""
    if words and os.path.basename(words[0]) == "env":
        at = 1
        while at < len(words) and "=" in words[at] and not words[at].startswith("-"):
            at += 1
        if at < len(words) and not words[at].startswith("-"):
            for word in words[1:at]:
                name, _, value = word.partition("=")
                environ[name] = value
            return words[at:], environ
    return words, environ


def _of_vllm(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    return (SERVE, tuple(words)) if words and words[0] == "serve" else ("", ())


def _of_module(module: str, rest: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    if module == _API_SERVER:
        return API_SERVER, tuple(rest)
    return _of_vllm(rest) if module in _COMMANDS else ("", ())
