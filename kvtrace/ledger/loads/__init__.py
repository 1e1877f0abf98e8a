"""The ledger of loads: every prompt token, from the connector's answer to the KV in the layers.

Total: the prompt tokens of every request that a scheduler with a connector let in, or asked the connector
for, times pairs; each ends at one :class:`~kvtrace.ledger.ends.LoadEnd`. A request is looked at in its first
admission; what one that was preempted loads anew stands beside it (:mod:`.resumed`).

Comes in: lookups, accepted loads, slots that were written, what their blocks held.
Goes out: one outcome a prompt token and pair, decided once.
May not: take an accepted load for one that arrived where it was seen not to.
"""
