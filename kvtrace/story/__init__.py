"""One request's story, and the list of requests, from a run directory: pure functions.

``tell(run_dir, text)`` reads the spools and returns a :class:`~kvtrace.story.model.Story`;
``listing`` gives one row a request. Renderers in ``kvtrace.render.story``.
"""
