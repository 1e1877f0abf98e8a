"""What kind of handler took an exception: one for this type of it, or one for anything at all.

Read from the byte code of the frame that handled it. An ``except KeyError`` is control flow that somebody
meant; an ``except Exception`` takes the author's own mistakes as well.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from types import CodeType
from typing import Any

_ANYTHING = frozenset({"Exception", "BaseException"})
_MAX_HANDLERS = 16
_MAX_KEPT = 256
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR"})


def takes_anything(code: CodeType, at: int, names: Sequence[str]) -> bool | None:
    """Whether the handler that takes an exception is one for any: ``except Exception`` or a bare one.

    Args:
        code, at: of the frame that handled it, and the offset of the instruction that raised.
        names: of the exception's class and its bases; a handler that names one of them takes it.

    Returns None where that can't be said: before Python 3.11, or byte code that is not understood.
    """
    try:
        return _takes_anything(code, at, tuple(names))
    except Exception:
        return None


@functools.lru_cache(maxsize=_MAX_KEPT)
def _takes_anything(code: CodeType, at: int, names: tuple[str, ...]) -> bool | None:
    read = dis.Bytecode(code)
    ranges: Any = getattr(read, "exception_entries", ())  # start, end and target in bytes
    instructions = [one for one in read if one.opname not in ("NOP", "CACHE")]
    for _ in range(_MAX_HANDLERS):
        target = next((one.target for one in ranges if one.start <= at < one.end), None)
        if target is None:
            return None
        rest = [one for one in instructions if one.offset >= target]
        taken, at = _clauses(rest, names)
        if taken is not None:
            return taken
    return None


def _clauses(rest: Sequence[dis.Instruction], names: tuple[str, ...]) -> tuple[bool | None, int]:
    """Whether the first clause that takes it takes anything; None where it goes on to the next handler out,
    and the offset from which it does."""
    if len(rest) > 1 and rest[0].opname == "PUSH_EXC_INFO" and rest[1].opname == "POP_TOP":
        return True, rest[0].offset
    loaded: list[str] = []
    for one in rest:
        if one.opname in _LOADS:
            loaded.append(str(one.argval))
        elif one.opname == "CHECK_EXC_MATCH":
            if _ANYTHING.intersection(loaded):
                return True, one.offset
            if set(names).intersection(loaded):
                return False, one.offset
            loaded = []
        elif one.opname == "RERAISE":
            return None, one.offset
        elif one.opname in ("POP_EXCEPT", "STORE_FAST"):
            loaded = []
    return None, -1
