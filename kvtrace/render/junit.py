"""The outcome of a gate as JUnit XML: one test case a check, for any CI's test report."""

from __future__ import annotations

import re
from xml.etree import ElementTree as tree

from kvtrace.gate.outcome import Check, Outcome
from kvtrace.render.check import sentence, subject
from kvtrace.render.layout import clean

# what XML 1.0 cannot hold, escaped or not
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(outcome: Outcome) -> str:
    """The document. It holds no times: the same outcome gives the same file."""
    failed = len(outcome.failed)
    counts = {"tests": str(len(outcome.checks)), "failures": str(failed), "errors": "0", "skipped": "0"}
    root = tree.Element("testsuites", {"name": "kvtrace check", **counts})
    suite = tree.SubElement(root, "testsuite", {"name": "kvtrace check", **counts})
    properties = tree.SubElement(suite, "properties")
    for name, value in (("report", outcome.report), *(("gate", one) for one in outcome.asked)):
        tree.SubElement(properties, "property", {"name": name, "value": _xml(clean(value))})
    seen: dict[tuple[str, str], int] = {}
    for check in outcome.checks:
        name = " · ".join(filter(None, subject(check)))
        key = (check.kind, name)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            name = f"{name} ({seen[key]})"  # CI servers drop cases of one name
        case = tree.SubElement(suite, "testcase", {"classname": f"kvtrace.{check.kind}", "name": _xml(name)})
        if check.source:
            case.set("file", _xml(clean(check.source)))
        if check.state == "failed":
            failure = tree.SubElement(case, "failure", {"type": _xml(check.cause or check.kind)})
            cause = outcome.explanations.get(check.cause or "")
            failure.set("message", _xml(sentence(check, cause.title if cause else "")))
            failure.text = _xml("\n".join(_details(check, outcome)))
        elif check.state != "passed":
            tree.SubElement(case, "system-out").text = _xml(f"{check.state}: {sentence(check)}")
    tree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tree.tostring(root, encoding="unicode") + "\n"


def _details(check: Check, outcome: Outcome) -> list[str]:
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


def _xml(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
