"""The unit in which a connector stores, inferred from what it stored.

A unit has a name: the engine's block size, ``max_num_batched_tokens``, a number of the
connector's configuration or an integer that the connector keeps; or it is so many blocks, where these give
what prompts of several lengths were seen to keep. It is accepted only where
every store decision of the run equals ``floor((prompt - d) / unit) * unit`` with one ``d`` of 0 or 1
(some connectors keep the last token back), and where no other reading is as good.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtrace.causes.evidence import numbers
from kvtrace.ledger.run import Engine
from kvtrace.ledger.values import replace
from kvtrace.trace.facts import UNIT_NAME
from kvtrace.words import count, listed

_SEVERAL = range(2, 9)
"""So many blocks that nothing names may be a unit."""
_LEAST_LENGTHS = 3
"""Of the prompts that were kept so: fewer may be stored so for another reason."""
_MOST_FITS = 2
"""Of such numbers: where more fit, none is known."""
_MAX_UNIT = 1 << 24
_MOST_BLOCKS = 64
"""A number of the connector's up to this one may count the blocks of a unit."""

_LEAST_NAME = re.compile(r"(^|_|\.)(min|minimum|least|threshold|align|round|page|portion)", re.IGNORECASE)
"""Names of a number below which nothing is stored."""
_MOST_NAME = re.compile(r"max|most|limit|capacit|total|pool|budget|window|buffer|len", re.IGNORECASE)
"""Names of a number up to which there may be something: no unit."""
_BLOCKS_NAME = re.compile(
    r"(block|page)s?_?(per|each|in)|per_?(unit|chunk|segment)|_(blocks|pages)$", re.IGNORECASE
)
"""Names of a number of blocks."""
_BATCHED_NAME = re.compile(r"batch|token", re.IGNORECASE)
"""Names under which a connector keeps max_num_batched_tokens."""

KEEPS_LAST_BACK = frozenset({"ExampleConnector", "SharedStorageConnector"})
"""Connectors known to round prompt - 1: ``(n - 1) // block * block``."""


@dataclass(frozen=True)
class StoredUnits:
    """One store entry of a request."""

    step: int
    slots: int
    tokens: int
    start: int
    available: int

    @property
    def end(self) -> int:
        return self.start + max(0, self.slots)


@dataclass(frozen=True)
class Sample:
    """What one request tells about the unit."""

    prompt: int
    stores: Sequence[StoredUnits]
    explained: bool  # something else explains that it has no store
    after_empty: bool  # left out of the metadata after another prompt had an empty entry
    first_chunk: int | None  # step of its first chunk where several computed it
    heard: bool = True  # its stores, or that it has none, are known
    taken: int | None = None  # how far its prompt was seen to be kept, and no further

    @property
    def first_chunk_only(self) -> bool:
        """Computed in several chunks, and offered in one step alone."""
        return self.first_chunk is not None and len({store.step for store in self.stores}) <= 1


class _Rounding:
    """What is stored of a prompt: whole units of ``value`` tokens, ``kept_back`` tokens left out before."""

    value: int
    kept_back: int

    def aligned(self, tokens: int) -> int:
        """What of ``tokens`` positions fills units."""
        return max(0, tokens - self.kept_back) // self.value * self.value


@dataclass(frozen=True)
class Unit(_Rounding):
    value: int
    kept_back: int  # d
    kind: str  # max_num_batched_tokens | block_size | extra | attribute | blocks
    setting: str  # what a user sets it by, where a name says that it is the unit; "" where none does
    where: str  # where the number comes from, for people
    attributes: tuple[str, ...]  # the connector's integers with this value
    both_fit: bool = False  # kept_back 0 and 1 both give every store of the run, and neither is known
    also: tuple[int, ...] = ()  # larger ones of the connector's that give every store of the run as well

    @property
    def values(self) -> str:
        """``32``, or ``32 or 64`` where the run does not tell them apart."""
        return " or ".join(map(count, (self.value, *self.also)))

    @property
    def rounding(self) -> str:
        """``floor((prompt - 1) / 32) x 32``; says so where the run does not tell prompt from prompt - 1."""
        inner = "(prompt - 1)" if self.kept_back else "prompt"
        text = f"floor({inner} / {self.value}) x {self.value}"
        other = "prompt" if self.kept_back else "(prompt - 1)"
        return f"{text} ({other} would fit as well)" if self.both_fit else text


@dataclass
class _Candidate(_Rounding):
    value: int = 0
    times: tuple[str, ...] = ()  # numbers of the connector's that give it as so many blocks
    block: bool = False
    batched: bool = False
    extra: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    kept_back: int = 0
    both_fit: bool = False
    only: bool = False  # so many blocks, by the only number that the connector holds beside the block size

    @property
    def plainness(self) -> tuple[bool, bool, bool, int]:
        """The greatest is the plainest reading."""
        return self.named, self.block, self.related, self.value

    @property
    def related(self) -> bool:
        """Whether the connector itself holds this number."""
        return bool(self.extra or self.attributes) or any(map(_BLOCKS_NAME.search, self.times))

    @property
    def a_step(self) -> bool:
        """Whether it is what a step computes at most, and no number of the connector's."""
        return self.batched and not (self.block or self.related or self.only)

    @property
    def named(self) -> bool:
        """Whether the connector calls this number something like a unit: among several that fit, it wins."""
        return any(UNIT_NAME.search(name) for name in (*self.extra, *self.attributes, *self.times))

    @property
    def may_be_unit(self) -> bool:
        """Whether its name speaks for it, and not its size alone: any number of a connector's (a port, a
        window) may be larger than every prompt, and equal to one of the engine's by chance."""
        names = (*self.extra, *self.attributes)
        like_batched = self.batched and any(_BATCHED_NAME.search(name) for name in names)
        named = self.named or any(_LEAST_NAME.search(name) for name in names)
        return self.block or named or like_batched


def infer_unit(engine: Engine, samples: Sequence[Sample], command: Sequence[str]) -> Unit | None:
    """The unit of an engine's connector, None where the evidence is not unambiguous.

    What was seen to be kept, as far as a request's own entries reach, goes before what the metadata names,
    which may be read wrongly. Of a request whose stores are not all known, the stores count only where no
    other request tells anything.
    """
    unsure = [sample for sample in samples if sample.stores and not sample.heard]
    samples = [sample for sample in samples if sample.heard]
    if any(_in_part(sample, engine.block_size) for sample in samples):
        return None
    kept = [_whole(sample) for sample in samples if sample.taken]
    silent = [sample for sample in samples if sample.taken == 0 and not sample.explained]
    # Of others the metadata alone says what was to be stored: a unit that gives all is the better one.
    named = [sample for sample in samples if sample.taken is None and sample.stores]
    seen = None
    if kept:
        seen = _infer(engine, [*kept, *named], silent, command) or _infer(engine, kept, silent, command)
        seen = seen or _of_blocks(engine.block_size, kept, silent)
    if seen:
        return seen
    decided = [sample for sample in samples if sample.stores]
    silent = [sample for sample in samples if not sample.stores and not sample.explained]
    if not (decided or silent) and _agree(unsure):
        return _infer(engine, unsure, (), command)
    return _infer(engine, decided, silent, command)


def _in_part(sample: Sample, block: int) -> bool:
    """Whether a prompt was kept to its last token, in a block that it does not fill, nor generated tokens."""
    whole = sample.taken == sample.prompt and sample.prompt % max(1, block) > 0
    return whole and all(store.available <= sample.prompt for store in sample.stores)


def _agree(unsure: Sequence[Sample]) -> bool:
    """Whether stores that may not be all are enough for a unit: they leave different tails of prompts out."""
    tails = {sample.prompt - max(store.end for store in sample.stores) for sample in unsure}
    return len([tail for tail in tails if tail > 0]) > 1


def _whole(sample: Sample) -> Sample:
    """With what was kept of it as its one store. Where no later chunk was offered it may have been all that
    was there by then: a chunk is no unit."""
    once = sample.first_chunk_only
    there = (
        max((store.available for store in sample.stores), default=sample.prompt) if once else sample.prompt
    )
    end = sample.taken or 0
    if end == sample.prompt:
        # Generated tokens may have filled its last unit.
        end = max(end, *(store.end for store in sample.stores), 0)
    kept = StoredUnits(step=0, slots=end, tokens=-1, start=0, available=there)
    return replace(sample, stores=(kept,), first_chunk=sample.first_chunk if once else None)


def _infer(
    engine: Engine,
    decided: Sequence[Sample],
    silent: Sequence[Sample],
    command: Sequence[str],
) -> Unit | None:
    """The number with a name that gives every store decision."""
    if engine.connector is None:
        return None
    stores = any(store.slots > 0 for sample in decided for store in sample.stores)
    known = engine.connector.cls in KEEPS_LAST_BACK
    fits: list[_Candidate] = []
    longest = max((store.end for sample in decided for store in sample.stores), default=0)
    once = any(sample.first_chunk_only for sample in decided)
    none = silent or any(not store.slots for sample in decided for store in sample.stores)
    for candidate in _candidates(engine):
        if candidate.a_step and once and not none and longest < 2 * candidate.value:
            continue  # that the first chunks alone are stored is seen, and that this is a unit is not
        good = [d for d in (0, 1) if all(_fits(s, candidate.value, d, engine.block_size) for s in decided)]
        if good:
            candidate.kept_back = 1 if known and 1 in good else good[0]
            candidate.both_fit = stores and len(good) > 1 and not known
            fits.append(candidate)
    fits = [fit for fit in fits if _gives_all(fit, decided, silent)] or fits
    if stores:
        # The largest number that the connector calls a unit; else the block, the plainest reading.
        chosen = max(fits, key=lambda fit: fit.plainness, default=None)
        if chosen and not chosen.named:
            larger = [fit for fit in fits if fit.related and fit.times and fit.value > chosen.value]
            of_blocks = _of_blocks(chosen.value, decided, silent)
            # Chunks of so many tokens, of which the first alone is stored, look like a unit.
            if not larger and of_blocks and of_blocks.value != engine.facts.max_num_batched_tokens:
                return of_blocks
            larger = larger or [*_several(chosen, decided, silent)[:1]]
            return _with_larger(_named(chosen, engine, command), larger)
    else:
        chosen = _without_stores(fits, bool(decided), silent)
    return _named(chosen, engine, command) if chosen else None


def _of_blocks(block: int, kept: Sequence[Sample], silent: Sequence[Sample]) -> Unit | None:
    """So many blocks, which nothing names, where they give all that was kept of prompts of several lengths: a
    constant of the connector's code."""
    lengths = {one.prompt for one in kept}
    ends = {max(store.end for store in one.stores) for one in kept}
    fits = _several(_Candidate(value=block), kept, silent)
    if not fits or len(fits) > _MOST_FITS or len(lengths) < _LEAST_LENGTHS or len(ends) == 1:
        return None
    value, *also = (fit.value for fit in fits)
    where = f"{value // block} blocks of the KV cache, which nothing names"
    return Unit(value, 0, "blocks", "", where, (), also=tuple(also))


def _several(chosen: _Candidate, decided: Sequence[Sample], silent: Sequence[Sample]) -> Sequence[_Candidate]:
    """So many of a unit that give every store, where it does not, or only if later chunks were left out."""
    if not chosen.value or _gives_all(chosen, decided, silent):
        return ()
    more = (_Candidate(value=chosen.value * n, kept_back=chosen.kept_back) for n in _SEVERAL)
    return [fit for fit in more if _gives_all(fit, decided, silent)]


def _with_larger(unit: Unit, larger: Sequence[_Candidate]) -> Unit:
    """Says so where larger numbers fit that the connector keeps, and as so many blocks by another of its
    numbers, or that nothing names: the block is the plainest reading, and no more."""
    if not larger:
        return unit
    named = [_quoted(names[:1]) for fit in larger if (names := (*fit.extra, *fit.attributes, *fit.times))]
    fitting = listed(named) or f"{count(larger[0].value)}, which nothing names,"
    where = f"{unit.where}; {fitting} would fit as well"
    return replace(unit, where=where, also=tuple(sorted(fit.value for fit in larger)))


def _candidates(engine: Engine) -> list[_Candidate]:
    found: defaultdict[int, _Candidate] = defaultdict(_Candidate)
    found[engine.block_size].block = True
    found[engine.facts.max_num_batched_tokens or 0].batched = True
    extra, ints = numbers.configured(engine), numbers.held(engine)
    for name, value in extra:
        found[value].extra += (name,)
    for name, value in ints:
        found[value].attributes += (name,)
    for name, value in (*extra, *ints):
        if 1 < value <= _MOST_BLOCKS and value % max(1, engine.block_size):
            found[value * engine.block_size].times += (name,)
    others = {name: value for name, value in ints if value != engine.block_size}
    for value, candidate in found.items():
        candidate.value = value
        candidate.only = len(others) == 1 and candidate.times == tuple(others)
    return [candidate for candidate in found.values() if 1 < candidate.value <= _MAX_UNIT]


def _fits(sample: Sample, unit: int, d: int, block: int) -> bool:
    """Whether a request's stores are its prompt rounded down to units.

    A connector that stores the first chunk only can name no more than is there by then; some
    name whole blocks, filled or not.
    """
    aligned = max(0, sample.prompt - d) // unit * unit
    end = max(store.end for store in sample.stores)
    if end > sample.prompt:
        # Stores of decode tokens go on past the prompt in whole units.
        return end % unit == 0
    if end == aligned or not sample.first_chunk_only:
        return end == aligned
    available = max(store.available for store in sample.stores)
    choices = {available, available // unit * unit}
    if block > 0:
        choices |= {available // block * block, -(-available // block) * block}
    return any(end == min(aligned, choice) for choice in choices)


def _gives_all(fit: _Candidate, decided: Sequence[Sample], silent: Sequence[Sample]) -> bool:
    """Whether a unit gives every store, whatever the chunks were: then nothing says that later chunks were
    left out."""
    return all(_below(sample, fit) for sample in silent) and all(
        end > sample.prompt or end == fit.aligned(sample.prompt)
        for sample in decided
        for end in [max(store.end for store in sample.stores)]
    )


def _below(sample: Sample, fit: _Candidate) -> bool:
    return not fit.aligned(sample.prompt) or (sample.after_empty and sample.prompt <= fit.value + 1)


def _without_stores(fits: list[_Candidate], offered: bool, silent: Sequence[Sample]) -> _Candidate | None:
    """Nothing was ever stored: only a number of the connector's own that is larger than every
    prompt can be the reason, and only if there is one such number."""
    if not offered and not silent:
        return None
    known = [fit for fit in fits if fit.related or fit.only]
    possible = [fit for fit in known if all(_below(sample, fit) for sample in silent)]
    if len(possible) == 1:
        return possible[0] if offered or possible[0].may_be_unit else None
    if not offered:
        return None
    # Prompts in the metadata with 0 slots: they are rounded to nothing, by the one that is called a unit; and
    # less than a block is less than any of the larger units too.
    called = [fit for fit in possible if any(map(_says_unit, (*fit.extra, *fit.attributes)))]
    blocks = [fit for fit in possible if fit.block]
    return blocks[0] if blocks else called[0] if len(called) == 1 else None


def _named(candidate: _Candidate, engine: Engine, command: Sequence[str]) -> Unit:
    keeps = f"; the connector keeps it as {_quoted(candidate.attributes)}" if candidate.attributes else ""
    keys = {key for key, _ in numbers.configured(engine)}
    called = (key for key in (*candidate.extra, *candidate.times) if key in keys and _says_unit(key))
    setting = next(called, "")
    if candidate.extra:
        where = f'kv_connector_extra_config["{setting or candidate.extra[0]}"]'
        if candidate.batched:
            where += ", and also max_num_batched_tokens"
        kind = "extra"
    elif candidate.batched and not candidate.block:
        given = "max_num_batched_tokens" in engine.args or any(
            part.replace("_", "-").startswith("--max-num-batched-tokens") for part in command
        )
        source = "set by --max-num-batched-tokens" if given else "vLLM's default for --max-num-batched-tokens"
        kind = "max_num_batched_tokens"
        where = f"max_num_batched_tokens, {source}{keeps}"
        if any(map(_BATCHED_NAME.search, candidate.attributes)):
            setting = "--max-num-batched-tokens"
    elif candidate.block:
        kind, where = "block_size", f"the engine's block size{keeps}"
        if any("block" in name.lower() for name in candidate.attributes):
            setting = "--block-size"
    elif not candidate.attributes:
        kind = "blocks"
        where = f"'{candidate.times[0]}' x the engine's block size of {engine.block_size}"
    else:
        kind = "attribute"
        where = f"the connector's own {_quoted(candidate.attributes)}"
    return Unit(
        candidate.value, candidate.kept_back, kind, setting, where, candidate.attributes, candidate.both_fit
    )


def _says_unit(key: str) -> bool:
    """Whether a key of the configuration is called a unit, or its blocks, and not the most of something."""
    name = key.rpartition(".")[2]
    return bool(UNIT_NAME.search(name) or _BLOCKS_NAME.search(name)) and not _MOST_NAME.search(name)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3])
