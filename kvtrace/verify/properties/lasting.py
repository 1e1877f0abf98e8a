"""What lasts: over a restart, over a store that fails, and over many requests."""

from __future__ import annotations

from statistics import fmean

from kvtrace.trace.config import STORE_CONDITIONS
from kvtrace.verify import judging
from kvtrace.verify.answers import Verdict, failed, not_applicable, not_observed, proved
from kvtrace.verify.observed import Asked, EngineFacts, Observed
from kvtrace.verify.properties.sizes import units, usual
from kvtrace.verify.property import FULL, Property
from kvtrace.verify.usage import DESCRIPTORS, MEMORY, THREADS
from kvtrace.verify.workload import RESTART, STORE_ACTS
from kvtrace.words import count, duration, plural, size

_MANY, _PROMPTS, _NEW_ROUND = 1000, 20, 2
_MAY_GROW = {MEMORY: 128 << 20, DESCRIPTORS: 8.0, THREADS: 8.0}
"""From the second quarter of many requests to the last one: more is no noise."""
_NO_STORE = "its directory is not known (--store DIR)"


def _restart(own: list[Asked], what: Observed) -> Verdict:
    later = [one for one in own if one.act == RESTART]
    if not later:
        return judging.not_asked(what)
    late = judging.unanswered(later, what)
    if bad := late or judging.loaded_wrong([one for one in later if one.given], what):
        return bad
    if not any(one.given for one in later):
        if cannot := judging.nothing(what):
            return cannot
        says = f"nothing of {plural(len(later), 'stored prompt')} was found after a restart"
        if what.facts.store:
            return judging.failed_for(later, says)
        return not_observed(f"{says}; whether it is meant to last is not known (--store DIR says so)")
    tokens = sum(one.given for one in later)
    return proved(f"{count(tokens)} tokens of {plural(len(later), 'prompt')} were found after a restart")


def _damaged(own: list[Asked], what: Observed) -> Verdict:
    if not what.facts.store:
        return not_applicable(_NO_STORE)
    later = [one for one in own if one.round > 0]
    if not later:
        return judging.not_asked(what)
    act = later[0].act
    if act not in what.facts.met:
        why = f"nothing was seen to open a file there while it was {act}"
        return not_observed(why if act in STORE_CONDITIONS else "no file was there to damage")
    if late := judging.unanswered(later, what):
        return late
    other = judging.answers_differ(later, what)
    if other:
        says = f"{len(other)} of {plural(len(later), 'answer')} are not those that were right before"
        return judging.shown(says, other)
    if what.held:
        return failed("blocks were not given back", case=later[0].case)
    slowest = max(one.reply.seconds for one in later)
    return proved(
        f"of {plural(len(later), 'answer')} each is right all the same, the slowest in {duration(slowest)}"
    )


def _flat(own: list[Asked], what: Observed) -> Verdict:
    every = {one.number for one in own}
    # a store in memory grows with new prompts, as it is meant to
    repeats = {one.number for one in own if one.round < _NEW_ROUND}
    grown = {}
    for name in _MAY_GROW:
        numbers = repeats if name == MEMORY else every
        samples = [one[name] for one in what.samples if one.get("number") in numbers]
        if len(samples) < 16:
            return not_observed("too few samples of the processes")
        quarter = len(samples) // 4
        grown[name] = fmean(samples[-quarter:]) - fmean(samples[quarter : 2 * quarter])
    bad = [name for name, most in _MAY_GROW.items() if grown[name] > most]
    memory, descriptors, threads = (max(0.0, grown[name]) for name in (MEMORY, DESCRIPTORS, THREADS))
    says = (
        f"over {plural(len(own), 'request')} memory grew by {size(round(memory))}, "
        f"descriptors by {count(descriptors)}, threads by {count(threads)}"
    )
    return failed(says) if bad else proved(says)


def _again_after(facts: EngineFacts) -> str:
    """Asked again before it: that it came back then tells what a restart forgets from what never comes."""
    n = usual(facts)
    return f"a{n} b{n} ; a{n} b{n} ; restart a{n} b{n}"


def _with(act: str) -> Property:
    def words(facts: EngineFacts) -> str:
        n = usual(facts)
        return f"a{n} b{n} ; {act} a{n} c{n} b{n}" if facts.store else ""

    title = f"The store is {act}: answers are right all the same"
    return Property(f"store-{act}", title, _damaged, words, FULL)


def _many(facts: EngineFacts) -> str:
    """Few prompts, the same ones again and again, and as many new ones of one unit."""
    n, one = usual(facts), units(facts, 1)
    few = [f"{_letter(number)}{n}*1" for number in range(_PROMPTS)]
    again = [few[at % len(few)] for at in range(_MANY // 2 - _PROMPTS)]
    # a token of one stream, and all but one of another: no two alike
    pairs = [(a, b) for a in range(26) for b in range(26) if a != b]
    new = [f"{_letter(a)}1{_letter(b)}{one}*1" for a, b in pairs[: _MANY // 2]]
    return " ; ".join(" ".join(words) for words in (few, again, new))


def _letter(number: int) -> str:
    return chr(97 + number)


PROPERTIES = (
    Property("restart", "A restart finds what was stored", _restart, _again_after, FULL),
    *(_with(act) for act in STORE_ACTS),
    Property("flat", "Memory, descriptors and threads do not grow over many requests", _flat, _many, FULL),
)
