"""The connector's hooks: proxy in place, each call recorded, watched and timed as due.

Comes in: connectors where vLLM makes or holds them, and vLLM's calls of their hooks.
Goes out: HOOK records, device times, facts of the connector.
May not: change arguments, results, exceptions or order.
"""
