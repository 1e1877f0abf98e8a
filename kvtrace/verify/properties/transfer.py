"""Whether anything is saved and loaded, and whether what comes back is what was taken."""

from __future__ import annotations

from kvtrace.verify import judging
from kvtrace.verify.answers import Verdict, failed, not_applicable, not_observed, proved
from kvtrace.verify.observed import Asked, EngineFacts, Observed
from kvtrace.verify.properties.sizes import twice, usual
from kvtrace.verify.property import Property
from kvtrace.words import count, plural

_BY_ENGINE = (
    "all that was loaded is what these tokens compute to, bit by bit: see whether the engine's attention "
    "backend uses KV that it did not compute (vLLM's CPU_MLA does not, 0.32.0)"
)
_UNSEEN = "the scheduler took what the lookups offered; whether it was written could not be seen"


def _transfers(own: list[Asked], what: Observed) -> Verdict:
    saved = sum(one.seen.saved for one in what.plain if one.seen)
    accepted, seen = sum(one.given for one in what.loads), list(filter(judging.arrived, what.loads))
    if seen:
        due = sum(one.given * one.seen.pairs for one in what.loads if one.seen)
        came = sum(one.given * one.seen.pairs - one.seen.lost(*judging.NOT_THERE) for one in seen if one.seen)
        what_came = f"{count(accepted)} tokens were loaded"
        if came < due:  # a token may be there in some layers alone
            what_came = f"{count(came)} of {count(due)} accepted token-layers were seen to be loaded"
        return proved(f"{what_came}, for {plural(len(seen), 'request')}")
    if accepted:
        late = judging.unanswered(what.loads, what)
        return late or judging.loaded_wrong(what.loads, what) or not_observed(_UNSEEN)
    if what.facts.role == "kv_producer" or not what.facts.looks_up:
        if not saved and any(one.seen.unseen for one in what.plain if one.seen):
            return not_observed("it never loads, and what it took could not be seen")
        says = f"it never loads; {count(saved)} token-layers were taken"
        return not_applicable(says) if saved else failed("nothing was taken")
    if what.facts.role == "kv_consumer":
        return judging.nothing(what) or not_observed("nothing was loaded")
    again = [one for one in what.plain if one.round > 0 and one.stored and one.seen is not None]
    if late := judging.unanswered(what.plain, what):
        return late
    if not again:
        return not_observed(what.died or "no prompt was asked twice")
    asked = [one for one in again if one.seen and one.seen.offered is not None]
    if not asked:
        says = f"the connector was never asked for one of {plural(len(again), 'repeated prompt')}"
        return judging.failed_for(again, says)
    if what.held and any(one.seen.local for one in asked if one.seen):
        return not_observed(
            "blocks were not given back, so the engine's own prefix cache could not be emptied: nothing was "
            "left to load",
        )
    took = "something was taken" if saved else "nothing was taken either"
    says = f"nothing came back for {plural(len(again), 'repeated prompt')}; {took}"
    return judging.failed_for(again, says)


def _equal(own: list[Asked], what: Observed) -> Verdict:
    if bad := judging.nothing(what) or judging.loaded_wrong(what.loads, what):
        return bad
    proved_layers = sum(one.seen.proved for one in what.loads if one.seen)
    changed = [one for one in what.loads if judging.altered(one, what)]
    total = sum(one.given * one.seen.pairs for one in what.loads if one.seen)
    if changed:
        worst = max(changed, key=lambda one: judging.error_of(one) or (0.0, 0.0))
        error = judging.error_of(worst) or (0.0, 0.0)
        return proved(
            f"it comes back as other numbers: error {judging.share(error[0])} on the mean, "
            f"{judging.share(error[1])} at most",
            evidence=[judging.error_line(worst, what)],
            requests=judging.names(changed),
        )
    compared = sum(one.seen.compared for one in what.loads if one.seen)
    if not proved_layers and not compared:
        return not_observed(f"what was loaded could not be compared ({count(total)} token-layers)")
    others = "; of the others nothing is known" if proved_layers < total else ""
    says = (
        f"{count(proved_layers)} of {count(total)} token-layers that were loaded are what these tokens "
        f"computed to, bit by bit{others}"
    )
    other = judging.answers_differ(what.loads, what)
    if other and others:
        differ = f"{says}, and {plural(len(other), 'answer')} of requests that loaded differ"
        return not_observed(differ, evidence=[line for _, line in other][:3])
    return proved(says)


def _lookups(own: list[Asked], what: Observed) -> Verdict:
    beyond = [one for one in what.plain if one.seen and one.seen.offered and one.offered_to > one.seen.prompt]
    if beyond:
        first = beyond[0]
        return judging.failed_for(
            beyond,
            f"{plural(len(beyond), 'lookup')} offered more tokens than the prompt has: with what the GPU had "
            f"{count(first.offered_to)} of {first.id}, which has {count(len(first.tokens))}; vLLM asserts "
            "that this is never so",
        )
    if bad := judging.nothing(what) or judging.loaded_wrong(what.loads, what, *judging.NOT_THERE):
        return bad
    if not any(map(judging.arrived, what.loads)):
        return not_observed(_UNSEEN)
    offered = sum(one.seen.offered or 0 for one in what.loads if one.seen)
    return proved(
        f"{count(offered)} tokens were offered for {plural(len(what.loads), 'request')}, and what the "
        "scheduler took of them came"
    )


def _outputs(own: list[Asked], what: Observed) -> Verdict:
    compared = [one for one in what.plain if one.answered and not one.prompt.leaves]
    if what.reference:
        steady = {question for question, arm in what.reference.items() if arm.steady}
        compared = [one for one in compared if one.question in steady]
        beside = "an engine without the connector"
    else:
        compared = [one for one in compared if one.given and judging.right(one, what)]
        beside = "the same engine before it loaded"
    if not compared:
        unsteady = sum(not arm.steady for arm in what.reference.values())
        of_engine = f": the engine alone gives {plural(unsteady, 'prompt')} more than one answer each"
        return not_observed(f"no answer could be compared{of_engine if unsteady else ''}")
    other = judging.other_answers(compared, what)
    if not other:
        says = f"of {plural(len(compared), 'answer')} each is that of {beside}"
        asked = {one.number for one in compared}
        wrong = [one for one in what.loads if one.number not in asked and judging.bad_ends(one, what)]
        if wrong:  # those that a wrong load may have changed
            return not_observed(
                f"{says}; of {plural(len(wrong), 'more request')} what was loaded is wrong, and no answer "
                "was there to compare",
            )
        return proved(says)
    says = f"{len(other)} of {plural(len(compared), 'answer')} are not those of {beside}"
    whose = [one for one, _ in other]
    if all(judging.altered(one, what) for one in whose):
        says += "; KV comes back as other numbers there, within the stated error"
        return not_observed(says, requests=judging.names(whose))
    by_engine = [_BY_ENGINE] if all(judging.all_proved(one, what) for one in whose) else []
    evidence = [*by_engine, *[line for _, line in other][:3]]
    return judging.failed_for(whose, says, evidence=evidence)


def _asked_twice(facts: EngineFacts) -> str:
    return twice(f"a{usual(facts)}")


PROPERTIES = (
    Property(
        "transfers",
        "A transfer really happens: KV is saved, and loaded",
        _transfers,
        _asked_twice,
        shrinks=False,
    ),
    Property("comes-back-equal", "What was saved comes back for the same prefix, equal", _equal),
    Property("lookups-agree", "What a lookup offers is what is loaded", _lookups),
    Property("outputs", "Answers are those of an engine without the connector", _outputs),
)
