"""Whose token each KV slot is.

Comes in: the scheduler's block tables, the slots that were touched.
Goes out: reads and writes by request and position.
May not: give a read to one of two requests that it may be of.
"""
