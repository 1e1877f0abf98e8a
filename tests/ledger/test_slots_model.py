"""What the ledger calls saved, against a plain model of the KV cache: whose KV a slot held as it was read."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synth import WATCHED, Chunk, Entry, Prompt, Sim

from kvtrace.ledger import read_run
from kvtrace.ledger.ends import SaveEnd
from kvtrace.terms import SAVED, Grade
from kvtrace.trace.format import Flag

SETTINGS = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
SIZE, BLOCKS, LAYERS = 4, 14, 2

Token = tuple[str, int]
"""A request and a position."""
Slot = tuple[int, int]
"""A layer and a physical slot."""


@dataclass
class Cache:
    """What lies in each slot, and which tokens' KV was read.

    A block that is given out keeps what it held until the layer's next forward. What the prefix cache gives
    is both requests' token.
    """

    held: dict[Slot, set[Token]] = field(default_factory=dict)
    fresh: dict[int, set[int]] = field(default_factory=lambda: {i: set() for i in range(LAYERS)})
    saved: set[tuple[int, str, int]] = field(default_factory=set)

    def give(self, blocks: list[int]) -> None:
        for of_layer in self.fresh.values():
            of_layer.update(blocks)

    def share(self, slots: list[int], request: str) -> None:
        for layer in range(LAYERS):
            for position, slot in enumerate(slots):
                self.held[layer, slot].add((request, position))

    def forward(self, layer: int, tokens: dict[int, Token]) -> None:
        """``tokens``: what the step computes, by slot."""
        for block in self.fresh[layer]:
            for slot in range(block * SIZE, (block + 1) * SIZE):
                self.held.pop((layer, slot), None)
        self.fresh[layer].clear()
        for slot, token in tokens.items():
            self.held[layer, slot] = {token}

    def read(self, layer: int, slots: list[int]) -> None:
        for slot in slots:
            self.saved |= {(layer, *token) for token in self.held.get((layer, slot), ())}


@dataclass
class Life:
    """A request on its way."""

    prompt: Prompt
    at: int = 0  # positions that have KV
    local: int = 0
    again: bool = False  # preempted once
    reached: int = 0  # positions that had KV then

    @property
    def total(self) -> int:
        return self.prompt.length + self.prompt.output - 1


class Engine:
    """Drives a Sim and the model through the same random run."""

    def __init__(
        self, draw: st.DrawFn, folder: Path, metadata: str, watched: st.SearchStrategy[bool]
    ) -> None:
        self.draw, self.metadata, self.watched = draw, metadata, watched
        self.sim = Sim(folder, layers=LAYERS, block=SIZE, kv_blocks=BLOCKS, prefix_caching=True)
        assert self.sim.blocks is not None
        self.blocks = self.sim.blocks
        self.cache = Cache()
        self.waiting = [
            Life(Prompt(f"r{i}", draw(st.integers(1, 20)), output=draw(st.integers(1, 4))))
            for i in range(draw(st.integers(1, 4)))
        ]
        self.running: list[Life] = []
        self.local: dict[str, int] = {}
        self.computed: set[int] = set()
        """The layers that ran in this step."""
        self.races = False
        """A thread read a layer before its forward: what else threads read need not have come in time."""

    def run(self) -> None:
        while self.waiting or self.running:
            self._preempt()
            self._admit()
            self._step()
            for life in [one for one in self.running if one.at == one.total]:
                self.running.remove(life)
                self.sim.finish(life.prompt.id, life.at, life.prompt.output)
                self.blocks.release(life.prompt.id)

    def _preempt(self) -> None:
        able = [one for one in self.running if one.at and not one.local and not one.again]
        if len(self.running) > 1 and able and not self.draw(st.integers(0, 3)):
            life = self.draw(st.sampled_from(able))
            self.running.remove(life)
            self.sim.preempt(life.prompt.id, life.at)
            self.blocks.release(life.prompt.id)
            life.at, life.again, life.reached = 0, True, life.at
            self.waiting.append(life)

    def _admit(self) -> None:
        while self.waiting:
            life = self.waiting[0]
            short = sum(self.blocks.short(one.prompt.id, 0, one.total) for one in [*self.running, life])
            if short > len(self.blocks.free) or (self.running and self.draw(st.booleans())):
                return
            self.waiting.pop(0)
            self.running.append(life)
            if not life.again:
                self.sim.arrive(life.prompt)
                self._hit(life)

    def _hit(self, life: Life) -> None:
        """The first blocks of a running request, by the GPU's own prefix cache."""
        others = [one for one in self.running if one is not life and one.at >= SIZE]
        whole = (life.prompt.length - 1) // SIZE
        if not others or not whole or self.draw(st.booleans()):
            return
        other = self.draw(st.sampled_from(others))
        blocks = min(whole, other.at // SIZE)
        table = self.blocks.table(other.prompt.id)[:blocks]
        life.at = life.local = self.local[life.prompt.id] = blocks * SIZE
        self.sim.lookup(life.prompt.id, life.local, 0, 0)
        self.sim.give(life.prompt.id, list(table), flags=int(Flag.FIRST))
        self.cache.share(self.sim.slots(life.prompt.id, 0, life.local), life.prompt.id)

    def _step(self) -> None:
        chunks, tokens, prompts = [], {}, {}
        for life in self.running:
            request, start = life.prompt.id, life.at
            room = life.prompt.length - start
            size = min(room, self.draw(st.integers(1, 8))) if room > 0 else 1
            if not start and life.reached >= life.prompt.length:
                size = life.reached + 1  # with its decode tokens, and the one after them
            had = len(self.blocks.table(request))
            first = start == life.local and start < life.prompt.length
            self.sim.grow(request, start + size, resumed=life.again)
            self.cache.give(self.blocks.table(request)[had:])
            if room > 0:
                chunks.append(Chunk(request, start, min(size, room), first, resumed=first and life.again))
            prompts[request] = life.prompt.length
            life.at = start + size
            for position, slot in enumerate(self.sim.slots(request, start, life.at), start):
                tokens[slot] = (request, position)
        entries = self._entries()
        seen = self.draw(self.watched)
        self.sim.watching = WATCHED if seen else 0
        step = self.sim.step(
            chunks, entries, tokens=len(tokens), prompts=prompts, unreadable=self.metadata == "unreadable"
        )
        self._reads(step, tokens, entries, seen)

    def _entries(self) -> list[Entry]:
        """What the metadata names, where it names anything."""
        if self.metadata != "named":
            return []
        found = []
        for life in self.running:
            start = self.draw(st.integers(0, life.at))
            slots = self.draw(st.integers(0, life.at - start))
            if slots and self.draw(st.booleans()):
                found.append(Entry(life.prompt.id, slots, -1, start))
        return found

    def _reads(self, step: int, tokens: dict[int, Token], entries: list[Entry], seen: bool) -> None:
        """Reads before the forward, after each layer, and after the step."""
        anywhere = self.metadata != "named"
        self.computed.clear()
        self._read(self.sim.hook_t[0, step, "start_load_kv", ""], "start_load_kv", seen, anywhere)
        for layer, name in enumerate(self.sim.layer_names):
            self.cache.forward(layer, tokens)
            self.computed.add(layer)
            self._read(self.sim.hook_t[0, step, "save_kv_layer", name], "save_kv_layer", seen, anywhere)
        if anywhere:
            self._read(self.sim.clock(), "wait_for_save", seen, True)
        for entry in entries:
            low = self.draw(st.integers(entry.start, entry.start + entry.slots))
            high = self.draw(st.integers(low, entry.start + entry.slots))
            self._copy(self.sim.slots(entry.request, low, high), self.sim.clock(), "wait_for_save", seen)

    def _read(self, t: int, hook: str, seen: bool, wanted: bool) -> None:
        """Slots of a request, or just any."""
        if not wanted or self.draw(st.booleans()):
            return
        if self.running and self.draw(st.integers(0, 3)):
            life = self.draw(st.sampled_from(self.running))
            end = len(self.blocks.table(life.prompt.id)) * SIZE
            low = self.draw(st.integers(0, end))
            slots = self.sim.slots(life.prompt.id, low, self.draw(st.integers(low, end)))
        else:
            low = self.draw(st.integers(0, BLOCKS * SIZE))
            slots = list(range(low, self.draw(st.integers(low, BLOCKS * SIZE))))
        self._copy(slots, t, self.draw(st.sampled_from([hook, ""])), seen)

    def _copy(self, slots: list[int], t: int, hook: str, seen: bool) -> None:
        if not slots:
            return
        layers = self.draw(st.sampled_from([[0], [1], [0, 1]]))
        for layer in layers:
            self.cache.read(layer, slots)
        self.races |= not hook and not self.computed.issuperset(layers)
        if seen:
            self.sim.touch(dict.fromkeys(layers, slots), t=t, hook=hook)

    def truth(self) -> set[tuple[int, str, int]]:
        """(layer, request, position): what was read, without what the prefix cache gave."""
        return {one for one in self.cache.saved if one[2] >= self.local.get(one[1], 0)}

    @property
    def headless(self) -> bool:
        """Whether several requests were read without their beginning in some layer: for which tokens that
        stands is not known."""
        of = [{one[1] for one in self.cache.saved if one[0] == layer} for layer in (0, 1)]
        heads = [{one[1] for one in self.cache.saved if one[0] == layer and not one[2]} for layer in (0, 1)]
        return any(len(read - begun) > 1 for read, begun in zip(of, heads, strict=True))


def saved(sim: Sim, local: dict[str, int]) -> tuple[set[tuple[int, str, int]], bool]:
    """What the ledger says that was seen to be read; and whether it says that some of it was read in the
    place of other slots, so that it is not known what the rest stands for."""
    sim.write()
    run = read_run(sim.dir, watch=[f"r{i}" for i in range(4)])
    ids = [one.id for one in run.requests]
    found = {
        (pair, ids[span.request], position)
        for span in run.spans
        if span.outcome.name == SAVED and span.outcome.grade >= Grade.READ
        for pair in span.pairs
        for position in range(span.start, span.end)
        if position >= local.get(ids[span.request], 0)
    }
    return found, any(span.outcome.end == SaveEnd.MISPLACED for span in run.spans)


METADATA = st.sampled_from(["none", "unreadable", "named"])


@SETTINGS
@given(st.data())
def test_with_all_steps_watched_saved_is_what_was_read(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        engine = Engine(data.draw, Path(name), data.draw(METADATA), st.just(True))
        engine.run()
        found, misplaced = saved(engine.sim, engine.local)
        assert found <= engine.truth()
        assert misplaced or engine.races or engine.headless or found == engine.truth()


@SETTINGS
@given(st.data())
def test_with_unwatched_steps_nothing_unread_is_saved(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        engine = Engine(data.draw, Path(name), data.draw(METADATA), st.booleans())
        engine.run()
        assert saved(engine.sim, engine.local)[0] <= engine.truth()
