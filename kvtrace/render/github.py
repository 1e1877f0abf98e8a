"""The outcome of a gate as GitHub Actions workflow commands: annotations beside the files that ask."""

from __future__ import annotations

import re

from kvtrace.gate.outcome import GateOutcome
from kvtrace.render.check import groups, sentence, subject
from kvtrace.words import clean

MAX_ANNOTATIONS = 10
"""GitHub shows no more of one kind in one step."""


def commands(outcome: GateOutcome) -> list[str]:
    """Annotations: one error a finding that explains failures and one a failure that none explains."""
    lines = []
    for group in groups(outcome):
        if group.cause is None:
            for check in group.checks:
                title = f"kvtrace: {subject(check)[0]}"
                more = f". {clean(check.remedy)}" if check.remedy else ""
                lines.append(_command("error", title, sentence(check) + more, check.source, check.line))
            continue
        first = next((check for check in group.checks if check.line), group.checks[0])
        body = [
            clean(group.cause.title),
            *(sentence(check) for check in group.checks if check.kind != "finding"),
        ]
        body = [*body[:8], *(f"Remedy: {line}" for line in group.remedies)]
        title = f"kvtrace: {clean(group.cause.id, 80)}"
        lines.append(_command("error", title, "\n".join(body), first.source, first.line))
    if len(lines) > MAX_ANNOTATIONS:
        more = f"and {len(lines) - MAX_ANNOTATIONS + 1} more regressions: see the log"
        lines[MAX_ANNOTATIONS - 1 :] = [_command("error", "kvtrace", more)]
    if good := outcome.of("better"):
        body = [sentence(check) for check in good[:8]]
        lines.append(_command("notice", "kvtrace: better than required", "\n".join(body)))
    return lines


def silenced(text: str, token: str) -> str:
    """`text` for a workflow log: nothing in it is taken for a workflow command.

    `token` is a random word of letters and digits that the text cannot hold.
    """
    if not re.fullmatch(r"[0-9A-Za-z]{16,}", token):
        raise ValueError("the token has to be a long random word")
    return f"::stop-commands::{token}\n{text.rstrip()}\n::{token}::\n"


def _command(level: str, title: str, message: str, file: str = "", line: int = 0) -> str:
    properties = [f"title={_property(clean(title, 120))}"]
    if file and line:
        properties = [f"file={_property(clean(file))}", f"line={line}", *properties]
    return f"::{level} {','.join(properties)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
