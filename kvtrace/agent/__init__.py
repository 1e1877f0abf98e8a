"""What runs inside vLLM's processes, and records there.

Comes in: vLLM's calls, at the places of ``targets``.
Goes out: records and facts, in one spool a process.
May not: raise into vLLM, wait for a device, change a result, or import what vLLM has not imported.
"""
