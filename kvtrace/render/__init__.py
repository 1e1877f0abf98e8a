"""Every printing: terminal, Markdown, HTML, JUnit, SARIF.

Comes in: a report, or another verb's answer.
Goes out: text.
May not: claim what is not in it.
"""
