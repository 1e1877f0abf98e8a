"""What runs inside vLLM's processes, and records there.

Comes in: vLLM's calls, at the places of ``targets``.
Goes out: records and facts, in one spool a process.
May not: raise into vLLM, wait for a device, change a result, or import what vLLM has not imported.

Packages, each importing only those that come after it: ``engine`` (vLLM's scheduler, worker, ops); ``hooks``
(the connector's); ``watch`` (reads and writes of KV), ``prints`` (fingerprints), ``metadata`` (what a
connector declares); ``outside`` (files, sockets), ``kv`` (slots in memory), ``steps`` (what is scheduled),
``errors``; ``facts``; ``code`` (whose code, what it says), ``wrap`` (wrappers, proxies). ``preflight`` is for
``kvtrace doctor``.
"""
