"""One file a cause. See :mod:`kvtrace.causes.registry`.

Comes in: a case: one run's ledgers.
Goes out: catalogue entry, findings and rule-outs, claims on lost tokens.
May not: know another cause's rule.
"""
