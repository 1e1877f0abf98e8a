"""JUnit XML for any CI's test report: of a gate one test case a check."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree as tree

from kvtrace.gate.outcome import Check, GateOutcome
from kvtrace.render.check import sentence, subject
from kvtrace.words import clean

# what XML 1.0 cannot hold, escaped or not
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(outcome: GateOutcome) -> str:
    """The document. It holds no times: the same outcome gives the same file."""
    suite = Suite("kvtrace check", "kvtrace check", len(outcome.checks), len(outcome.failed))
    properties = tree.SubElement(suite.element, "properties")
    for name, value in (("report", outcome.report), *(("gate", one) for one in outcome.asked)):
        tree.SubElement(properties, "property", {"name": name, "value": xml(clean(value))})
    seen: dict[tuple[str, str], int] = {}
    for check in outcome.checks:
        name = " · ".join(filter(None, subject(check)))
        key = (check.kind, name)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            name = f"{name} ({seen[key]})"  # CI servers drop cases of one name
        case = suite.case(f"kvtrace.{check.kind}", name)
        if check.source:
            case.set("file", xml(clean(check.source)))
        if check.state == "failed":
            cause = outcome.explanations.get(check.cause or "")
            says = sentence(check, cause.title if cause else "")
            fails(case, check.cause or check.kind, says, _details(check, outcome))
        elif check.state != "passed":
            tree.SubElement(case, "system-out").text = xml(f"{check.state}: {sentence(check)}")
    return suite.text()


def _details(check: Check, outcome: GateOutcome) -> list[str]:
    """What the finding says, and what to do."""
    cause = outcome.explanations.get(check.cause or "")
    if cause is None:
        return [sentence(check), *([f"remedy: {clean(check.remedy)}"] if check.remedy else [])]
    lines = [
        sentence(check, cause.title),
        f"{cause.severity} {clean(cause.id, 80)}: {clean(cause.title)}",
    ]
    lines += [f"evidence: {clean(line)}" for line in cause.evidence[:3]]
    lines += [f"remedy: {clean(line)}" for line in cause.remedy]
    return [*lines, f"more: kvtrace docs {clean(cause.id, 80)}"]


class Suite:
    """A document with one suite of test cases."""

    def __init__(self, command: str, name: str, tests: int, failures: int, skipped: int = 0) -> None:
        numbers = {"tests": tests, "failures": failures, "errors": 0, "skipped": skipped}
        counts = {what: str(number) for what, number in numbers.items()}
        self._root = tree.Element("testsuites", {"name": command, **counts})
        self.element = tree.SubElement(self._root, "testsuite", {"name": xml(name), **counts})

    def case(self, of: str, name: str) -> tree.Element:
        return tree.SubElement(self.element, "testcase", {"classname": xml(of), "name": xml(name)})

    def text(self) -> str:
        tree.indent(self._root)
        return f'<?xml version="1.0" encoding="utf-8"?>\n{tree.tostring(self._root, encoding="unicode")}\n'


def fails(case: tree.Element, kind: str, says: str, details: Iterable[str]) -> None:
    failure = tree.SubElement(case, "failure", {"type": xml(kind), "message": xml(says)})
    failure.text = xml("\n".join(details))


def xml(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
