"""What is configured and live: engine, worker, connector class.

Comes in: vLLM's own objects.
Goes out: facts.
May not: guess what can't be read: it is left out.
"""
