"""Texts of foreign origin (messages of exceptions, log records) without what was put into them.

A connector may write prompts, token ids or keys into its messages. What is kept of a text is what stands in
the source: fragments that are constants of the functions it came through, or of the class they belong to. The
rest becomes "…": ``cannot store 3 blocks of "alice"`` is kept as ``cannot store … blocks of …``. Of what
compiled code says, which has no such constants, plain words are kept, and quoted ones that are names in the
source; other quoted text, numbers and names are not. ``--keep-messages`` keeps all.
"""

from __future__ import annotations

import dis
import functools
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Set
from itertools import islice
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

from kvtrace.agent.code.traces import entries, outwards
from kvtrace.trace.mask import mask_text

LEFT_OUT = "…"
_MOST_READ = 2000
_MOST_SAID = 500
_MOST_FRAMES = 64
_MOST_FUNCTIONS = 200
_FIELD = re.compile(r"%(?:\(\w{0,99}\))?[-#0 +]{0,9}[\d.*]{0,9}[hlL]?[diouxXeEfFgGcrsa%]|\{[^{}]{0,99}\}")
_LETTERS = re.compile(r"[^\W\d_]")
_QUOTED = re.compile(r"""'[^'\n]*'|"[^"\n]*"|\[[^\]\n]*\]|\{[^}\n]*\}|<[^>\n]*>""")
_PLAIN = re.compile(r"\(?(?:[A-Z]{1,6}|[A-Z]?[a-z]{1,15})(?:[-/][a-z]{1,15})?\)?[.,:;!?]{0,3}\Z")


def of_exception(
    error: BaseException, keep: bool = False, most: int = _MOST_SAID, trace: TracebackType | None = None
) -> str:
    """Its message, at most so many characters; "" where it has none, or none that can be had."""
    trace = trace or error.__traceback__
    try:
        text = str(error)[:_MOST_READ]
        if keep:
            return mask_text(text)[:most]
        if isinstance(error, OSError) and isinstance(error.errno, int):
            known = os.strerror(error.errno)
            if error.strerror in (known, None):
                return mask_text(f"[Errno {error.errno}] {known}{_at(error.filename)}")[:most]
            text = f"[Errno {error.errno}] {error.strerror}"[:_MOST_READ]
            frames = list(_frames(trace))
            fragments = _written(error, [trace.tb_frame for trace in frames]) | {f"[Errno {error.errno}]"}
            return mask_text(_template(text, fragments))[:most]
        frames = list(_frames(trace))
        if frames and not _raised_there(frames[-1]):
            names = {name for trace in frames for name in trace.tb_frame.f_code.co_names}
            text = "\n".join(_plain(line, names) for line in text.splitlines())
        else:
            text = _template(text, _written(error, [trace.tb_frame for trace in frames]))
        return mask_text(text)[:most]
    except Exception:
        return ""


def of_record(record: logging.LogRecord, keep: bool = False) -> str:
    """The message of a log record, in the stack of the call that made it."""
    arguments: Any = record.args if isinstance(record.args, tuple) else (record.args,)
    # formatting a tensor would read device memory
    readable = all(not type(value).__module__.startswith("torch") for value in arguments)
    try:
        text = record.getMessage() if readable else str(record.msg)
    except Exception:
        text = str(record.msg)
    if keep:
        return mask_text(text[:_MOST_READ])[:_MOST_SAID]
    errors = [value for value in arguments if isinstance(value, BaseException)]
    if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None:
        errors.append(record.exc_info[1])
    fragments = set(_fragments([record.msg] if record.args else []))
    frame = _maker(record)
    if frame is not None:
        fragments |= _written(None, [frame])
    for error in errors:
        fragments |= _written(error, [trace.tb_frame for trace in _frames(error.__traceback__)])
        if isinstance(error, OSError) and error.strerror:
            fragments.add(os.strerror(error.errno or 0))
    return mask_text(_template(text[:_MOST_READ], fragments))[:_MOST_SAID]


_configured: dict[str, None] = {}
_MOST_CONFIGURED = 64


def know_paths(value: Any, depth: int = 0) -> None:
    """Absolute paths that stand in a connector's configuration: these are recorded anyway."""
    if isinstance(value, str):
        if value.startswith("/") and len(_configured) < _MOST_CONFIGURED:
            _configured[os.path.normpath(value)] = None
    elif depth < 6 and isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            know_paths(inner, depth + 1)


def _at(filename: Any) -> str:
    """The path that could not be had, as far as the configuration names it: nothing below that."""
    path = os.path.normpath(filename) if isinstance(filename, str) and filename.startswith("/") else ""
    for known in _configured if path else ():
        if known == path or known.startswith(path.rstrip("/") + "/"):
            return f": {path!r}"
        if path.startswith(known.rstrip("/") + "/"):
            return f": {known + '/' + LEFT_OUT!r}"
    return ""


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    return islice(entries(trace), _MOST_FRAMES)


def _raised_there(trace: TracebackType) -> bool:
    """Whether a ``raise`` stands where an exception came from; else compiled code raised it."""
    code = trace.tb_frame.f_code.co_code
    at = trace.tb_lasti
    return 0 <= at < len(code) and dis.opname[code[at]] in ("RAISE_VARARGS", "RERAISE")


def _maker(record: logging.LogRecord) -> FrameType | None:
    wanted = (record.pathname, record.funcName)
    frames = outwards(sys._getframe(1), _MOST_FRAMES)
    return next((one for one in frames if (one.f_code.co_filename, one.f_code.co_name) == wanted), None)


def _written(error: BaseException | None, frames: list[FrameType]) -> set[str]:
    """Pieces of text that stand in the source of these calls, and of the classes that they stand in."""
    classes = {cls for cls in map(_class_of, frames) if cls is not None}
    if error is not None:
        classes.add(type(error))
    found = {fragment for frame in frames for fragment in _of_code(frame.f_code)}
    return found.union(*(_of_class(cls) for cls in classes))


def _class_of(frame: FrameType) -> type | None:
    """The class that the code of a frame stands in; up to Python 3.10 code does not say that."""
    found: Any = None
    for name in str(getattr(frame.f_code, "co_qualname", "")).split(".")[:-1]:
        found = frame.f_globals.get(name) if found is None else vars(found).get(name)
        if not isinstance(found, type):
            return None
    return found if isinstance(found, type) else None


@functools.lru_cache(256)
def _of_code(code: CodeType) -> frozenset[str]:
    return frozenset(_fragments(_constants(code)))


@functools.lru_cache(64)
def _of_class(cls: type) -> frozenset[str]:
    values = [value for base in cls.__mro__ for value in list(vars(base).values())]
    methods = [value.__code__ for value in values if isinstance(value, FunctionType)]
    return frozenset[str]().union(*map(_of_code, methods[:_MOST_FUNCTIONS]))


def _constants(code: CodeType, depth: int = 0) -> Iterator[object]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            if depth < 5:
                yield from _constants(value, depth + 1)
        elif isinstance(value, tuple):
            yield from value
        else:
            yield value


def _fragments(constants: Iterable[object]) -> Iterator[str]:
    """What stands between the fields of each constant that is a text with words."""
    for value in constants:
        if isinstance(value, str) and len(value) <= _MOST_READ:
            for fragment in _FIELD.split(value):
                if len(_LETTERS.findall(fragment)) > 1:
                    yield fragment.strip()


def _template(text: str, fragments: set[str]) -> str:
    """``text`` with what is none of these fragments left out; a fragment counts where it stands by itself."""
    keep = bytearray(len(text))
    for fragment in fragments:
        at = text.find(fragment)
        while at >= 0:
            end = at + len(fragment)
            if not _joined(text, at) and not _joined(text, end):
                keep[at:end] = b"\1" * len(fragment)
            at = text.find(fragment, end)
    return _shown("".join(c if keep[i] or c.isspace() else LEFT_OUT for i, c in enumerate(text)))


def _joined(text: str, at: int) -> bool:
    """Whether a word goes on across that place."""
    return 0 < at < len(text) and (text[at - 1].isalnum() or text[at - 1] == "_") and text[at].isalnum()


def _plain(line: str, names: Set[str]) -> str:
    """Plain words, and quoted names that the source has: ``type … has no attribute 'reshape_as'``."""
    line = _QUOTED.sub(lambda quoted: quoted[0] if quoted[0][1:-1] in names else f" {LEFT_OUT} ", line)
    kept = (word if _PLAIN.match(word) or _QUOTED.match(word) else LEFT_OUT for word in line.split())
    return _shown(" ".join(kept))


def _shown(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(re.sub(f"{LEFT_OUT}(?: ?{LEFT_OUT})*", LEFT_OUT, line) for line in lines)
