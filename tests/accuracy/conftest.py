"""Shows the confusion table at the end of the test run, also of a green one."""

from __future__ import annotations

from typing import Any

TABLE = "confusion table"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, text in getattr(report, "user_properties", ()):
                if name == TABLE:
                    terminalreporter.section("accuracy: expected cause x first finding")
                    terminalreporter.line(text)
