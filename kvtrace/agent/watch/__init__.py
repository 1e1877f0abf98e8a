"""What a connector's work does with the KV caches: which slots it reads and writes.

Comes in: calls of hooks and background work, the operations in them, the KV tensors.
Goes out: SLOTS, EFFECT and STATES records, and what could not be followed.
May not: take what it cannot follow for nothing.
"""
