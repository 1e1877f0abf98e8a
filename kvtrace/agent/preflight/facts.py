"""What a look at the user's vLLM and connector finds out before a run: plain values, for ``kvtrace doctor``.

Made in a process of the user's Python, handed over as JSON. A value that could not be had is None, or the
step that would have had it did not end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtrace.trace.facts import Document

PYTHON, IMPORT, PLUGINS, PARSE, CONNECTOR, KEYS, ENGINE = STEPS = (
    "python",
    "vllm",
    "plugins",
    "parse",
    "connector",
    "keys",
    "engine",
)
"""In the order in which they are done; each says as it begins and as it ends."""


@dataclass(frozen=True)
class CommandLine(Document):
    """What the process is to look at.

    Attributes:
        connector: ``module:Class``, or "".
        kind: of command line: ``serve``, ``api-server``; "" where vLLM's parser is not for it.
        words: for vLLM's parser.
        transfer: the KV transfer configuration where vLLM's parser does not say; None where none is known.
        path0: where the command's Python looks for modules first.
    """

    connector: str = ""
    kind: str = ""
    words: tuple[str, ...] = ()
    transfer: dict[str, Any] | None = None
    path0: str = ""


@dataclass(frozen=True)
class Python(Document):
    """The command's Python and what is installed there, without an import."""

    version: str = ""
    executable: str = ""
    vllm: str | None = None
    torch: str | None = None
    folder: str | None = None
    """Of the package vllm."""
    in_c: bool = False
    """Whether the recorder in C is there for it."""


@dataclass(frozen=True)
class Parsed(Document):
    """What vLLM's own parser made of the command line.

    ``refused``: its last line where it ended the program; ``transfer``: the KV transfer configuration, None
    where none was given.
    """

    refused: str = ""
    transfer: dict[str, Any] | None = None


@dataclass(frozen=True)
class Signature(Document):
    """A hook that the connector has of its own.

    ``given``, ``takes``: parameters of vLLM's and of the connector's, without self; ``fits``: whether a call
    as vLLM's base class has it can be made.
    """

    name: str = ""
    given: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    fits: bool = False


@dataclass(frozen=True)
class Class(Document):
    """A connector's class, not made into an instance.

    Attributes:
        configured: name by which it is asked for.
        error: why there is none, "" where there is one; ``where``: the connector's own line in that.
        resolves: whether that name in the configured module is this class.
        based: whether it is a KVConnectorBase_V1.
        abstract: methods that it must have and has not.
        overrides: hooks of the installed vLLM that it has of its own.
        idle: those of them that do nothing, by their byte code.
        elsewhere: hooks of other versions that it has, which the installed vLLM never calls.
        like: (a method that is no hook, the hook that it is named like).
        piecewise: its answer to requires_piecewise_for_cudagraph; None where there is none.
        batched: where (module:line) its source rounds down to multiples of max_num_batched_tokens.
        role, extra: of its configuration.
    """

    configured: str = ""
    error: str = ""
    where: str = ""
    name: str = ""
    module: str = ""
    file: str = ""
    resolves: bool | None = None
    based: bool = True
    abstract: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    signatures: tuple[Signature, ...] = ()
    like: tuple[tuple[str, str], ...] = ()
    piecewise: bool | None = None
    batched: tuple[str, ...] = ()
    role: str | None = None
    extra: dict[str, Any] | None = None


@dataclass(frozen=True)
class ExtraKeys(Document):
    """Keys of a connector's extra configuration. ``known``: whether its source says which it asks for."""

    given: tuple[str, ...] = ()
    known: bool = False
    unread: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned(Document):
    """vLLM's configuration as it would start with, made without a model's weights and without a device."""

    block_size: int | None = None
    set_by_user: bool | None = None
    context_parallel: int = 1
    several_groups: bool | None = None
    """Whether the model has layers of several kinds, whose blocks may differ in size."""
    graph_mode: str | None = None
    max_num_batched_tokens: int | None = None
    connector: str | None = None
    states: bool = False
    """Whether some of its layers keep a state a request (Mamba, linear attention)."""
    encoder: bool = False
    """Whether it is an encoder with a decoder: cross attention."""
    one_group: bool | None = None
    """Whether vLLM's hybrid KV cache manager is off: all layers are in one group, or vLLM refuses."""
