"""Exceptions and log records: handled by the connector, escaped from threads, the end of an engine's start.

Comes in: frames and records of the logging library.
Goes out: facts.
May not: hold an exception, or change where it goes.
"""
