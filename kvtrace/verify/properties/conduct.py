"""How a connector behaves meanwhile: it ends what it began, gives back blocks, does not hold up a step."""

from __future__ import annotations

from kvtrace.ledger.ends import LoadEnd, SaveEnd
from kvtrace.verify import judging
from kvtrace.verify.answers import Verdict, failed, not_applicable, not_observed, proved
from kvtrace.verify.evidence import bad_saves
from kvtrace.verify.observed import Asked, Observed
from kvtrace.verify.property import Property
from kvtrace.words import duration, percent, plural


def _hangs(own: list[Asked], what: Observed) -> Verdict:
    late = [one for one in what.plain if one.reply.late]
    if late:
        says = f"{plural(len(late), 'request')} had no answer in {duration(what.patience)}"
        return judging.failed_for(late, says)
    deaths = [death for death in what.deaths if death.number < what.damaged]
    if deaths:
        first = deaths[0]
        asked = [one for one in what.asked if one.number == first.number]
        return judging.failed_for(asked, f"the engine ended: {first.why}", evidence=judging.raised(what))
    if what.stopped:
        return not_observed(f"not all was asked: {what.died}")
    if what.died:
        return judging.failed_for(what.plain[-1:], f"the engine could not be asked any more: {what.died}")
    if other := judging.unanswered([one for one in what.plain if not one.prompt.leaves], what):
        return other
    slowest = max((one.reply.seconds for one in what.plain), default=0.0)
    return proved(f"{plural(len(what.plain), 'request')} were answered, the slowest in {duration(slowest)}")


def _blocks(own: list[Asked], what: Observed) -> Verdict:
    if what.held:
        return failed(
            f"after {len(what.held)} of {plural(what.resets, 'rest')} the engine still had blocks in use "
            "that no request needs",
            evidence=["POST /reset_prefix_cache was refused until the patience ended"],
        )
    if not what.resets or not what.resets_known:
        return not_observed("this version does not say whether its blocks are free")
    return proved(f"at {plural(what.resets, 'rest')} every block had been given back")


def _told(own: list[Asked], what: Observed) -> Verdict:
    run = what.evidence.run
    if run is None:
        return not_observed("nothing was recorded")
    if what.stopped:
        return not_observed(f"not awaited: {what.died}")
    open_loads = [one for one in what.plain if one.seen and one.seen.asynchronous and one.given]
    if not run.async_saves and not open_loads:
        return not_applicable("it announces no asynchronous save and no asynchronous load")
    never = [one for one in open_loads if one.seen and one.seen.lost(LoadEnd.NOT_FINISHED)]
    if never:
        says = f"of {plural(len(open_loads), 'asynchronous load')} {len(never)} never came to an end"
        return judging.failed_for(never, says)
    early = [one for one in open_loads if one.seen and one.seen.lost(LoadEnd.USED_BEFORE)]
    if early:
        says = f"of {plural(len(open_loads), 'asynchronous load')} {len(early)} were told to be over early"
        return judging.failed_for(early, says)
    if saves := bad_saves(run):
        pending = sum(save.end == SaveEnd.PENDING for save in run.async_saves)
        says = f"of {plural(len(run.async_saves), 'asynchronous save')} {len(saves)} were "
        more = f"; of {pending} more no end was seen" if pending else ""
        return failed(
            says + ", ".join(sorted({end for _, end in saves})) + more,
            requests=[ident for ident, _ in saves][: judging.MOST_NAMED],
        )
    return proved(
        f"the engine heard of the end of {plural(len(run.async_saves), 'asynchronous save')} and "
        f"{plural(len(open_loads), 'asynchronous load')}"
    )


def _share(own: list[Asked], what: Observed) -> Verdict:
    shares = what.evidence.hook_shares
    if not shares:
        return not_observed("no hook was timed in the workers' steps")
    worst = max(shares, key=lambda name: shares[name])
    share = shares[worst]
    says = f"{worst} takes {percent(share)} of the time of the steps"
    if not what.settings.share:
        return not_observed(f"{says}; no share was stated (--hook-share)")
    if share > what.settings.share:
        return failed(f"{says}, more than {percent(what.settings.share)}")
    return proved(f"{says}, of {percent(what.settings.share)} that it may")


PROPERTIES = (
    Property("nothing-hangs", "Every request is answered", _hangs),
    Property("blocks-given-back", "Blocks are given back when requests are over", _blocks),
    Property("finish-told", "The end of each asynchronous save and load is told", _told),
    Property("hook-share", "No hook takes more than the stated share of the steps' time", _share),
)
