"""Requests of all shapes: of each the answer is right, and what was saved comes back."""

from __future__ import annotations

from functools import partial

from kvtrace.verify import judging
from kvtrace.verify.answers import Verdict, not_observed, proved
from kvtrace.verify.observed import Asked, EngineFacts, Observed
from kvtrace.verify.properties.sizes import ROOM, fits, twice, unit, units, usual
from kvtrace.verify.property import Property
from kvtrace.verify.workload import GENERATED
from kvtrace.words import plural

_STREAMS = "abcdefghijklmnopqrstuvwxyz"
_MOST_AT_ONCE = 24
_LONGEST_ANSWER = 256
"""Tokens: longer ones take too long on a large model, and of shorter ones the engine is done too soon."""
_MEANT = "is that meant? (--all-units)"


def _units(own: list[Asked], what: Observed) -> Verdict:
    if cannot := judging.nothing(what):
        return cannot
    again = [
        one
        for one in what.plain
        if one.round > 0 and one.answered and one.stored == len(one.tokens) and one.stored > what.unit
    ]
    if not again:
        return not_observed("no repeated prompt has a whole unit")
    gone = judging.missing(again, what)
    if gone:
        return judging.not_back(gone, what)
    loads = [one for one in again if one.given]
    if wrong := judging.loaded_wrong(loads, what, *judging.NOT_THERE):
        return wrong
    taken = [one for one in again if judging.expected(one, what)]
    if not taken:
        return not_observed(f"no whole unit of {plural(len(again), 'repeated prompt')} was taken")
    less = sum(one.taken // what.unit < one.stored // what.unit for one in again)
    short = sum(what.unit <= one.held < what.least for one in again)
    other = ", not all of it as it was" if judging.loaded_wrong(loads, what) else ""
    if what.limit == what.unit:  # whether it can give back more than a first unit is what is asked here
        return not_observed(f"of what it took it gave a request {what.limit} tokens at most: {_MEANT}")
    most = f", up to {what.limit} tokens of each" if what.limit else ""
    asks = (
        (less, f"of {plural(less, 'prompt')} it took less than all whole units: {_MEANT}"),
        (what.limit, f"it gave a request {what.limit} tokens at most: {_MEANT}"),
        (
            short,
            f"of {plural(short, 'prompt')} with less than {what.least} tokens nothing came back: {_MEANT}",
        ),
    )
    return proved(
        f"of {plural(len(taken), 'repeated prompt')} every whole unit of {what.unit} tokens that was taken "
        f"came back{most}{other}",
        evidence=[question for asked, question in asks if asked],
    )


_lengthwise = partial(judging.comes_back, edges=True)
_of_others = partial(judging.comes_back, shared=True)


def _preempted(own: list[Asked], what: Observed) -> Verdict:
    if not own:
        return judging.not_asked(what)
    if not any(one.seen and one.seen.preemptions for one in own):
        return not_observed("no request was preempted")
    return judging.comes_back(own, what)


def _aborted(own: list[Asked], what: Observed) -> Verdict:
    if not own:
        return judging.not_asked(what)
    left = [one for one in own if one.prompt.leaves]
    if not any(one.seen and "ABORT" in one.seen.status.upper() for one in left):
        return not_observed("no request was aborted: each was over before its client left")
    return judging.comes_back(own, what, shared=True)


def _reused(own: list[Asked], what: Observed) -> Verdict:
    if not own and not what.died and not _reuse(what.facts):
        return not_observed("the KV cache is too large, or its --num-gpu-blocks-override is not known")
    return judging.comes_back(own, what)


def _lengths(facts: EngineFacts) -> str:
    around = {2, facts.block, facts.budget, facts.unit, 2 * unit(facts)}
    lengths = sorted({n for size in around if size for n in (size - 1, size, size + 1) if fits(facts, n)})
    return twice(" ".join(f"{name}{n}" for name, n in zip(_STREAMS, lengths, strict=False)))


def _chunked(facts: EngineFacts) -> str:
    lengths = [n for n in (facts.budget + facts.block + 1, 2 * facts.budget + facts.block // 2 + 1) if n]
    words = " ".join(f"{name}{n}" for name, n in zip("ab", lengths, strict=True) if fits(facts, n))
    return twice(words) if words and facts.budget else ""


def _concurrent(facts: EngineFacts) -> str:
    """Saved together, loaded alone, loaded together."""
    number = max(2, min(6, facts.seqs or 6))
    n, one = usual(facts), unit(facts)
    lengths = [n - at % 3 * one if n > 3 * one else n for at in range(number)]
    together = "&".join(f"{name}{length}" for name, length in zip(_STREAMS, lengths, strict=False))
    return f"{together} ; {together.replace('&', ' ')} ; {together}"


def _repeated(facts: EngineFacts) -> str:
    n, short = usual(facts), facts.block + 1
    return f"a{n} b{short} ; a{n} a{n} b{short} b{short} ; a{n}&a{n}"


def _shared(facts: EngineFacts) -> str:
    p, n = units(facts, 2), units(facts, 1)
    return f"p{p}a{n} p{p}b{n} ; p{p}c{n} p{p}a{n} ; p{p}b{n}&p{p}c{n}&p{p}d{n}"


def _extended(facts: EngineFacts) -> str:
    """The last one finds its beginning in the engine's own prefix cache, and the rest in the connector."""
    short, long = units(facts, 1) + 1, usual(facts)
    return f"a{short} ; a{long} ; a{long} ; a{short} a{long}"


def _reuse(facts: EngineFacts) -> str:
    """Behind the first one prompts that are given its blocks at once, as long and as many as that takes (vLLM
    gives out first what was free longest)."""
    n, most = usual(facts), (facts.longest - ROOM) // facts.block
    blocks = facts.blocks - 1  # vLLM keeps one for itself
    free = blocks - -(-n // facts.block)
    number = free // most + 1 if most else 0
    if free <= 0 or not 0 < number <= _MOST_AT_ONCE:
        return ""
    taken = min(blocks, number * most)
    shares = [taken // number + (at < taken % number) for at in range(number)]
    lengths = (one * facts.block - GENERATED - 1 for one in shares)
    return f"a{n} {'&'.join(map('{}{}'.format, _STREAMS[1:], lengths))} ; a{n}"


def _preempt(facts: EngineFacts) -> str:
    """Asked on after an answer that fills units: its last blocks are filled after the request came back."""
    n = usual(facts)
    answer = min(_LONGEST_ANSWER, facts.longest - ROOM - n) // unit(facts) * unit(facts)
    if not answer:
        return f"a{n}*12^ ; a{n}*12"
    return f"a{n}*{answer}^ ; a{n}+ ; a{n}*12"


def _abort(facts: EngineFacts) -> str:
    n = usual(facts)
    return f"a{n}*12! b{n}*12!&c{n}*12 ; a{n}*12 b{n}*12 c{n}*12"


PROPERTIES = (
    Property("whole-units", "Every whole unit that was saved comes back", _units),
    Property(
        "lengths", "Prompts of n-1, n and n+1 tokens around block, chunk and unit", _lengthwise, _lengths
    ),
    Property("chunked", "Prompts that are computed in several steps", judging.comes_back, _chunked),
    Property("concurrent", "Prompts asked together", judging.comes_back, _concurrent),
    Property("repeated", "A prompt asked again and again", judging.comes_back, _repeated),
    Property("shared-prefix", "Prompts that begin alike", _of_others, _shared),
    Property("extended", "Prompts that grow", _of_others, _extended),
    Property("blocks-reused", "Prompts whose blocks another request gets at once", _reused, _reuse),
    Property("preempted", "Requests whose blocks are taken back while they generate", _preempted, _preempt),
    Property("aborted", "Requests whose client leaves", _aborted, _abort),
)
