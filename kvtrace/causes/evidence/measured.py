"""How far the ledger of saves rests on what was measured, in words."""

from __future__ import annotations

from kvtrace.ledger.model import Trust
from kvtrace.words import count, plural


def level(trust: Trust) -> str:
    """``measured`` where all store work was, ``mixed`` where a part of it was, else ``declared``."""
    if trust.calls and trust.measured >= trust.calls:
        return "measured"
    return "mixed" if trust.measured else "declared"


def note(trust: Trust) -> str:
    """One line for the ledger."""
    if not trust.measured:
        return f"declared by the connector's metadata; {unseen(trust)}"
    if level(trust) == "measured":
        which = f"all {plural(trust.calls, 'store call')}" if trust.calls > 1 else "the only store call"
        return f"measured: slots read from the KV tensors in {which} (one per step, layer and rank)"
    left = trust.calls - trust.measured - trust.unknown
    parts = [
        f"{count(trust.measured)} of {plural(trust.calls, 'store call')} (one per step, layer and rank) "
        "were measured: slots read from the KV tensors"
    ]
    if left > 0:
        parts.append(f"{count(left)} are taken as the metadata declares them")
    if trust.unknown:
        parts.append(
            f"{count(trust.unknown)} are not observed, as no watched call of their rank did what it should"
        )
    return "; ".join(parts)


def unseen(trust: Trust) -> str:
    if not trust.calls:
        return "no save hook was called with slots to store"
    if trust.blind:
        return (
            f"{plural(trust.blind, 'store call')} were watched and read nothing that could be seen, and no "
            "other call of this connector did"
        )
    return "the slots really read were not measured"


def stage_note(trust: Trust) -> str:
    """For the stage "effect" of the stages."""
    if not trust.measured:
        return "declared: slots in the metadata, not measured"
    calls = f"{count(trust.measured)} of {plural(trust.calls, 'store call')}"
    return f"measured: slots read from the KV tensors, in {calls}"
