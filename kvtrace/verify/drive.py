"""Asks an engine the workloads of all properties: their first rounds one after the other, then a rest, then
their second rounds. So the engine comes to rest a few times, whatever the number of properties."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtrace.verify.answers import Stopped, VerifyError
from kvtrace.verify.engine import EngineUnderTest, Reply, RequestToMake
from kvtrace.verify.evidence import IDENT, Evidence
from kvtrace.verify.observed import STOPPED, Asked, Death, with_stored
from kvtrace.verify.workload import MODEL, RESET, STORE_ACTS, Prompt, Round, Streams, Workload, parse

PROBE = "probe"
_DELAYS = (0.2, 1.5, 5.0)
"""Seconds that a store may need after the engine is at rest, tried one after the other."""
_FIRST_PATIENCE = 120.0
_LEAST_PATIENCE = 20.0
_TIMES = 30.0
"""An answer may take so many times as long as the slowest one before."""
_MOST_LATE = 3
"""Answers that never came after which the engine is asked no more."""
_REST_PATIENCE = 15.0
_SAMPLED = 10
"""Requests from one look at the processes to the next."""
_MOST_DEATHS = 5
"""Of the engine, after which it is started anew."""
_MOST_OF_WHY = 160
"""Characters of why it ended, in one line."""

Progress = Callable[[int, int, str], None]
"""Requests made, requests in all, what is asked now."""


@dataclass(frozen=True)
class Job:
    """A workload, and the property whose it is."""

    name: str
    workload: Workload


class Driver:
    """Asks one engine.

    Attributes:
        engine: the one that it asks; look: what its spools say now.
        asked: in order, with what came back, without what the spools say.
        samples: what the processes used (``usage`` says it), with the number of the request asked then.
        held: numbers of the rests (from 1) after which blocks were still held.
        died: why the engine is asked no more; stopped: as the user wants; deaths: after which it was started
            anew, too.
        shares: of the steps' time that hooks took until the store was damaged; None: it never was.
    """

    def __init__(
        self,
        engine: EngineUnderTest,
        streams: Streams,
        look: Callable[[], Evidence],
        progress: Progress = lambda done, total, what: None,
        act: Callable[[str], None] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``act``: damages the store; RESET: no more. ``say``: tells the user a line at once."""
        self.engine, self.look, self._streams = engine, look, streams
        self._progress, self._act, self._say = progress, act, say
        self.usage: Callable[[], Mapping[str, int]] | None = None
        self.samples: list[Mapping[str, float]] = []
        self.asked: list[Asked] = []
        self.held: list[int] = []
        self.deaths: list[Death] = []
        self.shares: Mapping[str, float] | None = None
        self.died = ""
        self.stopped = False
        self.resets = 0
        self.resets_known = True
        self.delay = _DELAYS[0]
        self._late = self._life = self._batch = 0
        self._slowest = 0.0
        self._total = 0
        self._other_model = False
        """Whether it runs with the other model."""

    @property
    def patience(self) -> float:
        """Seconds that an answer may take."""
        return max(_LEAST_PATIENCE, _TIMES * self._slowest) if self._slowest else _FIRST_PATIENCE

    def probe(self, lengths: Sequence[Sequence[int]], loads: bool = True) -> None:
        """Learn what comes back at all, and how long the connector's store needs until it does: prompts of
        the first of these lengths, then of the next ones after longer rests. From then on a rest is as long
        as the shortest one after which the most came back: where none helps, none is long.

        Args:
            loads: whether anything can come back; else it is learned what is taken.
        """
        came: dict[float, int] = {}
        for number, (delay, tried) in enumerate(zip(_DELAYS, lengths, strict=False)):
            self.delay = delay if loads else _DELAYS[0]
            words = " ".join(f"{name}{length}" for name, length in zip("ab", tried, strict=False))
            first = len(self.asked)
            self.run([Job(f"{PROBE}-{number}", parse(f"{words} ; {words}"))])
            if self.died:
                return
            evidence = self.look()
            shown = [evidence.of(one.number) for one in self.asked[first:] if one.round == int(loads)]
            came[self.delay] = sum(bool(seen and (seen.accepted if loads else seen.saved)) for seen in shown)
            if came[self.delay] == len(shown):
                break
        self.delay = max(came, key=lambda delay: (came[delay], -delay))

    def run(self, jobs: Sequence[Job]) -> None:
        """All of them; stops where the engine cannot be asked any more, or the user wants no more. A job that
        ends the engine, or has no answer, is asked no further; the engine is started anew for the others,
        which begin anew."""
        try:
            self._run(jobs)
        except Stopped:
            self.stopped, self.died = True, STOPPED

    def _run(self, jobs: Sequence[Job]) -> None:
        if self._other_model and not self.died:  # of the jobs before
            self._start_again()
        self._total += sum(len(job.workload.prompts) for job in jobs)
        kinds = dict.fromkeys(job.workload.acts for job in jobs)
        # what ends the engine comes late, then what damages the store, and behind it what changes the model
        for acts in sorted(
            kinds, key=lambda acts: (MODEL in acts, _damages(acts), bool(set(acts) - {"", RESET}), len(acts))
        ):
            # a connector may hold on to what the damage before took from it
            if self.shares is not None and not self.died and (_damages(acts) or MODEL in acts):
                self._start_again()
            left = [job for job in jobs if job.workload.acts == acts]
            while left and not self.died:
                deadly = self._together(left, acts)
                if deadly is None:
                    break
                left = [job for job in left if job is not deadly]
                self._begin_anew()

    def _together(self, jobs: Sequence[Job], acts: Sequence[str]) -> Job | None:
        """Round by round; the job that ended the engine, if one did."""
        late: set[str] = set()
        if self._act is not None:
            self._act(RESET)
        for at, act in enumerate(acts):
            if act and not self._rest(act):
                return None
            for job in jobs:
                if job.name in late:
                    continue
                replies = self._round(job, at, job.workload.rounds[at])
                if any(reply.late for reply in replies):
                    late.add(job.name)
                    self._late += 1
                    if self._late >= _MOST_LATE:
                        self.died = f"{self._late} times there was no answer"
                if any(reply.error for reply in replies) and (why := self.engine.gone()):
                    self.deaths.append(Death(job.name, why, len(self.asked) - 1))
                    return job
                if self.died:
                    return None
        return None

    def _begin_anew(self) -> None:
        if len(self.deaths) > _MOST_DEATHS:
            self.died = self.deaths[-1].why
            return
        death = self.deaths[-1]
        why = textwrap.shorten(death.why, _MOST_OF_WHY, placeholder=" …")
        self._say(f"asked {death.job}, {why}; starting the server anew")
        self._progress(len(self.asked), self._total, "starting the engine anew")
        self._start_again()

    def _round(self, job: Job, number: int, part: Round) -> list[Reply]:
        found: list[Reply] = []
        name = f"{job.name} {self._life}" if self.deaths else job.name
        for batch in part.batches:
            self._progress(len(self.asked), self._total, job.name)
            self._batch += 1
            first = len(self.asked)
            tokens = [self._tokens(name, prompt) for prompt in batch]
            requests = [
                RequestToMake(
                    f"{IDENT}-{first + at}", ids, one.generate, one.salt, one.leaves, one.preempted,
                    one.adapter, one.image,
                )
                for at, (one, ids) in enumerate(zip(batch, tokens, strict=True))
            ]  # fmt: skip
            replies = self.engine.ask(requests, self.patience)
            for at, (prompt, ids, reply) in enumerate(zip(batch, tokens, replies, strict=True)):
                self.asked.append(
                    Asked(
                        first + at, job.name, job.workload.text, number, part.act, self._life, self._batch,
                        prompt, ids, reply,
                    )
                )  # fmt: skip
            found += replies
            if self.usage is not None and first % _SAMPLED == 0 and (used := self.usage()):
                self.samples.append({"number": first, **used})
            self._slowest = max([self._slowest, *(one.seconds for one in replies if not one.error)])
            if any(reply.error for reply in replies):
                break
        return found

    def _tokens(self, name: str, prompt: Prompt) -> list[int]:
        """Of a prompt of the workload; behind one that goes on stands its last answer."""
        tokens = self._streams.tokens(name, prompt)
        if prompt.goes_on:
            before = [one for one in self.asked if one.tokens == tokens and one.prompt.asker == prompt.asker]
            tokens += before[-1].reply.tokens if before else ()
        return tokens

    def _rest(self, act: str) -> bool:
        """Let the engine come to rest, do what is to be done, empty its prefix cache."""
        self._progress(len(self.asked), self._total, act)
        self.resets += 1
        time.sleep(self.delay / 2)
        if not self._reset():
            return False
        time.sleep(self.delay / 2)
        if act == RESET:
            return True
        if act in STORE_ACTS:
            if self.shares is None:
                self.shares = self.look().hook_shares
            if self._act is not None:
                self._act(act)
            return True
        return self._start_again(act == MODEL)

    def _start_again(self, other: bool = False) -> bool:
        """... with its own model, or with the other one."""
        try:
            self.engine.restart(other)
        except VerifyError as error:
            self.died = str(error)
        self._other_model = other
        self._life += 1
        return not self.died

    def _reset(self) -> bool:
        came_about = self.engine.reset(_REST_PATIENCE)
        if came_about is None:
            self.resets_known = False
        elif not came_about:
            self.died = self.engine.gone()
            self.held.append(self.resets)
        return not self.died

    def seen(self, evidence: Evidence) -> list[Asked]:
        """All requests, with what the spools say of them."""
        return with_stored([replace(one, seen=evidence.of(one.number)) for one in self.asked], evidence.pair)


def _damages(acts: Sequence[str]) -> bool:
    return not set(acts).isdisjoint(STORE_ACTS)
