"""What vLLM schedules: block tables, prompt blocks, prefixes, handed-over requests, graph modes.

Comes in: scheduler outputs, requests, forward contexts.
Goes out: BLOCKS records, and what hooks and fingerprints ask of a step.
May not: know of connectors.
"""
