"""Several runs as one: a prefill and a decode engine, or several hosts.

``merge(runs, place)`` reads the runs one after the other, joins their requests by the ids that the connector
handed over, and writes a directory that names the runs; nothing is copied. ``load`` reads such a directory.

Comes in: run directories.
Goes out: joined requests, and one run directory of one engine's parts.
May not: join requests by equal prompts.
"""
