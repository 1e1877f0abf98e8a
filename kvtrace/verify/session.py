"""One ``kvtrace verify``: the order in which it happens."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from kvtrace.launch.rundir import RunDir, safe_name, shown
from kvtrace.ledger.run import Engine
from kvtrace.trace.format import SPOOL_DIR
from kvtrace.trace.options import option
from kvtrace.verify import connector, models, shrink
from kvtrace.verify.alone import AskedAlone, CasesAlone, judged_alone
from kvtrace.verify.answers import Answer, Answered, Result, Stopped, VerifyError
from kvtrace.verify.command import BLOCKS, without_connector
from kvtrace.verify.drive import Driver, Progress
from kvtrace.verify.engine import Reply, RequestToMake
from kvtrace.verify.observed import Arm, EngineFacts, Observed, Question, Settings
from kvtrace.verify.pair import ServerPair
from kvtrace.verify.property import FULL, QUICK, Property, judged
from kvtrace.verify.registry import of_suite
from kvtrace.verify.served import Server, TracedServer
from kvtrace.verify.store import Store
from kvtrace.verify.suite import ask, observed
from kvtrace.verify.workload import Streams
from kvtrace.words import listed

_MOST_COMPARED = 24
"""Prompts that an engine without the connector is asked."""
_TURNS = 3


@dataclass(frozen=True)
class Small:
    """A small server with a connector that comes without one.

    Attributes:
        config: JSON, as :func:`kvtrace.verify.connector.transfer_config` takes it.
        model: a folder, or the kind of a small one; None makes small ones.
    """

    connector: str
    config: str | None = None
    model: Path | None = None


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        command: starts the server; empty with ``small``.
        decode: starts a second one, which loads what the first one saves; empty where there is one.
        error, hook_share, all_units: as in :class:`~kvtrace.verify.observed.Settings`.
        reference: whether an engine without the connector is asked, too.
        case: a workload that is asked in place of the suite's; "" the suite's.
        store: the connector's own directory, where the user names it.
        shrink_seconds: for the search of the smallest failing case, in all; 0 none is made.
    """

    command: Sequence[str]
    suite: str = QUICK
    output: Path | None = None
    seed: int | None = None
    error: float = Settings.error
    hook_share: float = 0.0
    reference: bool = True
    case: str = ""
    store: Path | None = None
    start_timeout: float = 900.0
    small: Small | None = None
    shrink_seconds: float = 0.0
    decode: Sequence[str] = ()
    all_units: bool = False

    @property
    def settings(self) -> Settings:
        return Settings(self.error, self.hook_share, self.all_units)


def verify(
    options: Options,
    progress: Progress = lambda done, total, what: None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Start the server, ask it, stop it, judge; of a connector without one each kind of model in turn.

    Raises:
        Stopped: before there was anything to say; what is raised later ends the asking.
        VerifyError: it cannot be verified: usage, no connector, a server that does not start.
        LaunchError: no run directory can be made.
    """
    began = time.monotonic()
    name = options.small.connector if options.small else os.path.basename(options.command[0])
    rundir = RunDir.create(safe_name(f"verify-{name}"), options.output)
    (rundir.path / SPOOL_DIR).rmdir()  # each start of a server has a run directory of its own
    if options.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    found: list[Result] = []
    notes: list[str] = []
    try:
        store = Store(options.store, rundir.path / "store-is") if options.store is not None else None
        for kind in _kinds(options):
            try:
                found.append(_One(options, kind, rundir.path / kind, progress, say, store).verify())
            except VerifyError as error:
                if not found:
                    raise
                notes.append(f"nothing is known of {kind}: {error}")
            if found and found[-1].stopped:
                break
    except VerifyError:
        if not any(path.is_dir() for path in rundir.path.iterdir()):
            rundir.discard()
        raise
    first = found[0]
    again = {key: line for one in found for key, line in one.again.items()}
    return replace(
        first,
        run=shown(rundir.path),
        answers=[answer for one in found for answer in one.answers],
        again=again,
        notes=[*(note for one in found for note in one.notes), *notes],
        seconds=time.monotonic() - began,
        stopped=found[-1].stopped,
    )


def _kinds(options: Options) -> list[str]:
    if options.small is None:
        return [""]
    return connector.kinds(options.small.model, options.suite == FULL)


class _One:
    """One server, from its start to the answers."""

    def __init__(
        self,
        options: Options,
        kind: str,
        directory: Path,
        progress: Progress,
        say: Callable[[str], None],
        store: Store | None,
    ) -> None:
        self._options, self._kind, self._directory = options, kind, directory
        self._progress, self._say, self._store = progress, say, store
        self._notes: list[str] = []
        self._stopped = False
        self._environ = store.environ if store is not None else {}
        self._command, self._other = list(options.command), list[str]()
        small = options.small
        if small is not None:
            model = models.make(kind) if kind or small.model is None else small.model
            blocks = models.KINDS[kind].blocks if kind else models.MANY_BLOCKS
            self._command = connector.command(small.connector, small.config, model, blocks)
            if options.suite == FULL and kind:
                other = models.make(kind, other=True)
                self._other = [str(other) if word == str(model) else word for word in self._command]
            self._environ |= connector.environ(os.environ)

    def verify(self) -> Result:
        options = self._options
        bare = without_connector(options.decode or self._command)
        self._directory.mkdir(exist_ok=True, mode=0o700)
        engine = self._engine()
        store = self._store
        act = store.act if store is not None else None
        streams = Streams(f"{options.seed} {self._kind}")
        driver = Driver(engine, streams, engine.look, self._progress, act, self._say)
        driver.usage = engine.usage
        self._say(f"starting the server; its output goes to {shown(self._directory)}")
        try:
            engine.start()
            blocks = int(option(self._command, BLOCKS) or 0)  # of the server that saves
            named = options.store is not None
            first, facts = ask(driver, options.suite, options.case, named, blocks)
            facts = replace(facts, met=store.met if store is not None else frozenset())
            alone, smaller = self._more(driver, facts)
        finally:
            if store is not None:
                store.restore()
            engine.stop()
        what = observed(driver, facts, options.settings)
        if bare is None:
            line = (
                "how to start it without its connector is not known: answers are compared within one engine"
            )
            self._notes.append(line)
        elif options.reference and not driver.stopped:
            self._say("starting the same server without the connector")
            what = replace(what, reference=self._reference(bare, what))
        answers = [replace(one, model=self._kind) for one in judged(of_suite(options.suite), what)]
        answers = [judged_alone(one, alone[one.id]) if one.id in alone else one for one in answers]
        answers = [_with_case(one, *smaller.get(one.id, ("", ""))) for one in answers]
        if options.case:
            answers = [one for one in answers if one.verdict.answer is not Answer.NOT_APPLICABLE]
        tried = alone.keys() | {ident for ident, (_, says) in smaller.items() if says}
        self._notes += [] if options.case else _untried(answers, tried)
        again = {
            one.key: shlex.join(repeats(options, self._kind, one)) for one in answers if _repeatable(one)
        }
        return Result(
            subject(first), options.suite, self._options.seed or 0, "", answers, again,
            self._notes, stopped=driver.stopped or self._stopped,
        )  # fmt: skip

    def _engine(self) -> TracedServer | ServerPair:
        patience, decode = self._options.start_timeout, self._options.decode
        if not decode:
            return TracedServer(self._command, self._environ, self._directory, patience, self._other)
        sides = []
        for name, command in (("prefill", self._command), ("decode", decode)):
            folder = self._directory / name
            folder.mkdir(mode=0o700)
            sides.append(TracedServer(command, self._environ, folder, patience))
        return ServerPair(*sides)

    def _more(
        self, driver: Driver, facts: EngineFacts
    ) -> tuple[dict[str, CasesAlone], dict[str, tuple[str, str]]]:
        """What an engine that is still up says of the failures: of what did not come back which case fails
        alone, too (as of :class:`AskedAlone`), and the smallest case found of the others."""
        if driver.died:
            return {}, {}
        settings, suite = self._options.settings, of_suite(self._options.suite)
        what = observed(driver, facts, settings)
        deadly = {death.job for death in driver.deaths}
        failed = [
            (one, answered.verdict)
            for one, answered in zip(suite, judged(suite, what), strict=True)
            if answered.verdict.answer is Answer.FAILED and answered.verdict.case and one.id not in deadly
        ]
        kept, deaths = len(driver.asked), len(driver.deaths)
        alone: dict[str, CasesAlone] = {}
        if not self._options.case:
            self._progress(0, 0, "what did not come back, alone")
            absent = [(one, verdict) for one, verdict in failed if verdict.alone]
            alone = AskedAlone(driver, facts, settings).failing(absent)
        case = {one.id: alone[one.id].fails if one.id in alone else verdict.case for one, verdict in failed}
        failing = [(one, case[one.id]) for one, _ in failed if one.shrinks and case[one.id]]
        smaller = self._smaller(driver, facts, failing)
        del driver.asked[kept:]
        del driver.deaths[deaths:]
        driver.died = ""  # all of the suite was asked
        return alone, smaller

    def _smaller(
        self, driver: Driver, facts: EngineFacts, failing: Sequence[tuple[Property, str]]
    ) -> dict[str, tuple[str, str]]:
        seconds = self._options.shrink_seconds
        if not seconds or not failing:
            return {}
        if not shrink.available():
            self._notes.append("for the smallest failing case: pip install 'kvtrace[verify]'")
            return {}
        share = seconds / len(failing)
        shrinker = shrink.Shrinker(driver, facts, self._options.settings, share)
        found = {}
        for one, case in failing:
            self._progress(0, len(failing), f"smallest case of {one.id}")
            found[one.id] = shrinker.smallest(one, case)
        return found

    def _reference(self, command: Sequence[str], what: Observed) -> dict[Question, Arm]:
        """What the same server answers without a connector: to each prompt anew, to all together from its own
        prefix cache (preempted where it was), and anew once more. Its own answers differ by its noise."""
        loaded = {one.question for one in what.loads}
        prompts = list(
            dict.fromkeys(one.question for one in what.plain if one.answered and not one.prompt.leaves)
        )
        prompts = sorted(prompts, key=lambda prompt: prompt not in loaded)[:_MOST_COMPARED]
        preempted = {one.question for one in what.plain if one.prompt.preempted}
        log = self._directory / "reference.log"
        server = Server(command, command, log, self._options.start_timeout)
        replies: dict[Question, list[Reply]] = {prompt: [] for prompt in prompts}
        try:
            server.start(self._environ)
            for turn in range(_TURNS):
                if turn == _TURNS - 1:
                    server.reset(20.0)
                for batch in _batches(turn, prompts, preempted):
                    done = turn * len(prompts) + batch[0][0]
                    self._progress(done, _TURNS * len(prompts), "without the connector")
                    found = server.ask([request for _, request in batch], what.patience)
                    for (number, _), reply in zip(batch, found, strict=True):
                        replies[prompts[number]] += [] if reply.error else [reply]
        except VerifyError as error:
            line = "without its connector the server did not start, answers are compared within one engine"
            self._notes.append(f"{line}: {error}")
            return {}
        except Stopped:
            self._stopped = True
            self._notes.append("answers are compared within one engine: it was stopped before the other's")
            return {}
        finally:
            server.stop()
        return {prompt: Arm(tuple(found)) for prompt, found in replies.items() if found}


def _batches(
    turn: int, prompts: Sequence[Question], preempted: Set[Question]
) -> list[list[tuple[int, RequestToMake]]]:
    """Prompts by number, in the order in which a turn asks them, and those together that it asks together."""
    together = turn == 1
    asked = [
        (
            number,
            RequestToMake(f"kvreference-{turn}-{number}", *one, preempted=together and one in preempted),
        )
        for number, one in enumerate(prompts)
    ]
    calm = [one for one in asked if together and not one[1].preempted]
    return [*([calm] if calm else []), *([one] for one in asked if one not in calm)]


def repeats(options: Options, kind: str, one: Answered) -> list[str]:
    """The command line that repeats the case of a failure alone."""
    small = options.small
    words = ["kvtrace", "verify", "--case", f"{one.id}: {one.verdict.case}", "--suite", options.suite]
    words += ["--all-units"] if options.all_units else []
    if options.store is not None:
        words += ["--store", str(options.store)]
    if options.decode:
        return [*words, "--prefill", shlex.join(options.command), "--decode", shlex.join(options.decode)]
    if small is None:
        return [*words, "--", *options.command]
    config = ["--config", small.config] if small.config else []
    given = kind or small.model
    model = ["--model", str(given)] if given else []
    return [*words, "--connector", small.connector, *config, *model]


def _with_case(one: Answered, case: str, says: str) -> Answered:
    """With its smallest case, and what is said of that."""
    verdict = one.verdict
    if not case or verdict.answer is not Answer.FAILED:
        return one
    evidence = [*verdict.evidence, f"the smallest case: {says}"]
    return replace(one, verdict=replace(verdict, case=case, evidence=evidence))


def _untried(answers: Sequence[Answered], tried: Collection[str]) -> list[str]:
    """What to know of cases that were seen to fail among others, and not asked by themselves."""
    names = [one.id for one in answers if _repeatable(one) and one.id not in tried]
    if not names:
        return []
    return [
        f"not asked by themselves: the cases of {listed(names)}; one that passes so needs what was asked "
        "before it: repeat the whole suite"
    ]


def _repeatable(one: Answered) -> bool:
    return one.verdict.answer is Answer.FAILED and bool(one.verdict.case)


def subject(engine: Engine) -> str:
    """The connector, in words."""
    configured = engine.configured
    if configured is None:
        return "no connector"
    name = configured.connector or "a connector"
    module = f"{configured.module_path}:" if configured.module_path else ""
    return f"{module}{name} ({configured.role})" if configured.role else f"{module}{name}"
