"""One file a cause: catalogue entry, rule and claims. See :mod:`kvtrace.causes.registry`."""
