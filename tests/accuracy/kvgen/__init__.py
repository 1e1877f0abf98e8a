"""Writes KV connectors that nobody has seen: from a seed to a plan, from a plan to Python source.

Nothing here knows of kvtrace, and nothing here may be fitted to what kvtrace can do: the connectors are
written as many different authors would write them.
"""
