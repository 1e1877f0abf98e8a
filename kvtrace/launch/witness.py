"""Was a signal sent to our whole process group, or to kvtrace alone?

The child shares kvtrace's process group. A signal for the group (Ctrl-C on the terminal,
``timeout``, ``kill -- -PGID``, a script's ``kill 0``) has reached it already; one for
kvtrace alone has not. The kernel does not say which it was, so a witness stands in the
group: a process that blocks every signal and, when asked, tells which ones wait for it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable

_GAP_SECONDS = 0.02
"""``timeout`` and ``systemd`` signal the members of a group one after the other."""
_PATIENCE_SECONDS = 1.0
"""A witness that somebody stopped does not answer."""


class Witness:
    """A forked process of a few hundred kilobytes; it ends when kvtrace does, however that is.

    The caller has blocked ``signals`` before, so that the witness never runs with them open.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self._signals = frozenset(signals)
        question, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _testify(question, answer, self._signals)
        os.close(question)
        os.close(answer)

    def seen(self) -> set[int]:
        """The signals that the whole group got since the last question.

        Empty where the witness is dead or stopped: forwarding once too often beats never.
        """
        time.sleep(_GAP_SECONDS)
        try:
            os.write(self._ask, b"?")
            ready, _, _ = select.select([self._answers], [], [], _PATIENCE_SECONDS)
            return set(os.read(self._answers, 128)) - {0} if ready else set()
        except OSError:
            return set()

    def dismiss(self) -> None:
        """End the witness and reap it."""
        os.close(self._ask)
        os.close(self._answers)
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass


def _testify(question: int, answer: int, signals: frozenset[int]) -> None:
    """The witness's life. Leaves by ``_exit`` only: nothing of kvtrace may run in it."""
    try:
        # Holding the terminal or a pipe of the command's would change when its readers see the end.
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (question, answer):
                try:
                    os.close(int(name))
                except OSError:
                    pass
        while os.read(question, 1):
            seen = []
            while (info := signal.sigtimedwait(signals, 0)) is not None:
                seen.append(info.si_signo)
            os.write(answer, bytes(seen or [0]))
    finally:
        os._exit(0)
