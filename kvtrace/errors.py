"""The base of every error that kvtrace itself raises: one clear line, no traceback.

Standard library only: any piece may raise it.
"""

from __future__ import annotations


class KvtraceError(Exception):
    """One line for a person: what went wrong, where, and what to do about it.

    ``KvtraceError("what", "where", "what to do")`` joins the parts with ``: ``; a single
    argument is the whole line. The command line prints it after ``kvtrace: `` and exits 2.
    """

    exit_code = 2

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)
        self.line = ": ".join(" ".join(str(part).split()) for part in parts if str(part).strip())

    def __str__(self) -> str:
        return self.line
