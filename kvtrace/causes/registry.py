"""The causes, in one ordered list; the catalogue, the rules and the claims derive from it.

To add a cause: its file in ``kvtrace/causes/rules/``, and the file's name here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvtrace.causes.case import Case
from kvtrace.causes.cause import Cause
from kvtrace.causes.claims import Claim, Turn
from kvtrace.causes.diagnosis import Results

ORDER = (
    # wiring
    "agent_not_loaded",
    "engine_did_not_start",
    "engine_ended",
    "no_connector_configured",
    "connector_failed_to_start",
    "connector_not_created",
    "wrong_connector_class",
    "role_does_not_save",
    "connector_disabled_itself",
    "config_key_unused",
    # schedule
    "false_already_stored",
    "below_save_granularity",
    "already_stored",
    "decode_not_offered",
    "later_parts_not_offered",
    "preempted_before_save",
    "aborted_before_save",
    "first_chunk_only",
    "metadata_has_no_store",
    # bind
    "metadata_not_bound",
    "metadata_cleared_early",
    # forward
    "full_cudagraph_replay",
    "captured_not_run",
    "direct_call_bypass",
    "layer_not_hooked",
    "no_forward",
    # hook
    "connector_gone",
    "saves_elsewhere",
    "hook_raised",
    "exception_swallowed",
    # effect
    "stored_nothing",
    "slots_short",
    "kv_stale",
    "kv_misplaced",
    "save_lost",
    "ranks_share_store",
    # completion
    "save_never_finished",
    "store_failed",
    "store_incomplete",
    "store_lost_later",
    "ranks_diverge",
    "save_blocks_step",
    # loads
    "never_looked_up",
    "lookup_miss",
    "key_mismatch",
    "lookup_clamped",
    "load_failed",
    "load_not_injected",
    "loaded_partly",
    "load_after_use",
    "kv_load_wrong",
    "kv_altered",
    "load_never_finished",
    # notes
    "local_hit",
    "hook_stuck",
    "worker_stuck",
    "hook_slow",
    "sync_in_hook",
    "load_late",
    "tracer_cost",
)
"""Files of ``kvtrace/causes/rules/`` in the order of the stages. Reports, pages and lists keep this order;
among claims of one turn the earlier file is asked first."""

_FILES = tuple(import_module(f"kvtrace.causes.rules.{name}") for name in ORDER)

CATALOGUE: dict[str, Cause] = {file.CAUSE.id: file.CAUSE for file in _FILES}

RULES: tuple[Callable[[Case], Results], ...] = tuple(file.rule for file in _FILES)


def _claims() -> dict[Turn, list[tuple[Cause, Claim]]]:
    found: dict[Turn, list[tuple[Cause, Claim]]] = {turn: [] for turn in Turn}
    for file in _FILES:
        for turn, claim in getattr(file, "CLAIMS", {}).items():
            found[turn].append((file.CAUSE, claim))
    return found


CLAIMS = _claims()
"""Who is asked in each turn, in order."""
