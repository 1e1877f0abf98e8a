"""What ``kvtrace doctor`` looks at in the user's Python: vLLM, the command line, the connector's class.

Comes in: an environment and a command line.
Goes out: facts for the checks.
May not: start an engine, or make a connector.
"""
