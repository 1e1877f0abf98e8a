"""The ledger of saves: what became of every position with KV, in every (layer, rank) pair.

Comes in: store entries of metadata, slots that were read, bytes that came to rest.
Goes out: one outcome a position and pair, with its grade.
May not: take "called" for "saved", or "read" for "stored".
"""
