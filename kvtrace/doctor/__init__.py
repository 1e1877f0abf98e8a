"""``kvtrace doctor``: what a run would trace, and what it would not save, before it is made."""
