"""What several rules have in common.

Comes in: a case: one run's ledgers.
Goes out: counts, inferences and the words for them.
May not: name a cause.
"""
