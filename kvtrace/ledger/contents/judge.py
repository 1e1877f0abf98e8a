"""One loaded block against what earlier requests computed.

It is *proved* where its fingerprint is one of those that earlier requests with the same tokens up to its end
computed: two computations of the same tokens may differ in their last bits, so it has to be one of them, not
a certain one. Engines that computed the same tokens, and no layer to the same, have other weights for all
that is known: neither proves a load of the other. It is *wrong*

- where it is what other tokens computed to, or the same tokens in another place: then it is known whose;
- where one load put the same KV into two places;
- where it is none of those that its tokens computed to, and every one of them is known, and the connector had
  said, as they were first computed, that it has nothing for them: what it gives back later is what this run
  gave it.

Everything else is not compared. Each of these needs a layer behind the model's first one, whose KV is the
same whatever comes before a token. One such layer alone may see no further than its window: what the same
place of another prompt computed to may be right there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from kvtrace.ledger.contents.by_layer import ByLayer, Differing, numbered
from kvtrace.ledger.contents.distance import Distance
from kvtrace.ledger.contents.prints import ZEROES, Block, Origin, Printed, Shape
from kvtrace.ledger.contents.sketches import Sketches
from kvtrace.ledger.contents.unwritten import Places
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.requests import Request
from kvtrace.ledger.steps import NEVER

SAME_PROMPT, ANOTHER_REQUEST, ELSEWHERE, TWICE = (
    "of the same prompt",
    "of another request",
    "of a different prompt, at another place in it",
    "hold the same KV as the tokens from",
)
"""Words of what is said of blocks with the KV of other tokens, or of the same ones under another adapter."""
NOTHING_BUT_ZEROES = "nothing but zeroes, and not what they computed to"
HAD_IT_BEFORE = "in a block of the cache that had been theirs"
"""It was read there too late, or is named by that block in the store."""


class SharedPrefixes:
    """Which requests begin with the same tokens, by their keyed digests."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._ends: list[dict[int, int]] = [
            {tokens: digest for digest, tokens in request.prefixes.items()} for request in requests
        ]
        self._rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._coarse: list[int] = []
        for row, ends in enumerate(self._ends):
            for end, digest in ends.items():
                self._rows[digest, end].append(row)
            request = requests[row]
            if not ends or request.grown or (request.block and min(ends) > request.block):
                self._coarse.append(row)

    def digest(self, row: int, end: int) -> int:
        """Of a request's first ``end`` tokens; 0 unknown."""
        return self._ends[row].get(end, 0)

    def sharing(self, row: int, end: int) -> list[int]:
        """Every request that begins with the first ``end`` tokens of this one, or may."""
        digest = self.digest(row, end)
        coarse = [other for other in self._coarse if self._may(other, row, end)]
        return [*self._rows.get((digest, end), ()), *coarse]

    def _may(self, other: int, row: int, end: int) -> bool:
        ends = self._ends[other]
        if end in ends or self._requests[other].prompt < end:
            return False
        known = max((at for at in ends if at <= end), default=0)
        return not known or self.digest(row, known) in (0, ends[known])


class Why(NamedTuple):
    """``ours``: it is against what the same tokens computed to. ``whose``: as of Wrong."""

    text: str
    ours: bool = False
    whose: tuple[tuple[int, int], Interval] | None = None


class Judge:
    """The blocks of all workers of one shape."""

    def __init__(
        self,
        shape: Shape,
        every: Sequence[Printed],
        requests: Sequence[Request],
        prefixes: SharedPrefixes,
        places: Places,
    ) -> None:
        workers = [one for one in every if one.shape == shape]
        others = [one for one in every if one.shape != shape and one.shape[1:3] == shape[1:3]]
        self._workers, self._requests, self._prefixes = workers, requests, prefixes
        self._places, self._groups = places, {one.engine: one.group for one in workers}
        first = min((number for one in every for number in numbered(one.shape.layers)), default=0)
        # of a pipeline's ranks one may have no layer of a group
        self._telling = max(numbered(shape.layers), default=first) > first
        self._alone = len(shape.layers) == 1
        self.by_layer, self._sketches = ByLayer(workers, others), Sketches(workers)
        self._pairs = {one.engine: one.pairs for one in workers}
        self._computed: dict[tuple[int, int], list[Block]] = defaultdict(list)
        """(row, end) -> as it was computed, in the order of the steps."""
        self._by_value: dict[int, list[Block]] = defaultdict(list)
        self._in_step: dict[tuple[int, int, int], int] = {}
        """(row, step, fingerprint) -> begin of the first such block that was loaded."""
        self._strange: dict[tuple[int, int], set[int]] = defaultdict(set)
        """(digest, end) -> fingerprints of unknown origin: what the store may have held before."""
        loaded = set[tuple[int, int]]()
        """(fingerprint, end) of blocks that were loaded: the GPU's own prefix cache keeps them."""
        blocks = (block for one in workers for block in one.blocks)
        for block in sorted(blocks, key=lambda block: block.step):
            if block.origin is Origin.COMPUTED:
                self._computed[block.row, block.end].append(block)
                self._by_value[block.value].append(block)
            elif block.origin is Origin.LOADED:
                loaded.add((block.value, block.end))
                key = block.row, block.step, block.value
                self._in_step[key] = min(self._in_step.get(key, block.start), block.start)
            elif (block.value, block.end) not in loaded:
                self._strange[prefixes.digest(block.row, block.end), block.end].add(block.value)
        self.apart = self._never_alike()
        """Two engines, the lower number first -> blocks that both computed, no layer of any to the same."""

    def _never_alike(self) -> dict[tuple[int, int], int]:
        """Of requests that loaded nothing: on what was loaded all behind it depends. The first layer's KV is
        the same, to the last bit, more often than that of all layers."""
        by_tokens: dict[tuple[int, int], dict[int, set[tuple[int, int]]]]
        by_tokens = defaultdict(lambda: defaultdict(set))
        for (row, end), blocks in self._computed.items() if len(self._pairs) > 1 else ():
            digest = self._prefixes.digest(row, end)
            if digest and any(chunk.start == 0 for chunk in self._requests[row].chunks):
                for one in blocks:
                    values = {-1: one.value, **self.by_layer.of(one)}
                    by_tokens[digest, end][self._requests[row].engine].update(
                        (layer, value) for layer, value in values.items() if value
                    )
        both, alike = Counter[tuple[int, int]](), set[tuple[int, int]]()
        for found in by_tokens.values():
            for pair in combinations(sorted(found), 2):
                both[pair] += 1
                if not found[pair[0]].isdisjoint(found[pair[1]]):
                    alike.add(pair)
        return {pair: most for pair, most in both.items() if pair not in alike}

    def loaded(self) -> Iterable[tuple[int, Block]]:
        """(pairs, block) of every loaded block, in the order of the steps."""
        blocks = [(one.pairs, block) for one in self._workers for block in one.blocks]
        return sorted((one for one in blocks if one[1].origin is Origin.LOADED), key=lambda one: one[1].step)

    def pairs_of(self, row: int) -> int:
        return self._pairs[self._requests[row].engine]

    def savers(self, block: Block) -> list[int]:
        """The earlier requests that computed the same tokens to exactly this, on engines that may have the
        same weights."""
        return [row for row in self._computed_to(block) if not self._are_apart(row, block.row)]

    def of_one_apart(self, block: Block) -> bool:
        """... of which any did on an engine that computes the same tokens to other KV."""
        return bool(self.apart) and any(self._are_apart(row, block.row) for row in self._computed_to(block))

    def _computed_to(self, block: Block) -> list[int]:
        if not self._prefixes.digest(block.row, block.end):
            return []
        return [
            row
            for row in self._prefixes.sharing(block.row, block.end)
            if any(one.value == block.value for one in self._earlier(row, block))
        ]

    def _are_apart(self, row: int, other: int) -> bool:
        """Whether the engines of two requests never compute the same tokens alike."""
        one, two = sorted((self._requests[row].engine, self._requests[other].engine))
        return (one, two) in self.apart

    def of_another_salt(self, block: Block) -> bool:
        """Whether an earlier request under another cache salt computed the same positions to exactly this:
        the same tokens, then, whose digests differ by the salt."""
        salt = self._requests[block.row].salt
        return block.value != ZEROES and any(
            (one.start, one.end) == (block.start, block.end)
            and self._requests[one.row].salt != salt
            and one.step < block.step
            for one in self._by_value.get(block.value, ())
        )

    def wrong(self, block: Block) -> Why | None:
        """Why a block that nobody with its tokens computed is wrong; None: it is not known to be."""
        if not self._telling:
            return None
        of_others = self._another_s(block) or self._twice(block)
        if of_others:
            return of_others
        if nobody_s := self._nobody_s(block):
            return Why(nobody_s, True)
        self._strange[self._prefixes.digest(block.row, block.end), block.end].add(block.value)
        return None

    def is_its_own(self, block: Block) -> bool | None:
        """Whether it is what its tokens computed to; False: another's KV, or nobody's; None: not known."""
        if self.savers(block):
            return True
        return False if self._telling and (self._another_s(block) or self._nobody_s(block)) else None

    def differing(self, block: Block) -> Differing:
        """Which layers are not what the same tokens computed to, and what is in them; None: it may be all."""
        return self.by_layer.differing(block, self._same_tokens(block))

    def how_far(self, block: Block, part: float) -> Distance | None:
        """... it is from what the same tokens computed to, where this part of its layers differs; None where
        that is not known."""
        return self._sketches.distance(block, self._same_tokens(block), part)

    def _same_tokens(self, block: Block) -> list[Block]:
        """Blocks with the same tokens up to the end, as they were computed before."""
        sharing = self._prefixes.sharing(block.row, block.end)
        return [one for row in sharing for one in self._before(row, block)]

    def _before(self, row: int, block: Block) -> list[Block]:
        """:meth:`_earlier`, of an engine that may have the same weights."""
        return [] if self._are_apart(row, block.row) else self._earlier(row, block)

    def _earlier(self, row: int, block: Block) -> list[Block]:
        """The same tokens of a request, as they were computed before ``block`` was loaded."""
        found = self._computed.get((row, block.end), ())
        t = self._began(block.row, block.step)
        return [one for one in found if one.start == block.start and self._began(row, one.step) < t]

    def _began(self, row: int, step: int) -> int:
        """When a step of the request's engine began, as far as the request's chunks tell."""
        return next((chunk.t for chunk in self._requests[row].chunks if chunk.step >= step), NEVER)

    def _another_s(self, block: Block) -> Why | None:
        if block.value == ZEROES:
            return None
        digest = self._prefixes.digest(block.row, block.end)
        for one in self._by_value.get(block.value, ()):
            own = self._prefixes.digest(one.row, one.end)
            if (one.start, one.end) == (block.start, block.end) and (not own or not digest or own == digest):
                continue
            if self._requests[one.row].salt != self._requests[block.row].salt:
                continue  # equal tokens have other digests there: it may be the same prompt
            same = self._prefixes.digest(one.row, block.end) == digest != 0
            begins = self._prefixes.digest(block.row, one.end) == own != 0
            there = (one.start, one.end) == (block.start, block.end)
            if there and self._alone:
                continue
            other = f"{ANOTHER_REQUEST if there else ELSEWHERE} ({self._requests[one.row].id})"
            whose = SAME_PROMPT if one.row == block.row or same or begins else other
            of_whom = f"tokens {one.start}-{one.end} {whose}"
            said = f"tokens {block.start}-{block.end} hold what {of_whom} computed to"
            if self._had_it_before(block, one):
                said += f", {HAD_IT_BEFORE}"
            return Why(said, whose=((one.row, self.pairs_of(one.row)), (one.start, one.end)))
        return None

    def _had_it_before(self, block: Block, other: Block) -> bool:
        """Whether another's KV was computed in a block of the cache that held the tokens of ``block``
        before."""
        at = self._place(other)
        return at != 0 and any(
            self._requests[one.row].engine == self._requests[other.row].engine
            and one.step < other.step
            and self._place(one) == at
            for one in self._same_tokens(block)
        )

    def _place(self, block: Block) -> int:
        """The block of the KV cache that it was; 0 not known."""
        return self._places.of(block, self._groups[self._requests[block.row].engine])

    def _twice(self, block: Block) -> Why | None:
        first = self._in_step[block.row, block.step, block.value]
        if block.value == ZEROES or first == block.start:
            return None
        return Why(f"tokens {block.start}-{block.end} {TWICE} {first} on")

    def _nobody_s(self, block: Block) -> str | None:
        digest = self._prefixes.digest(block.row, block.end)
        if not digest or block.value in self._strange[digest, block.end]:
            return None
        known = []
        t = self._began(block.row, block.step)
        for row in self._prefixes.sharing(block.row, block.end):
            request = self._requests[row]
            here = [chunk for chunk in request.chunks if chunk.start < block.end and chunk.end > block.start]
            if row == block.row or not any(chunk.t < t for chunk in here):
                continue
            if request.preemptions or not self._before(row, block):
                return None  # computed, and not printed
            known.append(row)
        loaded = self._requests[block.row]
        if not any(_was_not_there(self._requests[row], block.end, loaded) for row in known):
            return None
        earlier = self._requests[known[0]].id
        hold = f"hold {NOTHING_BUT_ZEROES}" if block.value == ZEROES else "are not what they computed to"
        return f"tokens {block.start}-{block.end} {hold} in request {earlier}"


def _was_not_there(request: Request, end: int, loaded: Request) -> bool:
    """Whether the connector said of a request that it has less than its first ``end`` tokens, and would have
    given them: never all of a prompt, and whole units only, as it did when they were ``loaded``."""
    offers = [_offered(one) for one in (request, loaded) if one.looked_up and one.looked_up.answer]
    unit = math.gcd(*offers) or 1
    offerable = -(-end // unit) * unit < request.arrived
    return request.looked_up is not None and _offered(request) < end and offerable


def _offered(request: Request) -> int:
    """The first tokens of which the connector said that it has them, or the GPU does."""
    lookup = request.looked_up
    return lookup.local + max(0, lookup.answer or 0) if lookup else 0
