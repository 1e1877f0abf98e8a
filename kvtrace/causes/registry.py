"""The rules, in the order of the gates: who may claim lost tokens, and who has something to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtrace.causes import (
    agent_not_loaded,
    already_stored,
    below_save_granularity,
    connector_failed_to_start,
    connector_gone,
    connector_not_created,
    decode_not_offered,
    direct_call_bypass,
    false_already_stored,
    first_chunk_only,
    full_cudagraph_replay,
    hook_raised,
    layer_not_hooked,
    local_hit,
    metadata_has_no_store,
    metadata_not_bound,
    no_connector_configured,
    no_forward,
    ranks_diverge,
    role_does_not_save,
    saves_elsewhere,
    wrong_connector_class,
)
from kvtrace.causes.case import Case, Piece
from kvtrace.causes.model import Finding, NotObserved, RuledOut
from kvtrace.ledger.intervals import Interval

Claim = Callable[[Case, Piece, list[Interval]], list[Interval]]
Rule = Callable[[Case], Iterator[Finding | RuledOut | NotObserved]]

WIRING: tuple[tuple[str, Claim], ...] = (
    (no_connector_configured.ID, no_connector_configured.claim),
    (connector_failed_to_start.ID, connector_failed_to_start.claim),
    (connector_not_created.ID, connector_not_created.claim),
    (role_does_not_save.ID, role_does_not_save.claim),
)
"""Claims on every lost position, also on those that a later gate stopped."""

SCHEDULE: tuple[tuple[str, Claim], ...] = (
    (decode_not_offered.ID, decode_not_offered.claim),
    (false_already_stored.ID, false_already_stored.claim),
    (below_save_granularity.ID, below_save_granularity.claim),
    (already_stored.ID, already_stored.claim),
    (first_chunk_only.ID, first_chunk_only.claim),
    (metadata_has_no_store.ID, metadata_has_no_store.claim),
)
"""Claims on positions that no metadata held, first come first served; the last one takes the rest."""

RULES: tuple[Rule, ...] = (
    agent_not_loaded.rule,
    no_connector_configured.rule,
    connector_not_created.rule,
    connector_failed_to_start.rule,
    wrong_connector_class.rule,
    role_does_not_save.rule,
    below_save_granularity.rule,
    already_stored.rule,
    false_already_stored.rule,
    first_chunk_only.rule,
    metadata_has_no_store.rule,
    decode_not_offered.rule,
    metadata_not_bound.rule,
    full_cudagraph_replay.rule,
    direct_call_bypass.rule,
    layer_not_hooked.rule,
    no_forward.rule,
    connector_gone.rule,
    saves_elsewhere.rule,
    hook_raised.rule,
    local_hit.rule,
    ranks_diverge.rule,
)
