"""Whose code a file is, and what stands in it.

Comes in: source and byte code of connectors, frames, messages.
Goes out: owners, config keys, kinds of handlers, texts without a user's data.
May not: run or import what it reads.
"""
