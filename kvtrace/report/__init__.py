"""``report.json``: built, read, checked against its schema.

Comes in: a run and its diagnosis, or a path.
Goes out: one JSON document of a published shape, bounded in size.
May not: conclude anything that the diagnosis does not say.
"""
