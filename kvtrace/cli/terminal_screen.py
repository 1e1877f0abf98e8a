"""A terminal that shows one picture after the other, and hears two keys."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtrace.render.styled import Styled

_BEGIN = "\x1b[?1049h\x1b[?25l"  # the other screen, without a cursor
_END = "\x1b[?25h\x1b[?1049l"
_KEYS = dict.fromkeys(b"qQ\x03\x04", "end") | dict.fromkeys(b"sS", "stacks")


def drawn(lines: list[Styled], colours: bool) -> str:
    """One picture over the last one: each line in its place, what stood behind it gone."""
    shown = [line.coloured() if colours else line.plain() for line in lines]
    return "\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in shown) + "\x1b[J"


class Keys:
    """The keyboard: what somebody asked for."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def asked(self, seconds: float) -> str:
        """Waits so long at most for a key: ``end`` (q, Ctrl-C) or ``stacks`` (s); "" for none."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
                return ""
            if not select.select([self._descriptor], [], [], left)[0]:
                return ""
            typed = os.read(self._descriptor, 64)
            if meant := {_KEYS[key] for key in typed if key in _KEYS}:
                return min(meant)  # the end goes first
            if not typed:  # nobody types any more
                self._descriptor = None
        return ""


@contextmanager
def taken_over() -> Iterator[Keys]:
    """The terminal for pictures; as it was before, whatever happens."""
    descriptor, before = None, None
    if sys.stdin is not None and sys.stdin.isatty():
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor, termios.TCSANOW)  # what was typed before counts
    try:
        sys.stdout.write(_BEGIN)
        sys.stdout.flush()
        yield Keys(descriptor)
    finally:
        if descriptor is not None and before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        sys.stdout.write(_END)
        sys.stdout.flush()
