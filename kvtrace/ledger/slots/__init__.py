"""Whose token each KV slot is: block tables of the scheduler against the slots that were touched."""
