"""A run while it goes on, read from its files alone: what ``kvtrace top`` and ``kvtrace metrics`` show."""
