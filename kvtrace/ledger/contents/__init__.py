"""Whether loads gave back what was computed.

Comes in: fingerprints of KV blocks, prompts' digests.
Goes out: loaded blocks that are proved, wrong, or not compared.
May not: compare what another engine or run computed.
"""
