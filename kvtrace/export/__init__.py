"""A run as tables and as a timeline, for other programs: pure functions from the spools on.

``run.open_run`` reads a run directory once; ``events`` turns its records into rows, chunk by chunk;
``tables`` says which columns there are. ``csv_files``, ``parquet_files`` and ``perfetto`` write files,
``frames`` gives pandas frames (``kvtrace.load``).

Comes in: a run directory.
Goes out: files of other programs' formats, pandas frames.
May not: give an outcome of its own.
"""
