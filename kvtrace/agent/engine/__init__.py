"""vLLM's own places: scheduler, worker, attention ops, API server.

Comes in: steps, requests, forwards.
Goes out: STEP, REQUEST and OP records; the step id on the scheduler's output.
May not: be imported by another package of the agent.
"""
