"""kvtrace's own lines on stderr, beside what the command writes there."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvtrace.agent.state import complain
from kvtrace.launch.say import say


class _Raw(io.RawIOBase):
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written.append(bytes(data))
        return len(self.written[-1])


@pytest.mark.parametrize("speak", [say, complain])
def test_nothing_that_a_terminal_obeys_is_passed_on(
    speak: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    speak("cannot read \x1b]0;title\x07 a\u202eb\nkvtrace: all is well")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvtrace: cannot read ") and line.endswith("kvtrace: all is well")
    assert not {"\x1b", "\x07", "\u202e"} & set(line)


@pytest.mark.parametrize("speak", [say, complain])
def test_a_line_is_one_write_so_the_commands_lines_stay_whole(
    speak: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = _Raw()
    # As Python opens stderr with PYTHONUNBUFFERED=1: every write goes through at once.
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, write_through=True))
    speak("recording to x")
    assert raw.written == [b"kvtrace: recording to x\n"]
