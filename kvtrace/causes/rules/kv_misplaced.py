"""kv-misplaced: a save that read other slots than those of its tokens."""

from __future__ import annotations

from kvtrace.causes.evidence import unstored
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import of_all, plural

CAUSE = Cause(
    id="kv-misplaced",
    stage=Stage.EFFECT,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The connector read KV slots of other positions, requests or layers instead of those that its "
        "metadata names."
    ),
    seen_as=(
        "In a step that was watched in full, slots that the metadata names were never read, and "
        "the same calls read slots that it does not name. Where it names none: slots were read that are of "
        "no use (no request's, or read already), and tokens were left out that no unit leaves out: others "
        "behind them were read, or nothing of their request; or all that was read of a layer, several times, "
        "are whole blocks that begin within blocks. What else that worker read is then not observed. "
        "Or the very blocks of an entry were read once another request had them."
    ),
    remedy=(
        "Compare the blocks and offsets that the hook indexes with the block table of the "
        "request: block ids, not places in the table; the layer of the hook, not the last one; "
        "the slots of this request. What is read in a later step needs its blocks kept until then "
        "(request_finished returns True)."
    ),
    save_ends=(SaveEnd.MISPLACED, SaveEnd.READ_LATE),
)


_EARLY = "reported as finished before it was read, so that its blocks may be another request's by then"
KEPT = "keep a request's blocks until they are read: return True from request_finished, then report the save"
_SEEN_LATE = (
    "these blocks were read too late: they had been given to other requests, whose KV was saved in their "
    "place"
)
_SEEN_OTHERS = (
    "all or some of their slots were not read while they were theirs, and the calls that were to read them "
    "read others: of no request, or of other positions, requests or layers; what they did read of these "
    "tokens stands for others"
)
PREEMPTED = (
    "of a preempted request drop what waits to be saved (handle_preemptions), as its blocks go to others; "
    "when it resumes (scheduled_cached_reqs.resumed_req_ids), replace its blocks by the new ones"
)
_NOT_BEFORE = "report a save in get_finished once all of its blocks have been read, not when it is queued"


def rule(case: Case) -> Results:
    hit = case.affected(CAUSE)
    if not hit:
        return
    saves, who = case.run.async_saves, plural(len(hit), "request")
    early = sum(one.early for one in saves)
    preempted = all(request.preemptions for request in hit)
    if late := SaveEnd.MISPLACED not in case.ends:
        title = f"The blocks of {who} were read once other requests had them."
        seen = _SEEN_LATE
        headline = "blocks were read to be saved once other requests had them"
    else:
        title = f"Other slots were read for a save than those of {who}."
        seen = _SEEN_OTHERS
        headline = "other slots were read for a save than those of its tokens"
    yield case.finding(
        CAUSE,
        title,
        evidence=[
            *unstored.where(case, CAUSE),
            seen,
            *([f"{_EARLY}: {of_all(early, len(saves), 'asynchronous save')}"] if early else []),
            *([f"each was preempted ({who})"] if preempted else []),
        ],
        remedy=[
            *([PREEMPTED] if preempted else []),
            *([_NOT_BEFORE] if early else []),
            KEPT if late else CAUSE.remedy,
        ],
        headline=headline,
    )
