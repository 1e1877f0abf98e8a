"""What a token's outcome is called where there is room for a few words: beside a number, in vLLM's terms.

The catalogue has the whole of each cause; here stands what completes "1 024 tokens: ...".
"""

from __future__ import annotations

LABELS: dict[str, str] = {
    # not saved
    "no-connector-configured": "no connector is configured",
    "connector-failed-to-start": "the connector did not start",
    "connector-not-created": "the connector was not created",
    "wrong-connector-class": "another class is live",
    "role-does-not-save": "this role stores nothing",
    "connector-disabled-itself": "the connector is switched off",
    "false-already-stored": "wrongly taken for stored",
    "below-save-granularity": "less than one unit",
    "already-stored": "saved before",
    "decode-not-offered": "never offered for saving",
    "later-parts-not-offered": "later parts, not offered",
    "preempted-before-save": "preempted before the save",
    "aborted-before-save": "aborted before the save",
    "first-chunk-only": "later chunks of prompts",
    "metadata-has-no-store": "left out, reason unknown",
    "metadata-not-bound": "no metadata on the worker",
    "metadata-cleared-early": "metadata cleared too early",
    "full-cudagraph-replay": "in a FULL CUDA graph",
    "captured-not-run": "hook ran at capture only",
    "direct-call-bypass": "attention called directly",
    "layer-not-hooked": "layer without a hook",
    "no-forward": "step without a forward",
    "connector-gone": "the connector was gone",
    "saves-elsewhere": "saved in another hook",
    "hook-raised": "a hook raised",
    "exception-swallowed": "exception caught in the hook",
    "stored-nothing": "the hook read no KV",
    "slots-short": "the save hook read a part",
    "kv-stale": "read before it was computed",
    "kv-misplaced": "other slots were read",
    "save-lost": "lost inside the connector",
    "ranks-share-store": "overwritten by another rank",
    "save-never-finished": "its end was never reported",
    "store-failed": "the store refused it",
    "store-incomplete": "fewer bytes at rest than read",
    "kv-altered": "came back as other numbers",
    "store-lost-later": "stored, and gone later",
    "ranks-diverge": "ranks differ",
    # not loaded
    "never-looked-up": "never asked for",
    "lookup-miss": "not found",
    "key-mismatch": "not found after an earlier save",
    "lookup-clamped": "found, not taken",
    "load-failed": "the load failed",
    "load-not-injected": "accepted, not in the layers",
    "loaded-partly": "accepted, of loads written in part",
    "load-after-use": "used before it arrived",
    "kv-load-wrong": "loaded with wrong KV",
    "load-never-finished": "the load never finished",
}
OUTCOMES: dict[str, str] = {
    "saved": "stored",
    "loaded": "loaded from the store",
    "local-hit": "reused on the GPU",
    "pending": "still on its way",
    "not-observed": "not known",
}


def label(outcome: str) -> str:
    """``not-saved:hook-raised`` -> ``the save hook raised``; an id that is not known in words of its own."""
    if outcome in OUTCOMES:
        return OUTCOMES[outcome]
    cause = outcome.partition(":")[2] or outcome
    return LABELS.get(cause, cause.replace("-", " "))
