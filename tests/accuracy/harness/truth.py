"""What is true of a run: which tokens lie in the store with the right content, and whether what was planted
took effect. Nothing here comes from kvtrace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from kvgen.catalogue import BYTES_REST, TAKES_ALL
from kvgen.designs import GONE_LATER
from kvgen.plan import Plan

from harness import choices, lossy
from harness.engine import Outcome, Request
from harness.reference import CLOSE, CLOSE_ON_GPU, TIE, GpuLayout, Layout, Reference
from harness.storeview import StoreView, record_name


@dataclass(frozen=True)
class Piece:
    """Tokens [lo, hi) of a request under one key."""

    key: str
    lo: int
    hi: int


@dataclass
class RequestTruth:
    """Attributes:
    id, prompt, answer (lengths), finished, cached: as the engine said.
    computed: tokens that have KV.
    expected: token-layers that a connector without the fault has in its store in the end.
    at_rest: token-layers there with the right content.
    claimable: what may be called saved at most: at_rest, and what a record holds beyond that: of one that was
        cut the tokens' share of the bytes that are there and right; behind an odd last token the rest of its
        block; of a request that computed on wrongly loaded KV whatever it computed.
    taken: token-layers whose own KV the connector took from the right slots after it was computed, wherever
        it went then. At least claimable.
    answer_right: the answer is what the model gives without a connector.
    written: token-layers of which as many bytes came to rest as their KV has: claimable, and what lies there
        spoilt or under a name that is never asked for.
    by_choice: tokens that the connector's deliberate choice keeps out of the store, or puts there changed.
    """

    id: str
    prompt: int
    answer: int
    finished: bool
    cached: int
    computed: int
    expected: int
    at_rest: int
    claimable: int
    taken: int
    answer_right: bool
    written: int = 0
    by_choice: int = 0


@dataclass
class Truth:
    """One run's truth.

    Attributes:
        layers: of the model; token-layers are tokens times these.
        records: that were found.
        first, child: token-layers at rest in the one and the other connector's store, where there are two.
        child_expected: as ``expected``, of the second.
        choice: name of the connector's deliberate choice; "" for none.
        problem: why the run proves nothing (a healthy plan is broken, or what was planted took no effect).
    """

    layers: int
    requests: list[RequestTruth] = field(default_factory=list)
    records: int = 0
    first: int = 0
    child: int = 0
    child_expected: int = 0
    hits_expected: int = 0
    choice: str = ""
    problem: str = ""

    def total(self, name: str) -> int:
        return sum(int(getattr(request, name)) for request in self.requests)

    def document(self) -> dict[str, Any]:
        return asdict(self)


def computed_tokens(request: Request) -> int:
    """Tokens of a request that have KV: the last one of an answer has none."""
    if not request.finished:
        return len(request.prompt)
    return len(request.prompt) + max(0, len(request.answer) - 1)


def offered_tokens(plan: Plan, request: Request) -> int:
    """Tokens that the plan's connector stores if nothing is wrong with it."""
    limit = computed_tokens(request) if plan.decode else len(request.prompt)
    if plan.family == "request-exact":
        return limit
    return limit // plan.unit * plan.unit


def pieces(plan: Plan, request: Request) -> list[Piece]:
    """Everything that may hold tokens of a request, by the plan's naming."""
    unit = plan.unit
    tokens = [*request.prompt, *request.answer][: computed_tokens(request)]
    count = len(tokens) // unit
    if plan.family in ("request-whole", "request-exact"):
        whole = offered_tokens(plan, request)
        return [Piece(request.id, 0, whole)] if whole else []
    if plan.family == "request":
        keys = [f"{request.id}.{j}" for j in range(count)]
    else:
        keys = plan.keys.keys(tokens, unit, request.hashes, plan.block)
    return [Piece(key, 0 if plan.whole else j * unit, (j + 1) * unit) for j, key in enumerate(keys)]


class Reader:
    """Reads the KV of pieces back from a store and compares it with the reference."""

    def __init__(self, plan: Plan, view: StoreView, reference: Reference, layers: list[str]) -> None:
        self.plan, self.view, self.reference, self.layers = plan, view, reference, layers
        self.layout = layout_of(plan, reference)
        self.close = CLOSE_ON_GPU if plan.cuda else CLOSE
        self._flat: dict[str, np.ndarray | None] = {}

    @property
    def records(self) -> int:
        return sum(flat is not None and len(flat) > 0 for flat in self._flat.values())

    def at_rest(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """[layers, tokens] with the right content, and what may be claimed (see RequestTruth)."""
        count = computed_tokens(request)
        tokens = [*request.prompt, *request.answer]
        right = np.zeros((len(self.layers), count), dtype=bool)
        claim = np.zeros_like(right)
        kv, _ = self.reference.of(tokens)
        own = self._computes_on_wrong(request)
        for piece in pieces(self.plan, request):
            end = min(count, piece.lo + self._room(piece))
            want = kv[:, piece.lo : end]
            for layer in range(len(self.layers)):
                good, there, share = self._compare(piece, layer, want[layer], request.cached)
                right[layer, piece.lo : piece.hi] |= good[: piece.hi - piece.lo]
                claim[layer, piece.lo : end] |= good
                claim[layer, piece.lo : piece.lo + share] = True
                claim[layer, max(own, piece.lo) : end] |= there[max(0, own - piece.lo) :]
        return right, claim

    def _computes_on_wrong(self, request: Request) -> int:
        """From which token on what a request computes is not the reference's, through KV loaded wrongly."""
        fault = self.plan.planted
        spoiled = fault is not None and fault.effect == "answers" and request.cached > 0
        return request.cached if spoiled else computed_tokens(request)

    def _room(self, piece: Piece) -> int:
        """Tokens of a piece's record: records hold whole blocks."""
        return -(-(piece.hi - piece.lo) // self.plan.block) * self.plan.block

    def _compare(
        self, piece: Piece, layer: int, want: np.ndarray, cached: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Of each wanted token: it is there and right; it is there; and the share of a cut record.

        ``cached``: tokens of the request that it did not compute.
        """
        flat = self._read(record_name(self.plan, piece.key, self.layers, layer))
        count, room = len(want), self._room(piece)
        if flat is None or not count:
            return np.zeros(count, dtype=bool), np.zeros(count, dtype=bool), 0
        width = want[0].size
        part = self._of_layer(flat, layer, room * width)
        found = self.layout.unpack(self._blocks(part, room))[:count]
        with np.errstate(invalid="ignore"):
            close = self.close + lossy.bound(self.plan, want, max(0, cached - piece.lo) if cached else None)
            good = (np.abs(found - want) <= close).all(axis=(1, 2))
        there = ~np.isnan(found).any(axis=(1, 2))
        share = 0
        if self.plan.store.flaw == "cut":
            packed = self._as_stored(self.layout.pack(want))
            same = np.abs(packed[: len(part)] - part[: len(packed)]) <= self.close
            share = (len(same) if same.all() else int(same.argmin())) // width
        return good, there, share

    def _read(self, name: str) -> np.ndarray | None:
        if name not in self._flat:
            self._flat[name] = self.view.read(name)
        return self._flat[name]

    def _of_layer(self, flat: np.ndarray, layer: int, size: int) -> np.ndarray:
        """The floats of one layer, as many as are there."""
        if self.plan.record == "layer":
            return flat[:size]
        if self.plan.store.flaw == "cut":
            return flat[layer * size : (layer + 1) * size]
        each = len(flat) // len(self.layers)
        return flat[layer * each : (layer + 1) * each][:size]

    def _blocks(self, part: np.ndarray, count: int) -> np.ndarray:
        """[blocks, heads, tokens, width] of ``count`` tokens, NaN where nothing is."""
        plan = self.plan
        heads, width = self.layout.row(self.reference.heads, self.reference.head)
        whole = np.full(count * heads * width, np.nan, dtype=np.float32)
        whole[: len(part)] = part
        if plan.axis == "plain":
            return whole.reshape(-1, heads, plan.block, width)
        # slot by slot, or with heads and tokens exchanged: the same order of floats
        return whole.reshape(-1, plan.block, heads, width).transpose(0, 2, 1, 3)

    def _as_stored(self, blocks: np.ndarray) -> np.ndarray:
        if self.plan.axis == "plain":
            return blocks.ravel()
        return blocks.transpose(0, 2, 1, 3).ravel()


def layout_of(plan: Plan, reference: Reference) -> Layout | GpuLayout:
    return GpuLayout(plan.block) if plan.cuda else Layout.of(plan.block, reference.head)


def fill(plan: Plan, view: StoreView, reference: Reference, layers: list[str]) -> set[str]:
    """Puts the KV of the first round's prompts into the store of a connector that only pulls; the keys."""
    layout = layout_of(plan, reference)
    keys = set()
    for prompt in plan.rounds[0].prompts:
        kv, _ = reference.of(prompt)
        for piece in pieces(plan, Request("", list(prompt), 0)):
            parts = [layout.pack(kv[layer, piece.lo : piece.hi]) for layer in range(len(layers))]
            parts = [part if plan.axis == "plain" else part.transpose(0, 2, 1, 3) for part in parts]
            keys.add(piece.key)
            if plan.record == "stack":
                view.write(piece.key, np.stack(parts))
                continue
            for number, part in enumerate(parts):
                view.write(record_name(plan, piece.key, layers, number), part)
    return keys


def establish(plan: Plan, outcome: Outcome, readers: Sequence[Reader]) -> Truth:
    """The truth of a run, and whether it proves what it was made for. One reader for each connector of the
    run: a token is at rest where any of them has it."""
    layers, reference = readers[0].layers, readers[0].reference
    truth = Truth(len(layers), choice=plan.design)
    offered = [offered_tokens(plan, request) for request in outcome.requests]
    stays = choices.kept(plan, outcome.requests, offered)
    for request, of_plan, kept in zip(outcome.requests, offered, stays, strict=True):
        seen = [reader.at_rest(request) for reader in readers]
        truth.child += int(seen[-1][0].sum()) if len(seen) > 1 else 0
        of_child = offered_tokens(readers[-1].plan, request) if len(seen) > 1 else 0
        truth.child_expected += of_child * len(layers)
        truth.first += int(seen[0][0].sum())
        right = np.logical_or.reduce([one[0] for one in seen])
        claim = np.logical_or.reduce([one[1] for one in seen])
        expected = max(kept, of_child) * len(layers)
        claimable = 0 if plan.filled else int(claim.sum())
        everything = (of_plan if plan.design in GONE_LATER else max(kept, of_child)) * len(layers)
        taken = max(claimable, everything) if takes_all(plan, request) else claimable
        tie = lossy.TIES.get(plan.store.pack, TIE) if request.cached else TIE
        truth.requests.append(
            RequestTruth(
                request.id,
                len(request.prompt),
                len(request.answer),
                request.finished,
                request.cached,
                computed_tokens(request),
                expected,
                0 if plan.filled else int(right.sum()),
                claimable,
                taken,
                reference.is_answer(request.prompt, request.answer, tie),
                taken if plan.fault in BYTES_REST else claimable,
                choices.took(plan, request, computed_tokens(request), of_plan, kept),
            )
        )
    truth.records = sum(reader.records for reader in readers)
    truth.hits_expected = expected_hits(plan, outcome.requests)
    truth.problem = problem(plan, outcome, truth)
    return truth


def takes_all(plan: Plan, request: Request) -> bool:
    """Whether everything of a request that is offered is taken from the KV cache, whatever is in the store in
    the end.

    Where the exception of one record also ends the copies of those after it, how many is not known. A fault
    of the loads leaves the saves of a request that loads nothing as they are: a later one that computes on
    wrongly loaded KV may put its own in their place.
    """
    if plan.design in GONE_LATER:
        return True
    if plan.planted is not None and plan.planted.effect == "answers" and not request.cached:
        return True
    cut_short = plan.fault == "put-swallowed-in-thread" and plan.place == "held"
    return plan.fault in TAKES_ALL and not cut_short


def expected_hits(plan: Plan, requests: Sequence[Request]) -> int:
    """Tokens of later rounds that earlier ones (or the filled store) hold under the plan's right keys."""
    if plan.load == "none":
        return 0
    held: set[tuple[int, ...]] = set()
    hits = 0
    for number, part in enumerate(plan.rounds):
        found = 0
        for prompt in part.prompts if number or plan.filled else ():
            ends = range(plan.unit, len(prompt), plan.unit)
            known = [end for end in ends if prompt[:end] in held]
            found += max(known, default=0)
        hits += found
        for prompt in part.prompts if number == 0 else ():
            ends = range(plan.unit, len(prompt) + 1, plan.unit)
            last = [len(prompt) // plan.unit * plan.unit]
            held |= {prompt[:end] for end in (last if plan.whole and plan.role == "both" else ends)}
        if plan.filled and number == 0:
            hits += sum((len(prompt) - 1) // plan.unit * plan.unit for prompt in part.prompts)
    return hits


# --- does the run prove anything? -----------------------------------------------------------------


def problem(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    """Why it does not; "" if it does."""
    fault = plan.planted
    if fault is None:
        return _healthy_problem(plan, outcome, truth)
    if fault.effect in ("no-start", "dies"):
        if not outcome.error:
            return "the engine ran through"
        return (
            "" if outcome.started == (fault.effect == "dies") else f"error at another time: {outcome.error}"
        )
    if outcome.error:
        return f"the engine died: {outcome.error}"
    if not truth.requests:
        return "no requests"
    wrong = [request.id for request in truth.requests if request.finished and not request.answer_right]
    if wrong and fault.effect != "answers":
        return f"answers of {', '.join(wrong)} are wrong, which this fault does not explain"
    return _EFFECTS[fault.effect](plan, outcome, truth)


def _healthy_problem(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    if outcome.error:
        return f"the engine died: {outcome.error}"
    for request in truth.requests:
        if not request.finished:
            return f"{request.id} has no answer"
        if not request.answer_right:
            return f"{request.id}: the answer is wrong"
        if request.at_rest != request.expected:
            return f"{request.id}: {request.at_rest} token-layers at rest, expected {request.expected}"
    if _has_to_load(plan) and not truth.total("cached"):
        return "nothing was loaded"
    if plan.design == "writes-only" and truth.total("cached"):
        return "something was loaded"
    if truth.child != truth.child_expected:
        return f"the second child has {truth.child} token-layers at rest, expected {truth.child_expected}"
    if outcome.free_at_last < outcome.free_at_first:
        return f"{outcome.free_at_first - outcome.free_at_last} blocks were never given back"
    return ""


def _has_to_load(plan: Plan) -> bool:
    """A healthy connector with a store that holds what is asked for."""
    never = ("writes-only", "second-use")  # of second-use: what is stored at the second use has no third
    return plan.returns and plan.work in ("repeats", "longer") and plan.design not in never


def _intact(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    """Nothing is amiss as long as the process lives."""
    return _healthy_problem(plan, outcome, truth)


def _stolen(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    """What was stored for one salt is loaded for another."""
    first = len(plan.rounds[0].prompts)
    if any(request.cached for request in truth.requests[:first]):
        return "something was loaded in the first round"
    return "" if truth.total("cached") else "nothing was loaded under another salt"


def _lost(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    lost = truth.total("expected") - truth.total("at_rest")
    return "" if lost * 20 >= truth.total("expected") > 0 else f"only {lost} token-layers are lost"


def _nothing(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    if not truth.total("expected"):
        return "nothing would have been stored anyway"
    return f"{truth.total('at_rest')} token-layers are at rest" if truth.total("at_rest") else ""


def _below_unit(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    below = [request for request in truth.requests if request.prompt < plan.unit]
    if sum(r.prompt for r in below) * 2 < truth.total("prompt"):
        return "most prompts fill the unit"
    return "prompts below the unit are at rest" if any(r.at_rest for r in below) else ""


def _share(plan: Plan, outcome: Outcome, truth: Truth, decode: bool) -> str:
    """What is not stored is mostly decode, or mostly the prompts' tails, and all else is stored."""
    if truth.total("at_rest") != truth.total("expected"):
        return f"{truth.total('at_rest')} token-layers at rest, expected {truth.total('expected')}"
    decoded = truth.total("computed") - truth.total("prompt")
    tails = sum(request.prompt % plan.unit for request in truth.requests)
    most, other = (decoded, tails) if decode else (tails, decoded)
    return "" if most >= 2 * other and most >= plan.block else "its share is small"


def _answers(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    if not truth.total("cached"):
        return "nothing was loaded"
    return "" if not all(r.answer_right for r in truth.requests) else "all answers are right"


def _no_hits(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    if not truth.hits_expected:
        return "there was nothing to hit"
    return f"{truth.total('cached')} tokens were cached" if truth.total("cached") else ""


def _load_errors(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    return "" if outcome.recovered else "the scheduler heard of no failed load"


def _held(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    held = outcome.free_at_first - outcome.free_at_last
    return "" if held >= len(truth.requests) // 2 else f"{held} blocks are held"


def _child_dead(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    if not truth.child_expected or truth.child * 2 > truth.child_expected:
        return f"the second child has {truth.child} of {truth.child_expected} token-layers"
    return "" if truth.first else "the first child has nothing either"


def _slow(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    slept = truth.records * plan.store.limit / 1000
    return "" if slept * 2 >= outcome.seconds else f"{slept:.2f} of {outcome.seconds:.2f} s are the store's"


def _stuck(plan: Plan, outcome: Outcome, truth: Truth) -> str:
    return "every request was answered" if all(r.finished for r in truth.requests) else ""


_EFFECTS = {
    "lost": _lost,
    "nothing": _nothing,
    "below-unit": _below_unit,
    "decode-share": lambda p, o, t: _share(p, o, t, True),
    "tail-share": lambda p, o, t: _share(p, o, t, False),
    "answers": _answers,
    "no-hits": _no_hits,
    "load-errors": _load_errors,
    "held": _held,
    "slow": _slow,
    "child-dead": _child_dead,
    "stuck": _stuck,
    "intact": _intact,
    "stolen": _stolen,
}
