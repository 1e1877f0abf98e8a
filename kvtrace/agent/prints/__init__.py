"""Fingerprints of KV blocks: whether a load gave back what was computed.

Comes in: the blocks that a step filled, and those that were loaded.
Goes out: PRINTS, REPRINTS and LOAD_ERRORS records.
May not: record contents, or wait for a device.
"""
