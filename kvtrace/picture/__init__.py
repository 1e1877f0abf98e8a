"""What a run looks like: layers x steps, requests in time. Pure functions from the spools to a small
:class:`~kvtrace.picture.picture.Picture`, whose size is bounded whatever the run's length.

``draw(run_dir)`` makes it; ``kvtrace.render.html`` shows it.

Comes in: spools.
Goes out: a picture of bounded size.
May not: count anything in another way than the ledger.
"""
