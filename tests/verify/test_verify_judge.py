"""From what was observed to the answers, on synthetic requests: what is promised and kept is proved, what is
promised and not kept fails, and what was not seen is neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtrace.ledger.ends import LoadEnd, SaveEnd
from kvtrace.trace.config import STORE_FULL, STORE_SLOW
from kvtrace.verify.alone import AskedAlone, judged_alone
from kvtrace.verify.answers import Answer, Answered, Stopped, Verdict, VerifyError
from kvtrace.verify.drive import Driver, Job
from kvtrace.verify.engine import Reply, RequestToMake
from kvtrace.verify.evidence import Evidence, LayerError, RequestSeen, _hook_shares
from kvtrace.verify.judging import noise, other_answers
from kvtrace.verify.observed import Arm, EngineFacts, Observed, Settings, taken_unit, with_stored
from kvtrace.verify.property import Property, judged, workloads
from kvtrace.verify.registry import of_suite
from kvtrace.verify.session import Options, Small, _untried, repeats
from kvtrace.verify.shrink import Shrinker
from kvtrace.verify.suite import ask, observed, probes
from kvtrace.verify.workload import RESET, STORE_ACTS, Streams, parse
from kvtrace.words import count

FACTS = EngineFacts(
    block=32, budget=256, longest=2048, seqs=16, unit=32, role="kv_both", adapters=1, images=True
)
PAIRS = 4
QUICK, FULL = of_suite("quick"), of_suite("full")


def number_of(request: RequestToMake) -> int:
    return int(request.id.rpartition("-")[2])


class Connector:
    """A connector on an engine that is made up: it keeps whole units of 32 tokens by their prefix. Faults are
    planted by overriding what it does."""

    unit = 32

    def __init__(self) -> None:
        self.kept: set[tuple[int, ...]] = set()
        self.seen: dict[int, RequestSeen] = {}

    def key(self, tokens: Sequence[int], request: RequestToMake) -> tuple[int, ...]:
        return (*tokens, *map(ord, request.salt), -request.adapter, -100 * request.image)

    def offered(self, request: RequestToMake) -> int:
        ends = range(self.unit, len(request.tokens), self.unit)
        return max((n for n in ends if self.key(request.tokens[:n], request) in self.kept), default=0)

    def beginnings(self, request: RequestToMake) -> Mapping[int, int]:
        """As the agent's digests have them."""
        cuts = [*range(32, len(request.tokens) + 1, 32), len(request.tokens)]
        return {hash(Connector.key(self, request.tokens[:n], request)): n for n in cuts}

    def save(self, request: RequestToMake) -> None:
        for n in range(self.unit, len(request.tokens) + 1, self.unit):
            self.kept.add(self.key(request.tokens[:n], request))

    def ends(self, loaded: int) -> Mapping[LoadEnd, int]:
        return {LoadEnd.LOADED: loaded * PAIRS} if loaded else {}

    def more(self, loaded: int) -> dict[str, Any]:
        """Fields of what is seen."""
        return {"proved": loaded * PAIRS, "compared": loaded // 32}

    def reply(self, request: RequestToMake, loaded: int) -> Reply:
        """Depends on the prompt alone."""
        return Reply(tuple((sum(request.tokens) + at) % 400 for at in range(request.generate)), seconds=0.01)

    # --- the engine

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        return [self._one(request) for request in requests]

    def _one(self, request: RequestToMake) -> Reply:
        loaded = self.offered(request)
        status = "FINISHED_ABORTED" if request.leaves else "FINISHED_LENGTH_CAPPED"
        seen = RequestSeen(
            request.id, len(request.tokens), 0, loaded, loaded, False, PAIRS,
            self.ends(loaded), 0, {}, 0 if loaded else PAIRS * len(request.tokens),
            int(request.preempted), status, beginnings=self.beginnings(request),
        )  # fmt: skip
        self.seen[number_of(request)] = replace(seen, **self.more(loaded))
        self.save(request)
        return self.reply(request, loaded)

    def amend(self, request: RequestToMake, **fields: Any) -> None:
        """Something else is seen of a request that was asked."""
        self.seen[number_of(request)] = replace(self.seen[number_of(request)], **fields)

    def reset(self, patience: float) -> bool | None:
        return True

    adapters = 1
    other_model = False

    def restart(self, other: bool = False) -> None:
        pass

    def gone(self) -> str:
        return ""

    def look(self) -> Evidence:
        return Evidence(None, {number: [seen] for number, seen in self.seen.items()})


class Dying(Connector):
    """Its engine can die, and lives again when it is started anew."""

    dead = False

    def gone(self) -> str:
        return "RuntimeError: shape mismatch" if self.dead else ""

    def restart(self, other: bool = False) -> None:
        self.dead = False


class Silent(Connector):
    """Nothing is compared of what it loads."""

    def more(self, loaded: int) -> dict[str, Any]:
        return {}


class SavesNothing(Connector):
    def save(self, request: RequestToMake) -> None:
        pass


class OffersNothing(Connector):
    def offered(self, request: RequestToMake) -> int:
        return 0


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtrace.verify.drive.time.sleep", lambda seconds: None)


def driver_of(connector: Connector, act: Callable[[str], None] | None = None) -> Driver:
    return Driver(connector, Streams(1), connector.look, act=act)


def jobs_of(properties: Sequence[Property], facts: EngineFacts = FACTS) -> list[Job]:
    return [Job(name, workload) for name, workload in workloads(properties, facts)]


def asked(driver: Driver, jobs: Sequence[Job], facts: EngineFacts = FACTS) -> Observed:
    """What is seen of a connector that is asked so."""
    driver.run(jobs)
    return observed(driver, facts, Settings())


def everything(connector: Connector, facts: EngineFacts = FACTS) -> Observed:
    """What is seen of all that the quick suite asks."""
    return asked(driver_of(connector), jobs_of(QUICK, facts), facts)


def verdicts(what: Observed, properties: Sequence[Property] = QUICK) -> dict[str, Verdict]:
    return {one.id: one.verdict for one in judged(properties, what)}


def verdict_of(name: str, what: Observed) -> Verdict:
    return verdicts(what, [one for one in FULL if one.id == name])[name]


def failed(found: Mapping[str, Verdict]) -> set[str]:
    return {name for name, verdict in found.items() if verdict.answer is Answer.FAILED}


def failures(connector: Connector, **settings: Any) -> set[str]:
    return failed(verdicts(replace(everything(connector), settings=Settings(**settings))))


def test_a_connector_that_keeps_its_promises_fails_nothing() -> None:
    found = verdicts(everything(Connector()))
    assert not failed(found)
    assert {
        "transfers", "comes-back-equal", "whole-units", "lengths", "outputs",
        "nobody-else", "other-salt", "other-adapter", "other-image",
        "chunked", "concurrent", "repeated", "shared-prefix", "extended", "preempted", "aborted",
    } <= {name for name, verdict in found.items() if verdict.answer is Answer.PROVED}  # fmt: skip


def test_if_nothing_comes_back_only_the_transfer_fails() -> None:
    found = verdicts(everything(SavesNothing()))
    assert failed(found) == {"transfers"}
    assert found["comes-back-equal"].answer is found["nobody-else"].answer is Answer.NOT_OBSERVED


def test_a_key_without_the_prefix_gives_to_others() -> None:
    class Orphan(Connector):
        def key(self, tokens: Sequence[int], request: RequestToMake) -> tuple[int, ...]:
            return super().key(tokens[-self.unit :], request)

    assert "nobody-else" in failures(Orphan())


@pytest.mark.parametrize(
    ("left_out", "fails"),
    [({"salt": ""}, "other-salt"), ({"adapter": 0}, "other-adapter"), ({"image": 0}, "other-image")],
)
def test_a_key_without_salt_adapter_or_image_gives_to_others(left_out: dict[str, Any], fails: str) -> None:
    class Without(Connector):
        def key(self, tokens: Sequence[int], request: RequestToMake) -> tuple[int, ...]:
            return super().key(tokens, replace(request, **left_out))

    assert failures(Without()) == {fails}


@pytest.mark.parametrize(("most", "answer"), [(31, Answer.PROVED), (32, Answer.FAILED)])
def test_what_stands_in_front_of_an_image_may_come_back(most: int, answer: Answer) -> None:
    """Which tokens within a block are the image's is not known: of these none is held against it."""

    class Offers(Connector):
        def offered(self, request: RequestToMake) -> int:
            return super().offered(request) or (most if request.image else 0)

    assert verdict_of("other-image", everything(Offers())).answer is answer


def test_answers_with_an_image_are_those_of_the_same_image() -> None:
    class Images(Silent):
        wrong = False

        def reply(self, request: RequestToMake, loaded: int) -> Reply:
            tokens = super().reply(request, loaded).tokens
            wrong = self.wrong and loaded > 0
            return Reply(tuple(one + request.image + 50 * wrong for one in tokens), seconds=0.01)

    assert verdict_of("other-image", everything(Images())).answer is Answer.PROVED
    Images.wrong = True
    found = verdict_of("other-image", everything(Images()))
    assert found.answer is Answer.FAILED and "are not those of their own prompt" in found.says


def test_wrong_kv_of_an_image_is_nothing_proved() -> None:
    what = everything(Connector())
    first = next(one for one in what.of("other-image") if one.given and one.seen)
    assert first.seen is not None
    wrong = replace(first, seen=replace(first.seen, ends={LoadEnd.WRONG: 32 * PAIRS}, proved=0))
    found = verdict_of(
        "other-image", replace(what, asked=[wrong if one is first else one for one in what.asked])
    )
    assert found.answer is Answer.FAILED and "hold other KV" in found.says


def test_the_first_of_two_servers_has_image_and_words() -> None:
    own = [one for one in everything(Connector()).of("other-image") if one.prompt.image]
    longer = [replace(one, seen=replace(one.seen, prompt=one.seen.prompt + 16)) for one in own if one.seen]
    assert {one.known for one in with_stored(longer, pair=True)} == {80 + 16}


def test_no_image_is_asked_of_a_model_that_takes_none() -> None:
    what = everything(Connector())
    assert all(one.prompt.image or one.prompt.text == "a80" for one in what.of("other-image"))
    text = replace(FACTS, images=False)
    assert "other-image" not in dict(workloads(FULL, text))
    verdict = verdict_of("other-image", replace(what, facts=text))
    assert verdict.answer is Answer.NOT_APPLICABLE and "takes no images" in verdict.says


@pytest.mark.parametrize(
    ("in_keys", "lasts", "answer"),
    [
        (False, True, Answer.FAILED),
        (True, True, Answer.PROVED),
        (True, False, Answer.NOT_OBSERVED),  # nothing outlasts its engine: no other model could find it
    ],
)
def test_a_key_without_the_model_gives_to_another_model(in_keys: bool, lasts: bool, answer: Answer) -> None:
    class Models(Connector):
        other_model = True
        model = ""

        def key(self, tokens: Sequence[int], request: RequestToMake) -> tuple[int, ...]:
            return super().key(tokens, replace(request, salt=self.model * in_keys))

        def restart(self, other: bool = False) -> None:
            self.model = "other" if other else ""
            if not lasts:
                self.kept.clear()

    connector, facts = Models(), replace(FACTS, other_model=True)
    driver = driver_of(connector)
    jobs = jobs_of([one for one in FULL if one.id == "other-model"], facts)
    assert verdict_of("other-model", asked(driver, jobs, facts)).answer is answer
    driver.run([Job("later", parse("a32"))])
    assert connector.model == ""  # what is asked next, asks the model itself


def test_other_numbers_fail_only_where_they_are_far(monkeypatch: pytest.MonkeyPatch) -> None:
    class Altered(Connector):
        error = LayerError(0.02, 0.006)

        def ends(self, loaded: int) -> Mapping[LoadEnd, int]:
            return {LoadEnd.WRONG: loaded * PAIRS} if loaded else {}

        def more(self, loaded: int) -> dict[str, Any]:
            errors = {"layers.0": self.error} if loaded else {}
            return {"errors": errors, "compared": loaded // 32, "differing": loaded // 32}

        def reply(self, request: RequestToMake, loaded: int) -> Reply:
            return Reply((9, 9, 9, 9)[: request.generate]) if loaded else super().reply(request, loaded)

    near = everything(Altered())
    found = verdicts(near)
    assert found["comes-back-equal"].answer is Answer.PROVED
    assert "error 0.6 % on the mean" in found["comes-back-equal"].says
    assert found["outputs"].answer is Answer.NOT_OBSERVED  # other numbers give other answers
    assert not failed(found)

    # The same of a request that the engine's own cache gave what the one before it had loaded.
    second = next(b for a, b in pairwise(near.of("repeated")) if a.given and b.given and a.tokens == b.tokens)
    assert second.seen is not None
    given = second.given
    cached = replace(
        second.seen, local=given, offered=0, accepted=0, errors={}, compared=0, differing=0, ends={}
    )
    replies = {one.question: one.reply for one in near.asked if not one.given}
    again = [
        replace(one, seen=cached)
        if one is second
        else replace(one, reply=replies.get(one.question, one.reply))
        for one in near.asked
    ]
    assert not failed(verdicts(replace(near, asked=again)))

    assert {"comes-back-equal", "outputs"} <= failures(Altered(), error=0.001)
    monkeypatch.setattr(Altered, "error", LayerError(1.9, 1.4))
    assert {"comes-back-equal", "outputs", "concurrent"} <= failures(Altered())


def test_what_nobody_compared_is_judged_by_its_fingerprint() -> None:
    """Blocks of an answer: the others are equal, number by number."""

    class LastBlock(Connector):
        def ends(self, loaded: int) -> Mapping[LoadEnd, int]:
            wrong = 32 if loaded > 64 else 0
            return {LoadEnd.LOADED: (loaded - wrong) * PAIRS, LoadEnd.WRONG: wrong * PAIRS} if loaded else {}

        def more(self, loaded: int) -> dict[str, Any]:
            equal = max(0, loaded - 32)
            errors = {"layers.0": LayerError(0.0, 0.0)} if loaded else {}
            return {"proved": equal * PAIRS, "compared": equal // 32, "errors": errors}

    found = verdicts(everything(LastBlock()))
    assert {"comes-back-equal", "concurrent", "preempted"} <= failed(found)
    assert found["whole-units"].says.endswith("came back, not all of it as it was")


def test_a_load_that_does_not_arrive_is_a_broken_lookup() -> None:
    class Half(Connector):
        def ends(self, loaded: int) -> Mapping[LoadEnd, int]:
            half = loaded * PAIRS // 2
            return {LoadEnd.LOADED: loaded * PAIRS - half, LoadEnd.PARTLY: half} if loaded else {}

        def more(self, loaded: int) -> dict[str, Any]:
            return {"proved": loaded * PAIRS // 2}

    what = everything(Half())
    found = verdicts(what)
    assert {"lookups-agree", "comes-back-equal"} <= failed(found)
    due = sum(one.given for one in what.loads) * PAIRS
    loaded = f"{count(due // 2)} of {count(due)} accepted token-layers were seen to be loaded"
    assert loaded in found["transfers"].says


def test_other_answers_without_other_numbers_fail() -> None:
    class Spoils(Connector):
        def reply(self, request: RequestToMake, loaded: int) -> Reply:
            return Reply((9, 9, 9, 9)[: request.generate]) if loaded else super().reply(request, loaded)

    # what it gave is proved: that the answers are other ones is the engine's
    assert failures(Spoils()) == {"outputs"}

    class Unseen(Spoils, Silent):
        pass

    found = verdicts(everything(Unseen()))
    assert {"outputs", "repeated"} <= failed(found)
    assert found["nobody-else"].answer is Answer.NOT_OBSERVED, "it is not known whose KV came back"

    class Partly(Spoils):
        def more(self, loaded: int) -> dict[str, Any]:
            return {"proved": (loaded - 32) * PAIRS}

    found = verdicts(everything(Partly()))
    assert "outputs" in failed(found)
    assert found["comes-back-equal"].answer is Answer.NOT_OBSERVED, "a block of each may be another"


@pytest.mark.parametrize("reference", [True, False])
def test_answers_without_loads_are_held_against_an_engine(reference: bool) -> None:
    """Two answers that computed all of a prompt are the engine's own, where nobody else was asked."""

    class Wavers(Silent):
        computed = 0

        def reply(self, request: RequestToMake, loaded: int) -> Reply:
            self.computed += not loaded
            return Reply((1 + self.computed % 2 if not loaded else 1,) * request.generate)

    what = everything(Wavers())
    arms = {one.question: Arm((Reply((1,) * one.prompt.generate),) * 2) for one in what.plain}
    other = other_answers(what.plain, replace(what, reference=arms if reference else {}))
    assert any(not one.back for one, _ in other) == reference


@pytest.mark.parametrize(("own", "answer"), [((1, 1), Answer.FAILED), ((1, 2), Answer.NOT_OBSERVED)])
def test_what_an_engine_alone_answers_in_two_ways_is_no_measure(own: tuple[int, ...], answer: Answer) -> None:
    """As MLA on the CPU does behind any prefix that it reuses."""

    class Spoils(Silent):
        def reply(self, request: RequestToMake, loaded: int) -> Reply:
            return Reply((9,) * request.generate if loaded else (1,) * request.generate)

    what = everything(Spoils())
    arms = {one.question: Arm(tuple(Reply((at,) * one.prompt.generate) for at in own)) for one in what.plain}
    found = verdicts(replace(what, reference=arms))
    assert found["outputs"].answer is answer
    assert ("repeated" in failed(found)) is (answer is Answer.FAILED)
    if answer is Answer.NOT_OBSERVED:
        assert "the engine alone gives" in found["outputs"].says


def test_prompts_that_end_with_a_unit_are_their_own_property() -> None:
    class Whole(Connector):
        def save(self, request: RequestToMake) -> None:
            whole = len(request.tokens) // self.unit * self.unit
            self.kept.add(self.key(request.tokens[:whole], request))

    assert failures(Whole()) == {"lengths"}


def test_long_prompts_of_which_one_step_is_kept_fail() -> None:
    class FirstChunk(Connector):
        def save(self, request: RequestToMake) -> None:
            super().save(replace(request, tokens=request.tokens[: FACTS.budget]))

    assert {"chunked", "whole-units"} <= failures(FirstChunk())


def test_what_a_connector_leaves_out_is_its_choice() -> None:
    class Head(Connector):
        def save(self, request: RequestToMake) -> None:
            super().save(replace(request, tokens=request.tokens[: self.unit]))

        def more(self, loaded: int) -> dict[str, Any]:
            return super().more(loaded) | {"saved": 0 if loaded else PAIRS * self.unit}

    class Nothing(Head):
        def save(self, request: RequestToMake) -> None:
            if len(request.tokens) > 4 * self.unit:
                super().save(request)

        def more(self, loaded: int) -> dict[str, Any]:
            return super().more(loaded) | {"saved": 0}

    class Lost(Nothing):
        def more(self, loaded: int) -> dict[str, Any]:
            return super().more(loaded) | {"in_hand": 0 if loaded else PAIRS * self.unit}

    assert not failures(Head()) and not failures(Nothing())
    assert "whole-units" in failures(Head(), all_units=True)  # that was promised
    assert "whole-units" in failures(Lost())


def test_how_much_a_request_is_given_at_least_is_a_choice() -> None:
    """A connector that loads nothing for less than three blocks failed three properties."""

    class AtLeast(Connector):
        def offered(self, request: RequestToMake) -> int:
            found = super().offered(request)
            return found if found >= 3 * self.unit else 0

    class Forgets(AtLeast):
        """... and nothing of some that have more."""

        def offered(self, request: RequestToMake) -> int:
            return super().offered(request) * (request.tokens[0] % 2)

    found = verdicts(everything(AtLeast()))
    assert not failed(found)
    assert any("with less than 96 tokens nothing came back" in one for one in found["whole-units"].evidence)
    assert {"whole-units", "lengths"} <= failures(AtLeast(), all_units=True)
    assert {"whole-units", "lengths"} <= failures(Forgets())


def test_how_much_a_request_is_given_at_most_is_a_choice() -> None:
    """A connector that loads six blocks of a prompt, and never more, failed three properties."""

    class AtMost(Connector):
        most = 6 * Connector.unit

        def offered(self, request: RequestToMake) -> int:
            return min(self.most, super().offered(request))

    found = verdicts(everything(AtMost()))
    assert not failed(found)
    assert found["whole-units"].says.endswith("that was taken came back, up to 192 tokens of each")
    assert (
        "it gave a request 192 tokens at most: is that meant? (--all-units)" in found["whole-units"].evidence
    )
    assert {"whole-units", "chunked"} <= failures(AtMost(), all_units=True)
    AtMost.most = AtMost.unit  # a lookup that goes no further than its first unit looks the same
    first = verdicts(everything(AtMost()))["whole-units"]
    assert first.answer is Answer.NOT_OBSERVED and "gave a request 32 tokens at most" in first.says
    AtMost.most = FACTS.budget  # what later steps saved is not found: no choice
    assert {"whole-units", "chunked"} <= failures(AtMost())


def test_kv_that_is_kept_once_for_two_beginnings_fails() -> None:
    """By the tokens of a block and their place, which the digest of its first layer's KV is, too."""

    class ByContent(Connector):
        def __init__(self) -> None:
            super().__init__()
            self.first: dict[tuple[int, ...], Sequence[int]] = {}

        def _one(self, request: RequestToMake) -> Reply:
            wrong = 0
            for n in range(self.unit, self.offered(request) + 1, self.unit):
                wrong += self.first[(n, *request.tokens[n - self.unit : n])] != request.tokens[:n]
            reply = super()._one(request)
            for n in range(self.unit, len(request.tokens) + 1, self.unit):
                self.first.setdefault((n, *request.tokens[n - self.unit : n]), request.tokens[:n])
            if wrong:
                reason = "tokens 32-64 hold what tokens 32-64 of another request computed to"
                ends = {LoadEnd.WRONG: wrong * self.unit * PAIRS}
                self.amend(request, ends=ends, reasons={LoadEnd.WRONG: (reason,)}, proved=0)
            return reply

    assert {"nobody-else", "comes-back-equal"} <= failures(ByContent())


def test_an_answer_from_the_first_token_is_nobody_elses_kv() -> None:
    """What the GPU has is counted twice: more than anybody asked, and nobody else's KV."""

    class FromFirst(Connector):
        def _one(self, request: RequestToMake) -> Reply:
            reply = super()._one(request)
            self.amend(request, local=32)
            return reply

    found = verdicts(everything(FromFirst()))
    assert "lookups-agree" in failed(found)
    assert "more tokens than the prompt has" in found["lookups-agree"].says
    assert found["nobody-else"].answer is Answer.NOT_OBSERVED


@pytest.mark.parametrize(("blocks", "answer"), [(66, Answer.FAILED), (0, Answer.NOT_OBSERVED)])
def test_a_copy_behind_the_next_request_fails(blocks: int, answer: Answer) -> None:
    """Where that one has all blocks, and nowhere else. Of a cache whose size is not known nothing is said."""

    class Late(Connector):
        due: RequestToMake | None = None

        def save(self, request: RequestToMake) -> None:
            if self.due is not None and len(request.tokens) < 60 * 32:
                super().save(self.due)
            self.due = request

        def reset(self, patience: float) -> bool | None:
            if self.due is not None:
                super().save(self.due)
            self.due = None
            return True

    found = verdicts(everything(Late(), replace(FACTS, blocks=blocks)))
    assert found["blocks-reused"].answer is answer and failed(found) <= {"blocks-reused", "whole-units"}


def test_how_many_loads_it_takes_at_a_time_is_its_choice() -> None:
    class OneAtATime(Connector):
        def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
            self.first = requests[0].id
            return super().ask(requests, patience)

        def offered(self, request: RequestToMake) -> int:
            return super().offered(request) if request.id == self.first else 0

    assert not failures(OneAtATime())
    assert "concurrent" in failures(OneAtATime(), all_units=True)


def test_what_the_engines_own_cache_had_is_no_loss() -> None:
    """Blocks that were not given back once: it can't be emptied any more."""

    class Leaks(Connector):
        rests = 0

        def reset(self, patience: float) -> bool | None:
            self.rests += 1
            return self.rests < 2

        def _one(self, request: RequestToMake) -> Reply:
            reply = super()._one(request)
            accepted = self.seen[number_of(request)].accepted
            if self.rests > 1 and accepted:
                self.amend(request, local=accepted, offered=None, accepted=0, ends={}, proved=0, compared=0)
            return reply

    assert failures(Leaks()) == {"blocks-given-back"}


def test_a_part_of_a_longer_piece_is_no_loss() -> None:
    """Pieces double: of a longer prompt one is kept that the shorter one has a part of."""

    class Doubling(Connector):
        def ends_of(self, length: int) -> list[int]:
            return [32 << at for at in range(8) if 32 << at <= length]

        def offered(self, request: RequestToMake) -> int:
            ends = self.ends_of(len(request.tokens) - 1)
            return max((n for n in ends if self.key(request.tokens[:n], request) in self.kept), default=0)

        def save(self, request: RequestToMake) -> None:
            for n in self.ends_of(len(request.tokens)):
                self.kept.add(self.key(request.tokens[:n], request))

        def _one(self, request: RequestToMake) -> Reply:
            loaded, reply = self.offered(request), super()._one(request)
            most = max(self.ends_of(len(request.tokens)), default=0)
            self.amend(request, saved=PAIRS * max(0, most - loaded))
            return reply

    connector, job = Doubling(), Job("preempted", parse("a112*64^ ; a112+ ; a112*12"))
    what = asked(driver_of(connector), [job])
    assert [(one.given, one.taken) for one in what.asked] == [(0, 0), (64, 64), (64, 64)]
    found = verdicts(what)
    assert found["preempted"].answer is found["whole-units"].answer is Answer.PROVED


def test_what_is_asked_before_it_can_be_written_is_no_loss() -> None:
    class SecondUse(Connector):
        """It takes a prompt when it is asked a second time, and writes by the next rest."""

        def __init__(self) -> None:
            super().__init__()
            self.used: set[tuple[int, ...]] = set()
            self.waiting: list[RequestToMake] = []

        def _one(self, request: RequestToMake) -> Reply:
            reply = super()._one(request)
            took = len(self.waiting) and self.waiting[-1] is request
            self.amend(request, saved=PAIRS * len(request.tokens) if took else 0)
            return reply

        def save(self, request: RequestToMake) -> None:
            key = self.key(request.tokens, request)
            if key in self.used and not self.offered(request):
                self.waiting.append(request)
            self.used.add(key)

        def reset(self, patience: float) -> bool | None:
            while self.waiting:
                super().save(self.waiting.pop())
            return True

    assert not failures(SecondUse())


def test_what_is_not_compared_is_not_proved() -> None:
    found = verdicts(everything(Silent()))
    assert found["comes-back-equal"].answer is Answer.NOT_OBSERVED and not failed(found)
    # that a transfer was reported as finished is the connector's word
    assert found["transfers"].answer is found["lookups-agree"].answer is Answer.NOT_OBSERVED


def test_an_engine_that_ends_is_a_failure_of_what_ended_it() -> None:
    class Dies(Dying):
        def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
            self.dead = self.dead or any(len(one.tokens) > 2 * FACTS.budget for one in requests)
            if self.dead:
                return [Reply(error="HTTP 500") for _ in requests]
            return super().ask(requests, patience)

    found = verdicts(everything(Dies()))
    assert failed(found) == {"chunked", "nothing-hangs"} and found["concurrent"].answer is Answer.PROVED


def test_a_load_that_ends_the_engine_is_told_once() -> None:
    """Its record is whole, and so what is wrong could be told of all that was loaded."""

    class Dies(Dying):
        def _one(self, request: RequestToMake) -> Reply:
            loaded = self.offered(request)
            reply = super()._one(request)
            if not loaded or len(request.tokens) <= 2 * FACTS.budget:
                return reply
            self.dead = True
            self.amend(request, ends={LoadEnd.FAILED: loaded * PAIRS}, proved=0)
            return Reply(error="HTTP 500")

    assert failures(Dies()) == {"chunked", "nothing-hangs"}


class Bounded(Connector):
    """Its store has room for the units of a few prompts, and drops the oldest."""

    def __init__(self, room: int = 12) -> None:
        super().__init__()
        self.room = room

    def save(self, request: RequestToMake) -> None:
        before = self.kept
        self.kept = set()
        super().save(request)
        newest, old = self.kept, [one for one in before if one not in self.kept]
        self.order = [one for one in getattr(self, "order", old) if one not in newest] + sorted(
            newest, key=len
        )
        self.kept = set(self.order[-self.room :])


class Quota(Bounded):
    """It gives what it has from the beginning on, and drops beginnings first."""

    def offered(self, request: RequestToMake) -> int:
        ends = range(self.unit, len(request.tokens), self.unit)
        has = takewhile(lambda n: self.key(request.tokens[:n], request) in self.kept, ends)
        return max(has, default=0)


class ForgetsTheLong(Bounded):
    def offered(self, request: RequestToMake) -> int:
        return 0 if len(request.tokens) > 200 else super().offered(request)


def said_alone(connector: Connector) -> dict[str, tuple[Verdict, Verdict]]:
    """What is said of the failures of which something did not come back: at first, and with what came of it
    alone."""
    driver = driver_of(connector)
    what = asked(driver, jobs_of(QUICK))
    failures = [
        (one, found) for one, found in zip(QUICK, judged(QUICK, what), strict=True) if found.verdict.alone
    ]
    alone = AskedAlone(driver, FACTS, Settings())
    failing = alone.failing([(one, found.verdict) for one, found in failures])
    return {one.id: (found.verdict, judged_alone(found, failing[one.id]).verdict) for one, found in failures}


def test_what_a_small_store_dropped_for_others_is_a_question() -> None:
    found = said_alone(Bounded(4))
    assert {before.answer for before, _ in found.values()} == {Answer.FAILED}
    told = {name: after for name, (_, after) in found.items() if after.answer is Answer.NOT_OBSERVED}
    assert {"repeated"} <= told.keys()
    for after in told.values():
        assert after.says.endswith("asked alone it comes back") and "is that meant?" in after.evidence[0]
        assert not after.case


@pytest.mark.parametrize("room", [4, 6, 8, 12])
def test_what_is_more_than_a_store_holds_is_a_question(room: int) -> None:
    """Shorter ones come back alone, so that it drops; the longest have no room even then."""
    found = said_alone(Quota(room))
    assert found and {after.answer for _, after in found.values()} == {Answer.NOT_OBSERVED}
    assert "more than the store has room for (b529 ; b529)" in found["chunked"][1].says


def test_what_does_not_come_back_alone_fails_with_that_case() -> None:
    connector = ForgetsTheLong(1000)
    before, after = said_alone(connector)["lengths"]
    assert after.answer is Answer.FAILED and after.says == before.says
    (length,) = {prompt.length for prompt in parse(after.case).prompts}
    assert length > 200


class StoppedAfter(Connector):
    """The user stops it after so many batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        self.batches -= 1
        if self.batches < 0:
            raise Stopped
        return super().ask(requests, patience)


class StoppedShort(StoppedAfter):
    """Its key is the unit alone."""

    def key(self, tokens: Sequence[int], request: RequestToMake) -> tuple[int, ...]:
        return super().key(tokens[-self.unit :], request)


def test_whenever_it_is_stopped_what_is_known_is_told() -> None:
    """Nothing fails that would not have failed in the end, and what nobody asked is not proved."""
    counted = StoppedAfter(1000)
    everything(counted)
    ended = failed(verdicts(everything(StoppedShort(1000))))
    for batches in range(0, 1000 - counted.batches, 5):
        what = everything(StoppedAfter(batches))
        found = verdicts(what)
        assert what.stopped and not failed(found), batches
        assert found["nothing-hangs"].answer is found["finish-told"].answer is Answer.NOT_OBSERVED
        assert failed(verdicts(everything(StoppedShort(batches)))) <= ended, batches
    assert ended and verdicts(what)["whole-units"].answer is Answer.PROVED, "nearly all was asked"


def test_a_search_for_smaller_cases_that_is_stopped_finds_none() -> None:
    assert smallest_case(StoppedShort(5), "nobody-else", "a96 b96 ; a96 b96 c96", 60.0) == ("", "")


def with_run(what: Observed, **fields: Any) -> Observed:
    """As if the analysis of the whole run had found this."""
    run = SimpleNamespace(**{"engines": (), "async_saves": (), "exceptions": (), **fields})
    return replace(what, evidence=replace(what.evidence, run=cast(Any, run)))


class Asynchronous(Connector):
    """All that it loads ends in one way."""

    end = LoadEnd.LOADED

    def ends(self, loaded: int) -> Mapping[LoadEnd, int]:
        return {self.end: loaded * PAIRS} if loaded else {}

    def more(self, loaded: int) -> dict[str, Any]:
        return {"asynchronous": True}


def test_an_asynchronous_load_that_never_ends_is_never_told() -> None:
    class NeverTold(Asynchronous):
        end = LoadEnd.NOT_FINISHED

        def reply(self, request: RequestToMake, loaded: int) -> Reply:
            return Reply(error="no answer", late=True) if loaded else super().reply(request, loaded)

    what = with_run(everything(NeverTold()))
    for name in ("finish-told", "nothing-hangs", "transfers"):
        assert verdict_of(name, what).answer is Answer.FAILED, name


@pytest.mark.parametrize(
    ("end", "answer"), [(LoadEnd.USED_BEFORE, Answer.FAILED), (LoadEnd.LOADED, Answer.PROVED)]
)
def test_an_end_that_is_told_before_it_came_fails(end: LoadEnd, answer: Answer) -> None:
    connector = Asynchronous()
    connector.end = end
    assert verdict_of("finish-told", with_run(everything(connector))).answer is answer


def test_a_save_that_is_told_before_it_is_read_fails() -> None:
    early = SimpleNamespace(request=0, end=SaveEnd.SAVED, early=True)
    requests = [SimpleNamespace(id="kvverify-7")]
    what = with_run(everything(Connector()), async_saves=(early,), requests=requests)
    verdict = verdict_of("finish-told", what)
    assert verdict.answer is Answer.FAILED and "before they were read" in verdict.says
    assert list(verdict.requests) == ["kvverify-7"]


def damaged(connector: Connector, act: Callable[[str], None], *met: str) -> dict[str, Verdict]:
    """What is said where the connector's directory is named, of what has to do with it."""
    facts = replace(FACTS, store=True, met=frozenset(met))
    suite = [one for one in FULL if one.id.startswith("store-") or one.id == "nothing-hangs"]
    return verdicts(asked(driver_of(connector, act), jobs_of(suite, facts), facts), suite)


def test_a_store_is_whole_again_before_the_next_damage() -> None:
    """Else what was to be damaged is not there."""
    acts: list[str] = []

    class Anew(Connector):
        def restart(self, other: bool = False) -> None:
            acts.append("restart")

    found = damaged(Anew(), acts.append, *STORE_ACTS)
    each = [one for act in STORE_ACTS for one in ("restart", RESET, act)]
    assert acts == each[1:]  # a connector may hold on to what the damage before took from it
    assert {verdict.answer for verdict in found.values()} == {Answer.PROVED}
    assert found["store-slow"].says == "of 3 answers each is right all the same, the slowest in 10 ms"


def test_what_nothing_met_is_not_observed() -> None:
    found = damaged(Connector(), lambda act: None, STORE_FULL)
    assert found["store-full"].answer is Answer.PROVED
    assert found["store-slow"].answer is Answer.NOT_OBSERVED
    assert found["store-slow"].says == "nothing was seen to open a file there while it was slow"


class Damaged(Connector):
    """Of which the store is damaged."""

    now = RESET

    def becomes(self, act: str) -> None:
        self.now = act


def test_an_engine_that_ends_by_a_full_store_fails_that() -> None:
    class Raises(Damaged, Dying):
        def save(self, request: RequestToMake) -> None:
            self.dead = self.now == STORE_FULL
            super().save(request)

        def reply(self, request: RequestToMake, loaded: int) -> Reply:
            return Reply(error="HTTP 500") if self.dead else super().reply(request, loaded)

        def gone(self) -> str:
            return "OSError: No space left on device" if self.dead else ""

    connector = Raises()
    found = damaged(connector, connector.becomes, *STORE_ACTS)
    assert failed(found) == {"store-full"}
    assert any("No space left" in line for line in found["store-full"].evidence)


def test_whoever_waits_is_told_that_the_engine_ended() -> None:
    class Long(Dying):
        def reply(self, request: RequestToMake, loaded: int) -> Reply:
            self.dead = len(request.tokens) == 99
            return Reply(error="HTTP 500") if self.dead else super().reply(request, loaded)

    said: list[str] = []
    connector = Long()
    driver = Driver(connector, Streams(1), connector.look, say=said.append)
    driver.run([Job("lengths", parse("a99 b32")), Job("chunked", parse("a64"))])
    assert said == ["asked lengths, RuntimeError: shape mismatch; starting the server anew"]
    assert len(driver.asked) == 2 and not driver.died


def test_a_damaged_store_is_told_of_no_other_property() -> None:
    """A file that is deleted under an open handle takes nothing in any more."""

    class Open(Damaged):
        broken = False

        def becomes(self, act: str) -> None:
            self.broken = self.broken or act == "gone"

        def save(self, request: RequestToMake) -> None:
            if not self.broken:
                super().save(request)

        def offered(self, request: RequestToMake) -> int:
            return 0 if self.broken else super().offered(request)

    connector, facts = Open(), replace(FACTS, store=True, met=frozenset(STORE_ACTS))
    suite = [one for one in FULL if one.id not in ("flat", "other-model")]
    what = asked(driver_of(connector, connector.becomes), jobs_of(suite, facts), facts)
    found = verdicts(what, suite)
    assert not failed(found) and found["restart"].answer is Answer.PROVED


def test_what_hooks_take_of_a_damaged_store_is_not_counted() -> None:
    """A store that is made slow holds up the step by that alone."""

    class Slow(Damaged):
        def look(self) -> Evidence:
            share = 0.9 if self.now == STORE_SLOW else 0.1
            return replace(super().look(), hook_shares={"save_kv_layer": share})

    connector, job = Slow(), Job("store-slow", parse("a96 ; slow a96"))
    what = asked(driver_of(connector, connector.becomes), [job])
    assert what.evidence.hook_shares == {"save_kv_layer": 0.1}


@pytest.mark.parametrize(("comes_after", "delay"), [(0.0, 0.2), (1.0, 1.5), (60.0, 0.2)])
def test_a_rest_is_as_long_as_it_helps(
    comes_after: float, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[float] = []
    monkeypatch.setattr("kvtrace.verify.drive.time.sleep", rested.append)

    class Late(Connector):
        def offered(self, request: RequestToMake) -> int:
            return super().offered(request) if sum(rested[-2:]) >= comes_after else 0

    driver = driver_of(Late())
    driver.probe(probes(FACTS))
    assert driver.delay == delay


def test_the_unit_of_what_never_comes_back_is_of_what_is_taken() -> None:
    seen = [SimpleNamespace(seen=SimpleNamespace(saved=n * PAIRS, pairs=PAIRS)) for n in (0, 128, 192)]
    assert taken_unit(cast(Any, seen)) == 64


def test_blocks_that_are_never_given_back_fail() -> None:
    class Holds(Connector):
        def reset(self, patience: float) -> bool | None:
            return False

    assert failures(Holds()) == {"blocks-given-back"}


def test_blocks_in_use_hide_whether_it_transfers() -> None:
    class Leaks(OffersNothing):
        def reset(self, patience: float) -> bool | None:
            return False

        def more(self, loaded: int) -> dict[str, Any]:
            return {"local": 64, "noise": {"layers.0": LayerError(1.0, 1.0)}}

    what = everything(Leaks())
    found = verdicts(what)
    assert failed(found) == {"blocks-given-back"} and found["transfers"].answer is Answer.NOT_OBSERVED
    assert noise(what) is None  # what the GPU's own cache held may have been loaded


def test_a_role_that_never_loads_is_no_failure() -> None:
    what = everything(OffersNothing())
    found = verdicts(replace(what, facts=replace(FACTS, role="kv_producer")))
    assert not failed(found) and found["comes-back-equal"].answer is Answer.NOT_APPLICABLE


def test_what_a_producer_took_unseen_is_no_failure() -> None:
    class Unseen(OffersNothing):
        def more(self, loaded: int) -> dict[str, Any]:
            return {"saved": 0, "unseen": 64}

    what = everything(Unseen())
    for role, answer in (("kv_producer", Answer.NOT_OBSERVED), ("kv_both", Answer.FAILED)):
        assert verdict_of("transfers", replace(what, facts=replace(FACTS, role=role))).answer is answer


def test_a_consumer_with_nothing_to_load_has_proved_nothing() -> None:
    what = everything(SavesNothing())
    found = verdicts(replace(what, facts=replace(FACTS, role="kv_consumer")))
    assert found["transfers"].answer is found["comes-back-equal"].answer is Answer.NOT_OBSERVED
    assert "--prefill" in found["transfers"].says


def test_a_case_alone_is_judged_by_what_it_asked() -> None:
    connector = Connector()
    what = asked(driver_of(connector), [Job("case", parse("a96 ; a96"))])
    assert [one.stored for one in what.asked] == [0, 96] and what.asked[1].given == 64


def smallest_case(connector: Connector, name: str, known: str, patience: float) -> tuple[str, str]:
    (one,) = [found for found in QUICK if found.id == name]
    shrinker = Shrinker(driver_of(connector), FACTS, Settings(), patience)
    return shrinker.smallest(one, known)


def test_the_smallest_case_is_found_while_the_engine_stays_up() -> None:
    class LongOnly(Connector):
        """What it brings for prompts of 100 tokens and more is wrong."""

        def ends(self, loaded: int) -> Mapping[LoadEnd, int]:
            return {LoadEnd.WRONG if loaded >= 96 else LoadEnd.LOADED: loaded * PAIRS} if loaded else {}

    known = "a200 b200&c200 ; a200 b200&c200"
    case, says = smallest_case(LongOnly(), "comes-back-equal", known, 15.0)
    found = parse(case)
    assert "hold other KV" in says
    assert [len(part.batches) for part in found.rounds] == [1, 1]
    assert {prompt.length for prompt in found.prompts} <= set(range(97, 130))


def test_without_a_smaller_one_the_known_case_stays() -> None:
    assert smallest_case(Connector(), "comes-back-equal", "a96 ; a96", 1.0) == ("", "")


def test_a_pairs_prompts_are_saved_when_the_second_is_asked() -> None:
    what = everything(Connector())
    alone, pair = with_stored(what.asked), with_stored(what.asked, pair=True)
    assert alone[0].stored == alone[0].known == 0
    assert pair[0].stored == pair[0].known == len(pair[0].tokens)


def flat(**grows: float) -> Answer:
    """The answer of ``flat``, where each new prompt that is saved takes so much more of each."""
    connector = Connector()
    driver = driver_of(connector)
    driver.usage = lambda: {
        name: round(100 + grows.get(name, 0) * len(connector.kept))
        for name in ("memory", "descriptors", "threads")
    }
    jobs = jobs_of([one for one in FULL if one.id == "flat"])
    return verdict_of("flat", asked(driver, jobs)).answer


def test_what_each_save_leaves_open_is_no_flat_line() -> None:
    assert flat() is Answer.PROVED
    assert flat(descriptors=1) is flat(threads=1) is Answer.FAILED
    assert flat(memory=1 << 20) is Answer.PROVED  # a store in memory grows with what is new


def test_what_a_restart_forgot_is_no_whole_unit_that_is_missing() -> None:
    class InMemory(Connector):
        def restart(self, other: bool = False) -> None:
            self.kept.clear()

    connector = InMemory()
    jobs = [Job("restart", parse("a96 b96 ; restart a96 b96")), Job("repeated", parse("c96 ; c96"))]
    found = verdicts(asked(driver_of(connector), jobs), FULL)
    assert found["whole-units"].answer is Answer.PROVED
    assert found["restart"].answer is Answer.NOT_OBSERVED and not failed(found)
    # Of a store whose directory the user named it is a failure, also where nothing else was asked.
    connector, facts = InMemory(), replace(FACTS, store=True)
    jobs = [one for one in jobs_of(FULL) if one.name == "restart"]
    assert "restart" in failed(verdicts(asked(driver_of(connector), jobs, facts), FULL))


def test_a_case_may_name_the_property_that_it_is_of() -> None:
    engine = SimpleNamespace(
        configured=object(), facts=SimpleNamespace(max_model_len=2048, max_num_batched_tokens=256,
        max_num_seqs=16, prefix_caching=True, multimodal=False), block_size=32, layers=4, role="kv_both",
        looks_up=True,
    )  # fmt: skip
    evidence = Evidence(cast(Any, engine), {})
    driver = Driver(Connector(), Streams(1), lambda: evidence)
    ask(driver, "full", "restart: a96 ; restart a96")
    assert [(one.job, one.act) for one in driver.asked] == [("restart", ""), ("restart", "restart")]
    with pytest.raises(VerifyError, match="names no property of suite quick"):
        ask(driver, "quick", "restart: a96 ; restart a96")
    with pytest.raises(VerifyError, match="the server's model takes none"):
        ask(driver, "quick", "a96#1 ; a96#2")


def test_answers_that_were_compared_with_nothing_are_not_proved() -> None:
    what = everything(Connector())
    found = verdicts(replace(what, asked=[one for one in what.asked if one.given]))
    assert found["outputs"].answer is Answer.NOT_OBSERVED
    # nor was any of these preempted or aborted
    assert found["preempted"].says == "no request was preempted"
    assert found["aborted"].says.startswith("no request was aborted")


def test_answers_on_wrong_kv_that_none_is_known_for() -> None:
    what = everything(Connector())
    first = next(one for one in what.asked if one.given and one.seen)
    assert first.seen is not None
    wrong = replace(first, tokens=(7,), seen=replace(first.seen, ends={LoadEnd.WRONG: 32 * PAIRS}))
    what = replace(what, asked=[wrong if one is first else one for one in what.asked])
    assert verdict_of("outputs", what).answer is Answer.NOT_OBSERVED


def test_a_failures_command_names_property_model_and_store() -> None:
    small = Small("ExampleConnector", None)
    options = Options((), "full", store=Path("s"), small=small, seed=1)
    verdict = Verdict(Answer.FAILED, "", case="a96 ; restart a96")
    words = repeats(options, "mla", Answered("restart", "", verdict, "mla"))
    assert words[2:] == [
        "--case", "restart: a96 ; restart a96", "--suite", "full", "--store", "s",
        "--connector", "ExampleConnector", "--model", "mla",
    ]  # fmt: skip


def test_cases_that_failed_among_others_alone_are_said_to_have() -> None:
    """Of a store that is full it fails with what the suite asked before it, and passes alone."""
    case = Verdict(Answer.FAILED, "", case="a96 ; a96")
    answers = [Answered("repeated", "", case), Answered("lengths", "", case), Answered("ended", "", case)]
    answers += [Answered("outputs", "", Verdict(Answer.PROVED, ""))]
    (note,) = _untried(answers, {"lengths"})
    assert note.startswith("not asked by themselves: the cases of repeated, ended;")
    assert not _untried(answers, {"repeated", "lengths", "ended"})


def test_a_hook_that_fills_the_steps_it_works_in_holds_them_up() -> None:
    what = replace(everything(Connector()), settings=Settings(share=0.8))
    for share, answer in ((0.6, Answer.PROVED), (0.9, Answer.FAILED)):
        taken = replace(what.evidence, hook_shares={"save_kv_layer": share, "bind": 0.1})
        assert verdict_of("hook-share", replace(what, evidence=taken)).answer is answer


def test_a_hooks_share_is_of_the_worker_that_it_takes_most_of() -> None:
    spent = [{"save_kv_layer": 20, "build_connector_meta": 90}, {"save_kv_layer": 30}, {"save_kv_layer": 5}]
    workers = [SimpleNamespace(hook_ns=one, exec_ns=ns) for one, ns in zip(spent, (100, 100, 0), strict=True)]
    run: Any = SimpleNamespace(workers=lambda: workers)
    assert _hook_shares(run) == {"save_kv_layer": 0.3}
