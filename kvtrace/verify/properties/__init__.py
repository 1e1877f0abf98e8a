"""The properties, by what they are about. A row of a file's ``PROPERTIES`` is one whole property.

Comes in: the requests that were asked, and what the spools say of them.
Goes out: a verdict a property, and the workload that tries it.
May not: ask a server, or read a file.
"""
