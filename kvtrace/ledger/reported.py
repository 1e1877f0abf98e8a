"""What the processes reported beside their records: targets, exceptions, log lines, configuration keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvtrace.ledger.run import (
    ConfigKeys,
    HookException,
    LogLine,
    StartFailure,
    Swallowed,
    TargetStatus,
    WatchLimits,
    Worker,
)
from kvtrace.ledger.scan import SpoolScan
from kvtrace.trace import facts, hooks, rows
from kvtrace.trace.format import STEP_SHIFT, Way

SAVE_HOOKS = tuple(hook.name for hook in hooks.SAVING)
LOAD_HOOKS = tuple(hook.name for hook in hooks.LOADING)
START_HOOKS = (hooks.REGISTER_KV_CACHES.name, hooks.REGISTER_CROSS_LAYERS.name)
"""They run before the first step."""
BACKGROUND = ("thread", "executor", "asyncio")
"""Where exceptions of a connector's work beside the hooks stand."""
_MAX_PLACES = 256
_WORST = ("failed", "late", "missing", "found", "pending")

T = TypeVar("T")


def _of(kind: Callable[..., T], fact: facts.Document, **identity: Any) -> T:
    """A fact with what tells it apart from those of other processes."""
    return kind(**{**vars(fact), **identity})


def targets(scans: Sequence[SpoolScan]) -> list[TargetStatus]:
    """Each target over all processes, with the worst status that any of them reports."""
    latest: dict[str, dict[str, facts.TargetFact]] = {}
    for scan in scans:
        for fact in scan.facts_of(facts.TargetFact):
            if fact.id:
                latest.setdefault(fact.id, {})[scan.name] = fact
    found = []
    for ident in sorted(latest):
        rows = list(latest[ident].values())
        status = next((s for s in _WORST if any(row.status == s for row in rows)), "pending")
        with_it = [row for row in rows if row.status == status] or rows
        found.append(_of(TargetStatus, with_it[0], status=status, processes=len(with_it)))
    return found


_DEPTH = {"LLM": 1, "configuration": 2, "command line": 2, "engine core": 3}
"""Stages of a start, the outer ones first: those of a worker (deeper yet) have the names of its methods."""
_OF_A_WORKER = 4


def start_failures(scans: Sequence[SpoolScan]) -> list[StartFailure]:
    """Why an engine never came up: of each process the first stage that raised, and of these the innermost
    ones alone, as the others only passed on that something had failed."""
    found = {}
    for scan in scans:
        for fact in scan.facts_of(facts.StartFailedFact)[:1]:
            one = _of(StartFailure, fact, pid=scan.pid)
            if one.stage != facts.STEP:
                found[one.line] = one
    deepest = max((_DEPTH.get(one.stage, _OF_A_WORKER) for one in found.values()), default=0)
    return [found[line] for line in sorted(found) if _DEPTH.get(found[line].stage, _OF_A_WORKER) == deepest]


def ended_in_steps(scans: Sequence[SpoolScan]) -> list[StartFailure]:
    """What raised out of a step of an engine core, and ended it."""
    every = ((scan.pid, fact) for scan in scans for fact in scan.facts_of(facts.StartFailedFact))
    return [_of(StartFailure, fact, pid=pid) for pid, fact in every if fact.stage == facts.STEP]


def exceptions(scans: Sequence[SpoolScan]) -> list[HookException]:
    """The exceptions that hooks raised; one row per process, hook, layer, type and place."""
    latest: dict[tuple[object, ...], HookException] = {}
    for scan in scans:
        for fact in scan.facts_of(facts.HookExceptionFact):
            row = _of(HookException, fact, pid=scan.pid, layer=fact.layer or "")
            key = (row.pid, row.hook, row.layer, row.type, row.where)
            first = latest.get(key, replace(row, count_so_far=0))  # the fact's is of all of its process
            latest[key] = replace(first, count_so_far=first.count_so_far + 1)
    return sorted(latest.values(), key=lambda row: (row.pid, row.step, row.hook, row.layer))


def swallowed(scans: Sequence[SpoolScan]) -> list[Swallowed]:
    """Exceptions that connectors handled themselves: one row per process, hook, type and place."""
    found: dict[tuple[object, ...], Swallowed] = {}
    for scan in scans:
        for fact in scan.facts_of(facts.SwallowedFact):
            row = _of(Swallowed, fact, pid=scan.pid, spool=scan.name, layer=fact.layer or "")
            key = (row.spool, row.hook, row.type, row.where, row.connector, row.step >> 32)
            first = found.get(key, row)
            found[key] = replace(
                first,
                count=max(1, first.count, row.count),
                observed_calls=max(0, first.observed_calls, row.observed_calls),
                logged=first.logged or row.logged,
                ended=first.ended or row.ended,
                went_on=row.went_on if first.went_on is None else first.went_on and row.went_on is not False,
                places=(*first.places, (row.step, row.layer))[:_MAX_PLACES],
            )
    vain = {scan.name: _opened_in_vain(scan) for scan in scans}
    told = [replace(row, in_vain=_in_vain(row, vain[row.spool])) for row in found.values()]
    return sorted(told, key=lambda row: (row.pid, row.step, row.hook, row.layer, row.type))


def _opened_in_vain(scan: SpoolScan) -> list[str]:
    """Files that were opened to write and not there when their call was over, nor under another name; none
    where any file was."""
    table = rows.columns(rows.Outside, scan.outside)
    files = rows.code(table.head) == Way.FILE
    there = files & ((table.errors == 0) | (table.bytes != 0))
    return [] if there.any() else [scan.names.get(one, "?") for one in table.target[files].tolist()]


def _in_vain(fact: Swallowed, opened: Sequence[str]) -> str:
    """The first of these files where it was by them that it was caught, and not by looking for one."""
    saving = fact.asked_by if fact.hook in BACKGROUND else fact.hook
    missing = fact.type == "FileNotFoundError" and saving in SAVE_HOOKS and not fact.broad
    return opened[0] if missing and fact.went_on is False and 0 < fact.count <= len(opened) else ""


ALL_SAID = 16
"""Exceptions of a kind that are said one by one; after that whenever they have doubled."""


def _most(count: int) -> int:
    """How many there may have been when the trace ended."""
    return count if count < ALL_SAID else 2 * count - 1


@dataclass(frozen=True)
class Caught:
    """Exceptions that a worker's connector raised and handled in some of its hooks."""

    facts: tuple[Swallowed, ...]

    def at(self, step: int, layer: str) -> bool:
        """Whether one is known of exactly this call."""
        return any((step, name) in fact.places for fact in self.facts for name in (layer, ""))

    @property
    def sure(self) -> Caught:
        """Without what may be ordinary control flow."""
        return Caught(tuple(fact for fact in self.facts if not fact.broad))

    @property
    def ended(self) -> Caught:
        """Those that ended the work in which they came."""
        return Caught(tuple(filter(ended_its_work, self.facts)))

    def layer_calls(self, layers: int) -> int:
        """Calls of a layer that they may concern; one of a hook without a layer concerns all ``layers``."""
        return sum(_most(fact.count) * (1 if fact.layer else layers) for fact in self.facts)

    def known_calls(self, layers: int) -> int:
        """Those of which it is known which they were."""
        return sum(len(fact.places) * (1 if fact.layer else layers) for fact in self.facts)

    def as_usual(self, lost: int, layers: int) -> Caught:
        """Without what may be ordinary control flow, where that is not as frequent as lost calls are.

        Args:
            lost: calls of a layer that did less than they should.
        """
        return self if self.layer_calls(layers) >= lost else self.sure


def _of_worker(worker: Worker, swallowed: Sequence[Swallowed]) -> Iterator[Swallowed]:
    """The exceptions of one worker's process, those of another engine in it left out."""
    for fact in swallowed:
        if fact.spool == worker.spool and (not fact.step or fact.step >> STEP_SHIFT == worker.engine):
            yield fact


def caught_in(worker: Worker, swallowed: Sequence[Swallowed], of: Sequence[hooks.Hook]) -> Caught:
    """The handled exceptions of one worker in these hooks, and in work that they gave to the background;
    harmless ones left out, and there those after which the work went on."""
    names = {hook.name for hook in of}

    def concerns(fact: Swallowed) -> bool:
        asked = fact.hook in BACKGROUND and fact.asked_by in names and fact.went_on is not True
        return not fact.harmless and (fact.hook in names or asked)

    return Caught(tuple(filter(concerns, _of_worker(worker, swallowed))))


_SAVING = (*SAVE_HOOKS, *BACKGROUND)


def caught_in_saving(worker: Worker, swallowed: Sequence[Swallowed]) -> Caught:
    """The exceptions that a worker's connector handled itself where it saves, its work in the background
    included; without those after which the same call went on to do its work."""
    return Caught(tuple(fact for fact in _of_worker(worker, swallowed) if may_end_a_save(fact)))


def may_end_a_save(fact: Swallowed) -> bool:
    """Whether it was caught where the connector saves, and the same call is not known to have gone on."""
    telling = not fact.harmless or (fact.type == "TimeoutError" and fact.went_on is False)
    saving = fact.hook in _SAVING and (not fact.asked_by or fact.asked_by in _SAVING)
    return telling and saving and not fact.broad and fact.went_on is not True


def ended_its_work(fact: Swallowed) -> bool:
    """Whether it ended a job, or is an error of the system's (a full disk). After any other the call may have
    tried once more, or elsewhere: what is put into memory is not seen."""
    return fact.ended or fact.message.startswith("[Errno")


CAUGHT = "raised and caught"


def caught_line(whose: str, fact: Swallowed | facts.SwallowedFact) -> str:
    """``start_load_kv raised and caught OSError: gone (at store.py:7 in get)``."""
    return f"{whose} {CAUGHT} {fact.type}: {fact.message[:160]} (at {fact.where})"


def caught_in_loading(swallowed: Sequence[Swallowed]) -> dict[int, list[str]]:
    """Step -> what a connector caught itself where it loads, its work in the background included; without
    that after which the same call went on to do its work."""
    found: dict[int, list[str]] = defaultdict(list)
    for fact in swallowed:
        asked = fact.asked_by if fact.hook in BACKGROUND else fact.hook
        if asked in LOAD_HOOKS and not fact.broad and not fact.went_on and not fact.harmless:
            whose = f"{fact.hook} for {asked}" if fact.hook in BACKGROUND else asked
            line = caught_line(whose, fact)
            for step in dict.fromkeys(step for step, _ in fact.places):
                found[step].append(line)
    return dict(found)


def logs(scans: Sequence[SpoolScan]) -> list[LogLine]:
    """What connectors logged inside hooks: one row per process, hook and message."""
    latest: dict[tuple[object, ...], LogLine] = {}
    for scan in scans:
        for fact in scan.facts_of(facts.LogFact):
            row = _of(LogLine, fact, pid=scan.pid, spool=scan.name, layer=fact.layer or "",
                      count=max(1, fact.count))  # fmt: skip
            key = (row.spool, row.hook, row.logger, row.level, row.message)
            first = latest.get(key, row)
            latest[key] = replace(row, step=first.step, layer=first.layer)
    return sorted(latest.values(), key=lambda row: (row.pid, row.step, row.hook, row.message))


def config_keys(scans: Sequence[SpoolScan]) -> list[ConfigKeys]:
    """Given and read keys of each connector; the latest fact knows most."""
    latest = {
        (scan.name, fact.connector): _of(ConfigKeys, fact, pid=scan.pid, spool=scan.name)
        for scan in scans
        for fact in scan.facts_of(facts.ConfigKeysFact)
    }
    return [latest[key] for key in sorted(latest)]


def unreadable_metadata(scans: Sequence[SpoolScan]) -> list[facts.UnreadableMetadataFact]:
    """What was not understood in the connectors' metadata, the most frequent first; its steps are at least so
    many, as they are written down whenever they have doubled."""
    latest = {
        (scan.name, fact.connector, fact.cls, fact.field, fact.shape): fact
        for scan in scans
        for fact in scan.facts_of(facts.UnreadableMetadataFact)
    }
    return [latest[key] for key in sorted(latest, key=lambda key: (-latest[key].steps, key))]


def watch_limits(scans: Sequence[SpoolScan]) -> list[WatchLimits]:
    """What the watch could not follow, process by process, as it was met."""
    return [
        _of(WatchLimits, fact, pid=scan.pid, spool=scan.name)
        for scan in scans
        for fact in scan.facts_of(facts.WatchLimitsFact)
    ]


def given_away(scans: Sequence[SpoolScan]) -> frozenset[tuple[str, int]]:
    """(spool, engine) in whose steps the address of a KV tensor was given out, or unknown native code got it;
    engine 0: outside of steps, it may be any. From seeing no copy of theirs nothing follows."""
    kinds = (facts.Limit.ADDRESS, facts.Limit.OPERATION)
    met = (one for one in watch_limits(scans) if one.kind in kinds)
    return frozenset((one.spool, one.step >> STEP_SHIFT) for one in met)


UNFOLLOWED = frozenset({facts.Limit.ADDRESS, facts.Limit.OPERATION, facts.Limit.NATIVE, facts.Limit.THREAD})
"""Kinds of ways on which KV can be copied unseen."""
UNRECORDED = frozenset({facts.Limit.NATIVE, facts.Limit.THREAD})
"""Of these the ones of which nothing is recorded: of an operation that is not known, and of an address that
was given out, a record says that slots were read, and not which."""


def hides_writes(scans: Sequence[SpoolScan], kinds: Collection[str] = UNFOLLOWED) -> frozenset[str]:
    """Spools of processes in which a load may have written KV unseen: a way of these kinds was met elsewhere
    than in a hook that saves, or the agent failed."""
    met = [one for one in watch_limits(scans) if one.kind in kinds and one.hook not in SAVE_HOOKS]
    return frozenset(one.spool for one in met) | {scan.name for scan in scans if agent_failed([scan])}


def agent_failed(scans: Sequence[SpoolScan]) -> bool:
    """Whether records of calls and copies may be missing, as the agent's own code raised."""
    errors = (one for scan in scans for one in scan.facts_of(facts.AgentErrorFact))
    return any(one.where not in facts.HIDES_NO_COPY for one in errors)


def agent_errors(scans: Sequence[SpoolScan]) -> list[tuple[int, str, str]]:
    """(process, where, error) of each failure of the agent itself."""
    return [
        (scan.pid, fact.where, fact.error) for scan in scans for fact in scan.facts_of(facts.AgentErrorFact)
    ]


def asking(scans: Sequence[SpoolScan]) -> frozenset[str]:
    """Engine's ids of the requests that ask for a transfer between a prefill and a decode engine."""
    said = (fact for scan in scans for fact in scan.facts_of(facts.HandOverFact))
    return frozenset(fact.request for fact in said if fact.asks and not fact.returned)


def flags(scans: Sequence[SpoolScan]) -> dict[str, frozenset[str]]:
    """Engine's id of a request -> the flags in its ``kv_transfer_params``: ``'lmcache.skip_save' = true``."""
    said = (fact for scan in scans for fact in scan.facts_of(facts.HandOverFact))
    return {
        fact.request: frozenset(f"'{key}' = {str(value).lower()}" for key, value in fact.flags.items())
        for fact in said
        if fact.flags and not fact.returned
    }


def clients(scans: Sequence[SpoolScan]) -> dict[str, str]:
    """Engine's request id -> client's."""
    return {
        fact.engine: fact.client
        for scan in scans
        for fact in scan.facts_of(facts.ClientIdFact)
        if fact.engine
    }
