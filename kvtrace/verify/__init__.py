"""Proof by return: does a connector give back what it took, equal, to the right asker, and to nobody else?

An engine of verify's own is asked the same prompts again and again (workload, drive, served); what it did is
read from the run directory (evidence); the properties (a table) say what that proves.

Comes in: the user's command, or a connector's class.
Goes out: properties: proved, failed, not observed, does not apply.
May not: touch a server that runs already, or guess.
"""
