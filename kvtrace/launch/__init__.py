"""``kvtrace run``: the command, started with the agent in it, and watched from outside.

Comes in: the user's command.
Goes out: its exit code, a run directory, the report.
May not: change the command, or open a connector's file.
"""
