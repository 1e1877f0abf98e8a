"""What verify answers: of each property one of four words, with numbers and the requests behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from kvtrace.errors import KvtraceError

SCHEMA = "kvtrace.verify/1"


class VerifyError(KvtraceError):
    """Nothing can be verified: usage, or a server that did not start."""


class Answer(Enum):
    """``FAILED`` alone makes the exit code 1."""

    PROVED = "proved"
    FAILED = "failed"
    NOT_APPLICABLE = "does not apply"
    NOT_OBSERVED = "not observed"


@dataclass(frozen=True)
class Verdict:
    """The answer for one property.

    Attributes:
        says: one sentence, with the numbers that decide.
        evidence: what was seen, a few lines.
        requests: the client's ids of the requests that show it, few.
        case: a workload that shows a failure by itself; "" none is known.
        alone: workloads that show by themselves whether what did not come back does.
    """

    answer: Answer
    says: str
    evidence: Sequence[str] = ()
    requests: Sequence[str] = ()
    case: str = ""
    alone: Sequence[str] = ()


proved = partial(Verdict, Answer.PROVED)
failed = partial(Verdict, Answer.FAILED)
not_applicable = partial(Verdict, Answer.NOT_APPLICABLE)
not_observed = partial(Verdict, Answer.NOT_OBSERVED)


class Stopped(BaseException):
    """The user wants no more. Whoever raises it, from a signal, gets what is known by then."""


@dataclass(frozen=True)
class Answered:
    """A property and what is true of it."""

    id: str
    title: str
    verdict: Verdict
    model: str = ""
    """The small model that it was tried on, "" the command's own."""

    @property
    def key(self) -> str:
        """``mla/outputs``."""
        return f"{self.model}/{self.id}" if self.model else self.id


@dataclass(frozen=True)
class Result:
    """What one ``kvtrace verify`` found.

    Attributes:
        subject: the connector, in words.
        run: the run directory, "" where none was kept.
        seed: of the prompts.
        again: the command that repeats a property's case alone, by property.
        notes: what the reader should know.
        stopped: before all was asked.
    """

    subject: str
    suite: str
    seed: int
    run: str
    answers: Sequence[Answered]
    again: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    seconds: float = 0.0
    stopped: bool = False

    @property
    def failed(self) -> list[Answered]:
        return [one for one in self.answers if one.verdict.answer is Answer.FAILED]

    @property
    def passed(self) -> bool:
        """Whether no property failed."""
        return not self.failed

    def __str__(self) -> str:
        """The failures, a line each, with the command that repeats each: for the message of an assertion."""
        lines = []
        for one in self.failed:
            lines.append(f"{one.key} failed: {one.verdict.says}")
            lines += [f"  {line}" for line in (*one.verdict.evidence, self.again.get(one.key, "")) if line]
        return "\n".join(lines) or f"no property failed ({self.subject})"

    def answer(self, ident: str) -> Answer:
        """Of the property with that id.

        Raises:
            KeyError: it was not asked.
        """
        return next(one.verdict.answer for one in self.answers if one.id == ident)

    def document(self) -> dict[str, Any]:
        """As JSON, in the shape of the published schema."""
        return {
            "schema": SCHEMA,
            "subject": self.subject,
            "suite": self.suite,
            "seed": self.seed,
            "run": self.run,
            "passed": self.passed,
            "stopped": self.stopped,
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
            "properties": [
                {
                    "id": one.id,
                    "model": one.model,
                    "title": one.title,
                    "answer": one.verdict.answer.value,
                    "says": one.verdict.says,
                    "evidence": list(one.verdict.evidence),
                    "requests": list(one.verdict.requests),
                    "case": one.verdict.case,
                    "again": self.again.get(one.key, ""),
                }
                for one in self.answers
            ],
        }
