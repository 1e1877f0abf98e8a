"""The rules, in the order of the stages: who may claim lost tokens, and who has something to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtrace.causes.case import Case, Piece
from kvtrace.causes.model import Finding, NotObserved, RuledOut
from kvtrace.causes.rules import (
    aborted_before_save,
    agent_not_loaded,
    already_stored,
    below_save_granularity,
    captured_not_run,
    config_key_unused,
    connector_disabled_itself,
    connector_failed_to_start,
    connector_gone,
    connector_not_created,
    decode_not_offered,
    direct_call_bypass,
    exception_swallowed,
    false_already_stored,
    first_chunk_only,
    full_cudagraph_replay,
    hook_raised,
    hook_slow,
    key_mismatch,
    layer_not_hooked,
    load_after_use,
    load_failed,
    load_late,
    load_never_finished,
    load_not_injected,
    loaded_partly,
    local_hit,
    lookup_clamped,
    lookup_miss,
    metadata_cleared_early,
    metadata_has_no_store,
    metadata_not_bound,
    never_looked_up,
    no_connector_configured,
    no_forward,
    preempted_before_save,
    ranks_diverge,
    ranks_share_store,
    role_does_not_save,
    save_blocks_step,
    save_lost,
    save_never_finished,
    saves_elsewhere,
    slots_short,
    stored_nothing,
    sync_in_hook,
    tracer_cost,
    wrong_connector_class,
)
from kvtrace.ledger.intervals import Interval

Claim = Callable[[Case, Piece, list[Interval]], list[Interval]]
Rule = Callable[[Case], Iterator[Finding | RuledOut | NotObserved]]

WIRING: tuple[tuple[str, Claim], ...] = (
    (no_connector_configured.ID, no_connector_configured.claim),
    (connector_failed_to_start.ID, connector_failed_to_start.claim),
    (connector_not_created.ID, connector_not_created.claim),
    (role_does_not_save.ID, role_does_not_save.claim),
    (connector_disabled_itself.ID, connector_disabled_itself.claim),
)
"""Claims on every lost position, also on those that a later stage stopped."""

SCHEDULE: tuple[tuple[str, Claim], ...] = (
    (decode_not_offered.ID, decode_not_offered.claim),
    (false_already_stored.ID, false_already_stored.claim),
    (below_save_granularity.ID, below_save_granularity.claim),
    (already_stored.ID, already_stored.claim),
    (exception_swallowed.ID, exception_swallowed.claim),
    (preempted_before_save.ID, preempted_before_save.claim),
    (aborted_before_save.ID, aborted_before_save.claim),
    (first_chunk_only.ID, first_chunk_only.claim),
    (stored_nothing.ID, stored_nothing.claim),
    (metadata_has_no_store.ID, metadata_has_no_store.claim),
)
"""Claims on positions that no metadata held, first come first served; the last one takes the rest."""

UNREAD: tuple[tuple[str, Claim], ...] = ((already_stored.ID, already_stored.claim_unread),)
"""Claims on positions whose store entry the save hook left unread."""

RULES: tuple[Rule, ...] = (
    agent_not_loaded.rule,
    no_connector_configured.rule,
    connector_not_created.rule,
    connector_failed_to_start.rule,
    wrong_connector_class.rule,
    role_does_not_save.rule,
    connector_disabled_itself.rule,
    config_key_unused.rule,
    below_save_granularity.rule,
    already_stored.rule,
    false_already_stored.rule,
    first_chunk_only.rule,
    metadata_has_no_store.rule,
    decode_not_offered.rule,
    preempted_before_save.rule,
    aborted_before_save.rule,
    metadata_not_bound.rule,
    metadata_cleared_early.rule,
    full_cudagraph_replay.rule,
    captured_not_run.rule,
    direct_call_bypass.rule,
    layer_not_hooked.rule,
    no_forward.rule,
    connector_gone.rule,
    saves_elsewhere.rule,
    hook_raised.rule,
    exception_swallowed.rule,
    stored_nothing.rule,
    slots_short.rule,
    save_lost.rule,
    ranks_share_store.rule,
    save_never_finished.rule,
    local_hit.rule,
    ranks_diverge.rule,
    save_blocks_step.rule,
    hook_slow.rule,
    sync_in_hook.rule,
    tracer_cost.rule,
    never_looked_up.rule,
    lookup_miss.rule,
    key_mismatch.rule,
    lookup_clamped.rule,
    load_failed.rule,
    load_not_injected.rule,
    loaded_partly.rule,
    load_after_use.rule,
    load_never_finished.rule,
    load_late.rule,
)
