"""From memory to KV slots: how the KV tensors lie, and which slots an operation touches.

Comes in: KV tensors, views, indexes, addresses.
Goes out: layers and sets of slots; what can't be told is said to be unknown.
May not: keep a tensor alive, or wait for a device.
"""
