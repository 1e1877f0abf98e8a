"""What agent and analysis share: hooks, ops, records, facts, configuration, the spool.

Comes in: records of the agent.
Goes out: a file that is readable up to its last whole block, and its reader.
May not: load more than the standard library where the agent imports it, or import what the agent observes.
"""
