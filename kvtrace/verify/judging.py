"""Judgements that several properties share: pure functions from what was observed to a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvtrace.ledger.ends import NOT_ARRIVED, LoadEnd
from kvtrace.verify.answers import Verdict, failed, not_applicable, not_observed, proved
from kvtrace.verify.engine import Reply
from kvtrace.verify.observed import MOST_APART, Asked, Observed, common
from kvtrace.words import count, listed, percent, plural

MOST_NAMED = 4
NOT_THERE = (LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY, LoadEnd.FAILED, LoadEnd.NOT_FINISHED)
"""Ends of tokens that were accepted and did not come."""
_MOST_SAID = 3
_POLICY = (
    'blocks failed to load: with "kv_load_failure_policy": "recompute" in kv_transfer_config vLLM computes '
    "those that a connector reports"
)
_ROOM = "a quota may have dropped it, give the store room for all of verify's prompts"
_ENDS = {
    LoadEnd.WRONG: "hold other KV than these tokens compute to",
    LoadEnd.ALTERED: "hold other numbers than were computed",
    LoadEnd.USED_BEFORE: "were used before they were loaded",
    LoadEnd.NOT_WRITTEN: "were accepted and not in the layers when attention ran",
    LoadEnd.PARTLY: "were written in part",
    LoadEnd.FAILED: "failed to load",
    LoadEnd.NOT_FINISHED: "never finished loading",
}


def names(asked: Iterable[Asked]) -> list[str]:
    return [one.id for one in asked][:MOST_NAMED]


def failed_for(asked: Sequence[Asked], says: str, **more: Any) -> Verdict:
    """A failure of these requests; the first one's case repeats it."""
    return failed(says, requests=names(asked), case=asked[0].case if asked else "", **more)


def shown(says: str, found: Sequence[tuple[Asked, str]]) -> Verdict:
    """A failure of requests, each with the line that shows it."""
    return failed_for([one for one, _ in found], says, evidence=[line for _, line in found][:_MOST_SAID])


def not_asked(what: Observed) -> Verdict:
    """Of a property whose workload was not asked."""
    if what.died:
        return not_observed(f"not asked any more: {what.died}")
    return not_applicable("no such prompt fits into this engine")


def nothing(what: Observed) -> Verdict | None:
    """Why nothing of the connector's loads can be judged; None: some were seen."""
    if what.facts.role == "kv_producer":
        return not_applicable("its role is kv_producer: it never loads")
    if what.loads:
        return None
    if not what.facts.looks_up:
        return not_applicable("its lookup finds nothing, whatever it is asked: it never loads")
    if what.facts.role == "kv_consumer":
        return not_observed(
            "its role is kv_consumer, and nothing of these prompts was there to load; --prefill "
            "and --decode ask both sides"
        )
    if what.died:
        why = "nothing was loaded until" if what.stopped else "the engine could not be asked any more:"
        return not_observed(f"{why} {what.died}")
    return not_observed("nothing was loaded")


def error_of(one: Asked) -> tuple[float, float] | None:
    """Mean and largest error of what a request loaded, over its layers; None: not compared."""
    if one.seen is None or not one.seen.errors:
        return None
    errors = one.seen.errors.values()
    return max(error.mean for error in errors), max(error.largest for error in errors)


def close(one: Asked, what: Observed) -> bool | None:
    """Whether what a request loaded is near enough to what was computed; None: not compared."""
    error = error_of(one)
    if error is None:
        return None
    return error[0] <= what.settings.error and error[1] <= what.settings.error * MOST_APART


def arrived(one: Asked) -> bool:
    """Whether anything of what a request was given was seen in its blocks, right or wrong: that a transfer
    was reported as finished is the connector's word."""
    seen = one.seen
    if seen is None:
        return False
    compared = seen.compared > 0 and seen.ends.get(LoadEnd.LOADED, 0) > 0
    return seen.proved > 0 or seen.lost(LoadEnd.WRONG, LoadEnd.ALTERED) > 0 or compared


def altered(one: Asked, what: Observed) -> bool:
    """Whether it came back as other numbers, within what is stated; or another request's did since the last
    rest, and the engine's own prefix cache gave of its blocks."""
    if one.seen is None or not one.seen.local:
        return _altered(one, what)
    here = (other for other in what.asked if (other.job, other.round) == (one.job, one.round))
    return any(_altered(other, what) for other in here)


def _altered(one: Asked, what: Observed) -> bool:
    return one.seen is not None and one.seen.differing > 0 and close(one, what) is True


def bad_ends(one: Asked, what: Observed, *ends: LoadEnd) -> dict[LoadEnd, int]:
    """How tokens of a load ended that did not come back, in token-layers. Other numbers within the stated
    error are no such end."""
    if one.seen is None:
        return {}
    found = {end: one.seen.lost(end) for end in ends or NOT_ARRIVED}
    if close(one, what):
        # the same blocks, number by number: near enough, whatever their fingerprints say. Of more blocks than
        # were found to differ the fingerprints have the word: nobody compared their numbers.
        near = one.seen.differing * one.seen.pairs * max(1, what.facts.block)
        if found.get(LoadEnd.WRONG, 0) + found.get(LoadEnd.ALTERED, 0) <= near:
            found.pop(LoadEnd.WRONG, None)
            found.pop(LoadEnd.ALTERED, None)
        if one.seen.compared * max(1, what.facts.block) >= one.given - what.facts.block:
            for end in (LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY):
                found.pop(end, None)
    elif LoadEnd.WRONG in found and close(one, what) is False and not any(found.values()):
        found[LoadEnd.WRONG] = one.seen.pairs * what.facts.block * one.seen.differing
    return {end: n for end, n in found.items() if n}


def loaded_wrong(asked: Sequence[Asked], what: Observed, *ends: LoadEnd) -> Verdict | None:
    """A failure where accepted tokens did not come back; None: all did."""
    bad = [(one, found) for one in asked if (found := bad_ends(one, what, *ends))]
    if not bad:
        return None
    total: Counter[LoadEnd] = Counter()
    for _, found in bad:
        total.update(found)
    worst = [f"{count(n)} token-layers {_ENDS[end]}" for end, n in total.most_common()]
    lines = [
        reason
        for one, found in bad
        if one.seen is not None
        for end in found
        for reason in one.seen.reasons.get(end, ())
    ]
    lines = [*dict.fromkeys([*(error_line(one, what) for one, _ in bad[:1]), *lines])]
    return failed_for(
        [one for one, _ in bad],
        f"in {len(bad)} of {plural(len(asked), 'request')} that loaded, {'; '.join(worst)}",
        evidence=[line for line in lines if line][:_MOST_SAID],
    )


def error_line(one: Asked, what: Observed) -> str:
    """How far it is, beside the engine's own noise; "" where it was not compared."""
    error = error_of(one)
    if error is None or one.seen is None:
        return ""
    layers = one.seen.errors
    apart = [name for name, of in layers.items() if of.largest > 0]
    if not apart:
        return f"{one.id}: the same, bit by bit, in {plural(one.seen.compared, 'block')}"
    worst = max(layers, key=lambda name: layers[name].mean)
    own = noise(what)
    beside = f"the engine's own noise {percent(own)}" if own is not None else "no noise was measured"
    return (
        f"{one.id}: error {share(error[0])} on the mean, {share(error[1])} at most, in {len(apart)} of "
        f"{plural(len(layers), 'layer')}, most in {worst}; {beside}"
    )


def share(value: float) -> str:
    """An error; past any bound it is no number."""
    return percent(value) if value < 1 else f"{value * 100:.0f} %" if value < 1e6 else "not a number"


def noise(what: Observed) -> float | None:
    """The mean error between two computations of the same tokens, of the worst layer; None: none was seen.
    What is computed on top of what was loaded, by it or by another request, is none."""
    alone = [one.seen for one in what.plain if one.seen and not one.back and not one.seen.preemptions]
    found = [of.mean for seen in alone for of in seen.noise.values()]
    return max(found, default=None)


def all_proved(one: Asked, what: Observed) -> bool:
    """Whether all that was loaded for the requests that were asked together is proved, block by block: then
    the KV is not why an answer is another one."""
    loads = [other for other in what.asked if other.batch == one.batch and other.given]
    return bool(loads) and all(_proved(load, what) for load in loads)


def _proved(one: Asked, what: Observed) -> bool:
    if one.seen is None:
        return False
    size = max(1, what.facts.block)
    whole = one.given // size * size * one.seen.pairs
    return 0 < whole <= one.seen.proved and not bad_ends(one, what)


def answers_differ(asked: Sequence[Asked], what: Observed) -> list[tuple[Asked, str]]:
    """Those whose answer what was loaded may have changed."""
    return [found for found in other_answers(asked, what) if not all_proved(found[0], what)]


def other_answers(asked: Sequence[Asked], what: Observed) -> list[tuple[Asked, str]]:
    """Requests whose answer is not that of the engine without what was loaded, beyond its own noise. Where no
    engine without connector was asked, one that computed it all is itself what others are held against."""
    found = []
    for one in asked:
        if not one.answered or one.prompt.leaves or not (one.back or one.question in what.reference):
            continue
        known = right(one, what)
        if known and not any(_same(one, other, what) for other in known):
            at = _first_difference(one, known[0]) or 0
            who = f"{one.id} ({one.prompt.length} tokens, {one.given} loaded)"
            found.append((one, f"{who}: token {at + 1} of its answer is another"))
    return found


def right(one: Asked, what: Observed) -> list[Reply]:
    """The answers that are right: without a connector, else of the requests that computed it all. None where
    the engine alone gives more than one."""
    arm = what.reference.get(one.question)
    if arm is not None:
        return [reply for reply in arm.replies if reply.tokens] if arm.steady else []
    asker = one.prompt.asker[1:]
    return [
        other.reply
        for other in (what.of(one.job) if any(asker) else what.plain)
        if other is not one
        and other.prompt.asker[1:] == asker
        and other.answered
        and other.seen is not None
        and other.seen.offered is not None
        and not other.back
        and list(other.tokens) == list(one.tokens)
        and len(other.reply.tokens) >= one.prompt.generate
    ]


def _same(one: Asked, other: Reply, what: Observed) -> bool:
    """Whether the answers are equal, or differ first where the best two tokens are as good as equal."""
    at = _first_difference(one, other)
    if at is None:
        return True
    if at >= len(other.logprobs):
        return False
    own, best = other.logprobs[at]
    theirs = best.get(one.reply.tokens[at])
    return theirs is not None and own - theirs <= tie(what)


def tie(what: Observed) -> float:
    """Difference of two logprobs up to which the engine may prefer the one or the other: twice the most that
    its own answers to one prompt differ."""
    most = 0.0
    for arm in what.reference.values():
        first = arm.replies[0]
        for other in arm.replies[1:]:
            same = common(first.tokens, other.tokens)
            pairs = zip(first.logprobs[:same], other.logprobs[:same], strict=False)
            most = max([most, *(abs(one[0] - two[0]) for one, two in pairs)])
    return 2 * most + 1e-4


def _first_difference(one: Asked, other: Reply) -> int | None:
    """The place of the first token that is another one; None: there is none."""
    pairs = zip(one.reply.tokens, other.tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)


def unanswered(asked: Sequence[Asked], what: Observed) -> Verdict | None:
    """A failure where a request had no answer; None: all had one."""
    bad = [one for one in asked if one.reply.error]
    if not bad:
        return None
    said = listed(one.reply.error for one in bad)
    policy = [_POLICY] if any(one.seen and one.seen.lost(LoadEnd.FAILED) for one in bad) else []
    return failed_for(
        bad,
        f"{len(bad)} of {plural(len(asked), 'request')} had no answer: {said}",
        evidence=[*(death.why for death in what.deaths if death.job == bad[0].job), *raised(what), *policy],
    )


def raised(what: Observed) -> list[str]:
    """Exceptions that left the connector's hooks, and where."""
    run = what.evidence.run
    found = run.exceptions if run is not None else ()
    lines = [f"{one.hook} raised {one.type} at {one.where}: {one.message}" for one in found]
    return list(dict.fromkeys(lines))[:_MOST_SAID]


def expected(one: Asked, what: Observed) -> int:
    """Tokens of its prompt that have to come back: whole units, but for the last token, of what was taken, as
    far as it gives to one request; or of all where that is promised."""
    if what.settings.all_units:
        return min(one.stored, len(one.tokens) - 1) // what.unit * what.unit
    return min(one.held, what.limit or one.held) // what.unit * what.unit if one.held >= what.least else 0


def missing(asked: Sequence[Asked], what: Observed, edges: bool = False) -> list[Asked]:
    """Of repeated prompts those of which whole units did not come back. How many loads it takes at a time is
    the connector's choice: of prompts asked together only where all units are promised.

    Args:
        edges: also of prompts that end with a unit, or a token behind it. A store that keeps one record of a
            prompt may lose these, as the engine always computes the last token: a property of their own.
    """
    together = Counter(one.batch for one in what.asked)
    repeated = [
        one
        for one in asked
        if one.answered
        and one.stored == len(one.tokens)
        and (together[one.batch] == 1 or what.settings.all_units)
    ]
    usual = [one for one in repeated if edges or len(one.tokens) % what.unit > 1]
    return [one for one in usual if one.back < expected(one, what)]


def comes_back(asked: Sequence[Asked], what: Observed, shared: bool = False, edges: bool = False) -> Verdict:
    """The judgement of one workload: answered, right, and given back equal.

    Args:
        shared: its prompts share beginnings: what of them comes back is the connector's choice.
        edges: as of :func:`missing`.
    """
    if not asked:
        return not_asked(what)
    later = [one for one in asked if one.round > 0 and what.unit and expected(one, what)]
    late = unanswered([one for one in asked if not one.prompt.leaves], what)
    if bad := late or loaded_wrong([one for one in asked if one.given], what):
        return bad
    other = answers_differ(asked, what)
    if other and not any(altered(one, what) for one, _ in other):
        return shown(f"{len(other)} of {plural(len(asked), 'answer')} differ from those without loads", other)
    if not any(one.given for one in asked):
        if cannot := nothing(what):
            return cannot
        if not later:
            return not_observed("no whole unit of these prompts was taken")
        if shared:
            return not_observed("nothing of these prompts came back")
        if all(one.back >= expected(one, what) for one in later):
            return not_observed("the engine's own prefix cache had these prompts: nothing was left to load")
        says = f"nothing of {plural(len(later), 'stored prompt')} came back"
        return failed_for(later, says, evidence=[f"where {_ROOM}"], alone=cases(later))
    gone = [] if shared or not what.unit else missing(later, what, edges)
    if gone:
        return not_back(gone, what)
    tokens = sum(one.given for one in asked)
    if not any((one.seen and one.seen.proved) or close(one, what) for one in asked):
        return not_observed(f"{count(tokens)} tokens came back, and could not be compared")
    return proved(f"{count(tokens)} tokens of {plural(len(asked), 'request')} came back")


def not_back(gone: Sequence[Asked], what: Observed) -> Verdict:
    """The failure of repeated prompts whose whole units did not come back."""
    first = max(gone, key=lambda one: expected(one, what) - one.back)
    earlier = next(
        (one for one in what.asked if one.round < first.round and one.tokens == first.tokens), None
    )
    took = earlier.seen.saved // max(1, earlier.seen.pairs) if earlier and earlier.seen else 0
    return failed_for(
        gone,
        f"of {plural(len(gone), 'repeated prompt')} whole units of {what.unit} tokens did not come back: of "
        f"{first.id} {count(first.back)} of {count(expected(first, what))} tokens did",
        evidence=[f"the connector took {plural(took, 'token')} of it when it was asked first; where {_ROOM}"],
        alone=cases(gone),
    )


_MOST_ALONE = 3
"""Cases of the shortest, and of the longest."""
_NOT_PLAIN = frozenset("&^!+~#")


def cases(gone: Sequence[Asked]) -> list[str]:
    """Workloads that show by themselves whether these come back: each prompt, asked twice; of one that is
    asked with others, or in another way, all of its property's."""
    plain = {one.prompt.text: len(one.tokens) for one in gone if not _NOT_PLAIN & set(one.case)}
    by_length = sorted(plain, key=lambda text: plain[text])
    few = (
        by_length
        if len(by_length) <= 2 * _MOST_ALONE
        else [*by_length[:_MOST_ALONE], *by_length[-_MOST_ALONE:]]
    )
    others = dict.fromkeys(one.case for one in gone if _NOT_PLAIN & set(one.case))
    return [*(f"{text} ; {text}" for text in few), *others]
