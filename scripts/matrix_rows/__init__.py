"""The matrix's rows, and what runs, judges and shows them (``scripts/matrix.py``)."""
