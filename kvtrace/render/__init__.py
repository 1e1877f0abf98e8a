"""Renderers of a report: each reads the report dict alone and claims nothing that is not in it."""
