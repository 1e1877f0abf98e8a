"""To nobody else: what was saved for one prompt is not given to another."""

from __future__ import annotations

from collections.abc import Callable

from kvtrace.ledger.contents.judge import ANOTHER_REQUEST
from kvtrace.ledger.ends import LoadEnd
from kvtrace.verify import judging
from kvtrace.verify.answers import Answer, Verdict, not_applicable, not_observed, proved
from kvtrace.verify.observed import Asked, EngineFacts, Observed
from kvtrace.verify.properties.sizes import unit, units
from kvtrace.verify.property import FULL, Property
from kvtrace.verify.workload import MODEL, RESTART
from kvtrace.words import count, plural


def _beyond(asked: list[Asked], block: int) -> list[Asked]:
    """Requests for which the connector offered more than anybody with the same beginning ever asked. Where an
    image differs within a block, the run does not say."""
    return [
        one
        for one in asked
        if one.seen is not None and one.seen.offered
        if one.offered_to > one.known + (block - 1 if one.prompt.image else 0)
    ]


def _from_first(one: Asked) -> bool:
    """Whether an offer may as well count from the prompt's first token, which is no other prompt's KV."""
    return one.seen is not None and one.seen.local > 0 and (one.seen.offered or 0) <= one.known


def _judge(asked: list[Asked], what: Observed, who: str) -> Verdict:
    looked = [one for one in asked if one.seen is not None and one.seen.offered is not None]
    more = _beyond(looked, what.facts.block)
    if bad := [one for one in more if not _from_first(one)]:
        first = bad[0]
        return judging.failed_for(
            bad,
            f"{plural(len(bad), 'request')} got what {who} never asked for: {count(first.offered_to)} tokens "
            f"of {first.id} were offered, {count(first.known)} were asked so",
        )
    another = [(one, line) for one in asked for line in _of_another(one)]
    if another:
        return judging.shown(f"{plural(len(another), 'load')} brought another prompt's KV", another)
    other = [
        (one, line)
        for one, line in judging.answers_differ(asked, what)
        if one.given and not judging.altered(one, what) and not judging.bad_ends(one, what)
    ]
    if other:
        plain = {one.number for one in what.plain}
        if all(one.number in plain for one, _ in other):  # then outputs tells it
            says = f"{len(other)} of {plural(len(asked), 'answer')} differ: whose KV came is not known"
            return not_observed(says, evidence=[line for _, line in other][:3])
        says = f"{len(other)} of {plural(len(asked), 'answer')} are not those of their own prompt"
        return judging.shown(says, other)
    if not looked:
        return judging.nothing(what) or not_observed("the connector was not asked")
    if not what.loads and not any(one.given for one in asked):
        return judging.nothing(what) or not_observed("nothing was loaded")
    if what.evidence.pair and not any(one.seen and one.seen.proved for one in looked):
        return not_observed("what the second server loaded could not be compared")
    if more:
        says = f"{plural(len(more), 'lookup')} may count from the first token, where the GPU has some already"
        return not_observed(says)
    return proved(f"{plural(len(looked), 'lookup')} offered nothing but what the same prefix had saved")


def _of_another(one: Asked) -> list[str]:
    """What shows that a load brought another prompt's KV."""
    reasons = one.seen.reasons.get(LoadEnd.WRONG, ()) if one.seen else ()
    return [reason for reason in reasons if ANOTHER_REQUEST in reason][:1]


def _others(own: list[Asked], what: Observed) -> Verdict:
    salted = {one.job for one in what.plain if one.prompt.salt}
    return _judge([one for one in what.plain if one.job not in salted], what, "a prompt with this beginning")


def _apart(name: str, serves: str = "", lacks: str = "") -> Callable[[list[Asked], Observed], Verdict]:
    """The judgement of requests that differ in that alone; without the fact ``serves`` it is ``lacks``."""

    def judge(own: list[Asked], what: Observed) -> Verdict:
        if serves and not getattr(what.facts, serves):
            return not_applicable(lacks)
        refused = [one for one in own if any(one.prompt.asker) and one.reply.error]
        if refused:
            return not_observed(f"requests with another {name} had no answer: {refused[0].reply.error}")
        found = _judge(own, what, f"a request with this {name}") if own else judging.not_asked(what)
        # of what is not plain no other property judges the loads
        wrong = judging.loaded_wrong(own, what, LoadEnd.WRONG) if serves else None
        return found if found.answer is Answer.FAILED else wrong or found

    return judge


def _models(own: list[Asked], what: Observed) -> Verdict:
    if not what.facts.other_model:
        return not_observed("verify makes another model for --connector alone")
    later = [one for one in own if one.act == MODEL]
    if not later:
        return judging.not_asked(what)
    given = [one for one in later if one.given]
    if given:
        tokens = sum(one.given for one in given)
        says = (
            f"{plural(len(given), 'request')} of another model got this one's KV: {plural(tokens, 'token')}"
        )
        return judging.failed_for(given, says)
    if late := judging.unanswered(later, what):
        return late
    if not any(one.given for one in own if one.act == RESTART):
        return not_observed("a restart with the same model finds nothing either")
    return proved(f"{plural(len(later), 'request')} of another model got nothing of this one's KV")


def _ranks(own: list[Asked], what: Observed) -> Verdict:
    engine = what.evidence.engine
    ranks = len(engine.workers) if engine is not None else 0
    if ranks < 2:
        return not_applicable("the engine has one rank")
    if bad := judging.loaded_wrong(what.loads, what) or judging.nothing(what):
        return bad
    return proved(f"what {plural(ranks, 'rank')} loaded is what each of them computed")


def _words(facts: EngineFacts) -> str:
    one, two, three = units(facts, 1), units(facts, 2), units(facts, 3)
    first = f"a{one}b{two} d1e{three} g{two}h{one}i{one} k{three - 1}l{one} o{one}p{two} q{one}r{two}"
    # o behind its own beginning, r behind another's: units that are both known, of which no prompt was made;
    # s: prompts that part within a unit
    within = max(1, min(facts.block, one // 2))
    again = f"c{one}b{two} f1e{three} g{two}j{one}i{one} k{three - 1}m{one} o{one}r{two}"
    # then what two prompts have in the same place, behind a beginning of each: it is other KV
    alike = f"a{one}b{two} c{one}b{two}"
    return f"{first} s{within}t{one} ; {again} s{within}u{one} ; {alike}"


def _two_units(text: str, serves: str = "") -> Callable[[EngineFacts], str]:
    """That text, with prompts of n tokens; "" where the engine's facts lack ``serves``."""

    def words(facts: EngineFacts) -> str:
        n = units(facts, 2) + unit(facts) // 2
        return text.format(n=n) if not serves or getattr(facts, serves) else ""

    return words


PROPERTIES = (
    Property("nobody-else", "Nothing comes back for another prompt", _others, _words),
    Property(
        "other-salt", "Nothing comes back for another cache_salt", _apart("cache_salt"),
        _two_units("a{n} b{n}@x ; a{n}@x b{n}@y b{n} ; b{n}@x"),
    ),
    Property(
        "other-adapter", "Nothing comes back for another LoRA adapter",
        _apart("adapter", "adapters", "the server serves no LoRA adapter"),
        _two_units("a{n} b{n}~1 ; a{n}~1 b{n} ; a{n}~1", "adapters"),
    ),
    Property(
        "other-image", "Nothing comes back for another image",
        _apart("image", "images", "the server's model takes no images"),
        _two_units("a{n}#1 ; a{n}#2 a{n}#1 a{n} ; a{n}#1 a{n}#2", "images"), shrinks=False,
    ),
    Property(  # first with the same model: what does not outlast its engine says nothing of the other one
        "other-model", "Nothing comes back for another model", _models,
        _two_units(f"a{{n}} b{{n}} ; {RESTART} a{{n}} ; {MODEL} a{{n}} b{{n}}", "other_model"), FULL,
        shrinks=False,
    ),
    Property("ranks-apart", "No rank gets another rank's KV", _ranks),
)  # fmt: skip
