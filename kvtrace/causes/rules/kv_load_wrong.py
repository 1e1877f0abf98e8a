"""kv-load-wrong: what a load put into the KV cache is not what its tokens compute to."""

from __future__ import annotations

from kvtrace.causes.diagnosis import RuledOut
from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import FAULT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.ledger.contents.compare import EQUAL, NOT_COMPARED, WRONG
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="kv-load-wrong",
    severity=FAULT,
    ledger=LOADS,
    meaning="What a load put into the KV cache is not what these tokens compute to.",
    seen_as=(
        "The fingerprint of a loaded block is that of other tokens or of another place, or stands twice in "
        "one load, or is none of those that the same tokens computed to in this run on that rank, though "
        "each of these is known and the store had nothing for them before. The "
        "fingerprints of single layers tell which of them differ."
    ),
    remedy=(
        "Check the key (all tokens up to the end of what is stored, model, layer, rank), the order of the "
        "blocks, the layer that each piece is written to, and that nothing on the way changes the bytes (a "
        "cast, a cut, a copy before the forward)."
    ),
    load_ends=(LoadEnd.WRONG,),
)


VERIFIED = "kv-verified"
"""What stands among the rule-outs where loads were compared, and equal."""


def rule(case: Case) -> Results:
    accepted = list(loads.accepted(case))
    wrong = loads.affected(case, CAUSE)
    blocks = case.run.compared
    equal, unequal, unknown = (blocks.get(word, 0) for word in (EQUAL, WRONG, NOT_COMPARED))
    compared = f"{of_all(equal, equal + unequal + unknown, 'loaded block')}"
    if wrong:
        lost = loads.tokens(case, wrong, CAUSE)
        what = plural(lost, "token") if lost else "Layers of tokens that another finding counts"
        yield loads.finding(
            case,
            CAUSE,
            f"{what} were loaded with KV that is not theirs ({of_all(len(wrong), len(accepted), 'load')}).",
            evidence=[
                f"of {plural(equal + unequal + unknown, 'loaded block')} {count(unequal)} hold other KV, "
                f"{count(equal)} what their tokens computed to, {count(unknown)} could not be compared",
                *loads.reasons_and_places(wrong, CAUSE),
            ],
            headline="loaded KV is not what its tokens compute to",
        )
    elif equal and not unequal:
        tokens = sum(row.proved / case.engines[row.engine].pairs for row in accepted)
        loaded = sum(row.accepted for row in accepted)
        more = "" if tokens >= loaded else f" of {count(loaded)} loaded; of the others nothing is known"
        yield RuledOut(
            VERIFIED,
            f"{compared} hold exactly what the same tokens computed to in this run "
            f"({plural(tokens, 'token')} in all layers and ranks{more})",
        )
    elif unknown and not unequal:
        yield CAUSE.not_observed(
            f"of {plural(unknown, 'loaded block')} none could be compared with what the same tokens "
            "computed to in this run"
        )
