"""A run while it goes on: what ``kvtrace top`` and ``kvtrace metrics`` show.

Comes in: the files of a run.
Goes out: counts, open steps and hooks, the ledgers so far.
May not: add anything to vLLM's processes.
"""
