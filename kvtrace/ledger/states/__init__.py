"""States of Mamba and linear attention, which keep no KV of tokens.

Comes in: STATES records, block tables.
Goes out: one outcome a state.
May not: count a token.
"""
