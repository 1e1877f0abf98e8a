"""``kvtrace doctor``: what a run would trace, and what it would not save, before it is made.

Comes in: a command, a connector's class.
Goes out: lines: ok, warning, problem, not known.
May not: start an engine, or make a connector.
"""
