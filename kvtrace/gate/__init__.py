"""The contract of a good run, rules, comparison: ``check``, ``baseline``, ``diff``.

Comes in: reports, a baseline, rules.
Goes out: checks that passed or failed, each with what explains it.
May not: read a spool, or pass a run of which nothing can be judged.
"""
