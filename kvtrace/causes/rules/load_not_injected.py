"""load-not-injected: accepted, and not in the layers when attention ran."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.causes.case import MAX_EVENTS
from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import FAULT, LOADS, Case, Cause, Event, LoadEnd, Results
from kvtrace.ledger.loads.outcome import LoadOf, LostResumed
from kvtrace.terms import Grade
from kvtrace.words import capital, count, of_all, plural, sentence

_PASSED_OVER = (
    "look at start_load_kv for what it passes over: a key that is not in the store, though the lookup "
    "promised it; an early return, as attn_metadata is None in a step without a forward (only "
    "asynchronous loads scheduled) and in a FULL graph of the V2 runner"
)
_INTO = (
    "load into the registered KV caches instead, with kv[index] = ... or index_copy_ (kv[index].copy_(...) "
    "fills a copy), or report the blocks by their ids in get_block_ids_with_load_errors"
)
CAUSE = Cause(
    id="load-not-injected",
    severity=FAULT,
    ledger=LOADS,
    wrong_data=True,
    meaning=(
        "Accepted, and not in the layers, or in some, when attention ran: it used what was there. The answer "
        "is wrong, and no error says so."
    ),
    seen_as=(
        "A step with loads in which the watched load hooks wrote 0 slots, and either wrote in other steps "
        "or logged or swallowed the reason; or a worker in which start_load_kv was not called or has no "
        "connector. Hooks that leave the writing to threads or native code are not judged by that. Or the "
        "load read the very slots that it was to fill, in whatever thread, wrote none of them, and has no "
        "way to write that can't be followed: what it filled is a copy. Or, by the fingerprints, whoever was "
        "to write: the blocks hold zeroes, in all layers or in some that compute to more, and none of the "
        "load is known to have held anything before, or they hold what the same blocks of the cache held for "
        "other positions before, no write was seen, and they still held it when they were looked at some "
        "steps later, where that could be done, or other KV that is not theirs. Or, "
        "likewise, some layers of the blocks do, and a layer below them does not, though the block had other "
        "tokens before: that layer was left out. Or a request that was let in anew after a preemption, with "
        "tokens accepted from the connector: none of their slots, or not all, were written."
    ),
    remedy=f"{sentence(_PASSED_OVER)}. {sentence(_INTO)}.",
    load_ends=(LoadEnd.NOT_WRITTEN,),
)

_RESUMED = (
    "let build_connector_meta look at requests that are resumed, too: they stand in scheduled_cached_reqs "
    "(resumed_req_ids), not in scheduled_new_reqs; and load into the blocks that update_state_after_alloc "
    "gave them last: they have others than before"
)

_COUNTED = "Accepted tokens that another finding counts"
"""Of some layers."""


def rule(case: Case) -> Results:
    accepted = loads.accepted(case)
    lost = loads.affected(case, CAUSE)
    if lost:
        number, where = loads.tokens(case, lost, CAUSE), loads.where(case, lost, CAUSE)
        what = f"{plural(number, 'token')} accepted from the connector" if number else _COUNTED
        short = plural(number, "accepted token") if number else "accepted tokens"
        yield loads.finding(
            case,
            CAUSE,
            f"{what} had not reached {where} when attention ran "
            f"({of_all(len(lost), len(accepted), 'load')}): it used what was there.",
            evidence=[*loads.reasons_and_places(case, lost, CAUSE), *_resumed(case)],
            headline=f"{short} not in {where} when attention ran",
            remedy=loads.remedy(case, lost, CAUSE, _where_others_came(case, accepted)),
        )
        return
    if resumed := case.run.lost_resumed:
        rows = {one.request for one in resumed}
        tokens = plural(sum(one.tokens for one in resumed), "token")
        what = f"not all of {tokens} that {plural(len(rows), 'preempted request')} had to load anew"
        yield case.finding(
            CAUSE,
            f"{capital(what)} reached the layers: attention ran over what was there.",
            tokens=0,
            requests=len(rows),
            grade=Grade.READ,
            evidence=_resumed(case),
            events=[
                Event(
                    case.requests[one.request].id,
                    one.step,
                    f"let in anew: {plural(one.tokens, 'token')} accepted from the connector",
                )
                for one in resumed[:MAX_EVENTS]
            ],
            remedy=[*loads.told_itself(case, _reasons(resumed)), _RESUMED, CAUSE.remedy],
            headline=f"{what} reached the layers",
        )
        return
    measured = [row for row in accepted if row.measured]
    if measured and all(row.measured and loads.came(case, row) for row in accepted):
        yield CAUSE.ruled_out(
            f"the load hooks wrote the slots of {of_all(len(measured), len(accepted), 'load')} "
            f"({count(sum(row.accepted for row in measured))} tokens, measured in every "
            f"layer{loads.windows(case, measured)})"
        )
    elif len(measured) < len(accepted):
        yield CAUSE.not_observed(
            f"what was written into the layers was not seen for "
            f"{of_all(len(accepted) - len(measured), len(accepted), 'load')}: threads, native code, or not "
            "sampled"
        )


def _where_others_came(case: Case, accepted: Sequence[LoadOf]) -> list[str]:
    """Then the hook knows how to write: what it passed over goes first."""
    came = any(row.measured and loads.came(case, row) for row in accepted)
    return [_PASSED_OVER, _INTO] if came else []


def _reasons(resumed: Sequence[LostResumed]) -> list[str]:
    lines = (line for one in resumed for lines in one.reasons.values() for line in lines)
    return list(dict.fromkeys(lines))


def _resumed(case: Case) -> list[str]:
    """What preempted requests were to load anew, which the ledger of loads does not count."""
    resumed = case.run.lost_resumed
    if not resumed:
        return []
    tokens = sum(one.tokens for one in resumed)
    return [
        f"of {plural(tokens, 'token')} accepted for requests that were preempted and let in anew "
        f"({count(len(resumed))} times) not all came; the ledger of loads counts a prompt once, by its first "
        "admission",
        *_reasons(resumed)[:1],
    ]
