"""What ``kvtrace doctor`` looks at in the user's Python: vLLM, the command line, the connector's class."""
