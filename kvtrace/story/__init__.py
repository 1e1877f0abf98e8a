"""One request's story, and the list of requests, from a run directory: pure functions.

``tell(run_dir, text)`` reads the spools and returns a :class:`~kvtrace.story.story.Story`;
``listing`` gives one row a request. Renderers in ``kvtrace.render.story``.

Comes in: a run directory, a request's id.
Goes out: its story, or one row a request.
May not: give an outcome of its own: the ledger's stand.
"""
