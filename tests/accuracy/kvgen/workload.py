"""The prompts that a generated connector meets."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = (3, 500)
LONGEST = 640


@dataclass(frozen=True)
class Round:
    """Attributes:
    prompts: token ids.
    together: all submitted at once, or one after another.
    max_tokens: of each answer.
    reset: the engine forgets its own prefix cache before the round.
    abort_after: engine steps after which what still runs is aborted.
    pause: seconds before the round.
    opted_out: numbers of the prompts whose requests ask not to be stored.
    salts: of the prompts (``cache_salt``); empty: none.
    """

    prompts: tuple[tuple[int, ...], ...]
    together: bool
    max_tokens: int
    reset: bool = True
    abort_after: int | None = None
    pause: float = 0.0
    opted_out: tuple[int, ...] = ()
    salts: tuple[str, ...] = ()


class Maker:
    """Makes prompts for connectors with units of ``unit`` tokens in blocks of ``block``."""

    def __init__(self, block: int, unit: int, rng: random.Random) -> None:
        self.block, self.unit, self.rng = block, unit, rng

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(*VOCABULARY) for _ in range(count))

    def length(self) -> int:
        """At least a unit, often beside its edges."""
        most = max(1, (LONGEST - self.block) // self.unit)
        units = self.rng.randint(1, min(most, 4 if self.unit <= 64 else 3))
        edge = self.rng.choice(
            (0, 1, self.unit - 1, self.rng.randrange(self.unit), self.rng.randrange(self.unit))
        )
        return units * self.unit + edge

    def whole_units(self, least: int = 1) -> int:
        most = max(least, LONGEST // self.unit)
        return self.unit * self.rng.randint(least, min(most, max(least, 3)))

    def long(self, least: int) -> int:
        return max(self.length(), least + self.rng.randrange(self.unit))

    def prompts(self, count: int) -> list[tuple[int, ...]]:
        return [self.tokens(self.length()) for _ in range(count)]


def draw_rounds(kind: str, block: int, unit: int, rng: random.Random) -> tuple[Round, ...]:
    """The rounds of one kind of workload. Prompts fill a unit, except where the kind says otherwise."""
    return _KINDS[kind](Maker(block, unit, rng), rng)


def _round(prompts: list[tuple[int, ...]], together: bool, max_tokens: int, reset: bool = True) -> Round:
    return Round(tuple(prompts), together, max_tokens, reset)


def _mixed(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    return (
        _round(m.prompts(rng.randint(2, 4)), rng.random() < 0.5, rng.choice((1, 4, 9))),
        _round(m.prompts(rng.randint(2, 3)), rng.random() < 0.5, rng.choice((1, 3))),
    )


def _few(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    return (_round([m.tokens(m.unit + rng.randrange(m.unit)) for _ in range(3)], False, 2),)


def _one_by_one(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    return (_round(m.prompts(rng.randint(4, 6)), False, rng.choice((1, 3))),)


def _one_size(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Prompts of about one size, one after another: each needs nearly all that the one before it had."""
    least = m.unit * 2 if m.unit < 256 else m.unit
    prompts = [m.tokens(least + rng.randrange(m.block)) for _ in range(rng.randint(4, 6))]
    return (_round(prompts, False, rng.choice((1, 3))),)


def _together(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    return (
        _round(m.prompts(rng.randint(3, 5)), True, rng.choice((1, 4))),
        _round(m.prompts(2), True, 2),
    )


def _chunked(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Longer than any budget of a step, and longer than a unit beyond it."""
    least = 192 + m.unit
    return (
        _round([m.tokens(m.long(least)) for _ in range(rng.randint(2, 3))], False, rng.choice((1, 4))),
        _round([m.tokens(m.long(least)) for _ in range(2)], True, 2),
    )


def _exact(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    return (_round([m.tokens(m.whole_units()) for _ in range(rng.randint(3, 5))], rng.random() < 0.5, 1),)


def _decode(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    return (
        _round([m.tokens(m.whole_units()) for _ in range(rng.randint(2, 3))], True, rng.choice((40, 70))),
    )


def _tails(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    tails = [m.unit - 1 - rng.randrange(m.unit // 3) for _ in range(rng.randint(3, 5))]
    return (_round([m.tokens(m.unit + tail) for tail in tails], rng.random() < 0.5, 1),)


def _below(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Every prompt is shorter than the unit, some of them than a block."""
    most = min(m.unit - 1, 500)
    lengths = [rng.randint(m.block + 1, most) for _ in range(rng.randint(4, 6))]
    return (
        _round([m.tokens(n) for n in lengths], rng.random() < 0.5, rng.choice((1, 4))),
        _round([m.tokens(rng.randint(m.block // 2, most)) for _ in range(2)], False, 2),
    )


def _mostly_below(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    short = [m.tokens(rng.randint(m.block + 1, m.unit - 1)) for _ in range(rng.randint(5, 7))]
    return (
        _round([*short, m.tokens(m.unit + rng.randrange(m.block))], rng.random() < 0.5, rng.choice((1, 3))),
    )


def _repeats(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """New prompts, then the same again and others that begin like them."""
    first = [m.tokens(m.whole_units(2) + rng.randint(1, m.unit)) for _ in range(rng.randint(2, 3))]
    again = [first[0], first[-1] + m.tokens(rng.randint(1, m.unit))]
    if rng.random() < 0.5:
        again.append(first[0][: 2 * m.unit] + m.tokens(rng.randint(m.block, m.unit + 5)))
    return (
        _round(first, rng.random() < 0.5, rng.choice((1, 3))),
        _round(again, rng.random() < 0.5, rng.choice((9, 12))),
    )


def _longer(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """New prompts, then longer ones that begin like them."""
    first = [m.tokens(m.unit + rng.randint(1, m.block)) for _ in range(2)]
    longer = [p + m.tokens(2 * m.unit + rng.randint(1, m.block)) for p in first]
    return (_round(first, rng.random() < 0.5, 2), _round(longer, rng.random() < 0.5, rng.choice((9, 12))))


def _together_again(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """New prompts, then the same again, all at once."""
    first = [m.tokens(m.whole_units(2) + rng.randint(1, m.unit)) for _ in range(rng.randint(2, 3))]
    return (_round(first, rng.random() < 0.5, 1), _round(first, True, 9))


def _same_head(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Prompts that share their first block and differ after it, one after another."""
    head = m.tokens(m.block)
    size = m.unit * rng.randint(2, 3) if m.unit < 128 else m.unit * 2
    prompts = [head + m.tokens(size - m.block + rng.randint(1, m.block)) for _ in range(rng.randint(3, 4))]
    return (_round(prompts, False, 10),)


def _same_tail(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Prompts that differ in their first unit and share what follows, one after another."""
    tail = m.tokens(m.unit * 2 + rng.randint(0, m.block))
    return (_round([m.tokens(m.unit) + tail for _ in range(rng.randint(3, 4))], False, rng.choice((1, 4))),)


def _pressure(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """More at once than the KV cache holds: some requests are preempted and come back."""
    return _more_than_fits(m, rng, m.block)


def _resumed(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """The same, and those that come back go on for a block and more."""
    return _more_than_fits(m, rng, 3 * m.block)


def _more_than_fits(m: Maker, rng: random.Random, answer: int) -> tuple[Round, ...]:
    prompts = [m.tokens(m.whole_units() + rng.randrange(m.unit)) for _ in range(rng.randint(4, 5))]
    return (_round(prompts, True, answer + rng.randrange(8, 24)),)


def _aborts(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """A long prompt is given up before its last chunk; others are not."""
    long = [m.tokens(LONGEST - rng.randrange(m.block)) for _ in range(3)]
    return (
        Round((m.tokens(m.whole_units()),), False, 1),
        *(Round((prompt,), False, 1, abort_after=2) for prompt in long),
        Round((m.tokens(m.whole_units()),), False, 1),
    )


def _chunked_alone(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Some prompts take more than one step, one after another. The budget is between one unit and two."""
    prompts = [
        m.tokens(2 * m.unit + rng.randint(m.block, m.unit + m.block)) for _ in range(rng.randint(2, 3))
    ]
    return (_round([*prompts, m.tokens(m.unit)], False, rng.choice((1, 4))),)


def _shorts(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Lengths around one block and two; some prompts fill none."""
    lengths = [
        m.block - 1,
        m.block,
        m.block + 1,
        2 * m.block - 1,
        2 * m.block + 1,
        rng.randint(3, m.block // 2),
    ]
    rng.shuffle(lengths)
    return (_round([m.tokens(n) for n in lengths], rng.random() < 0.5, rng.choice((1, 2))),)


def _long(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Several units each, one after another."""
    prompts = [m.tokens(m.unit * rng.randint(2, 4) + rng.randrange(m.unit)) for _ in range(rng.randint(2, 4))]
    return (_round(prompts, False, rng.choice((1, 3))),)


def _apart(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """The last prompt comes a while after the others, and is computed in one step."""
    last = Round((m.tokens(m.whole_units() + rng.randrange(m.unit)),), False, 1, pause=2.5)
    return (_round(m.prompts(rng.randint(2, 3)), False, 1), last)


def _opt_out(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """Some of the requests ask not to be stored."""
    prompts = tuple(m.prompts(rng.randint(3, 5)))
    out = tuple(sorted(rng.sample(range(len(prompts)), rng.randint(1, len(prompts) - 1))))
    return (Round(prompts, rng.random() < 0.5, rng.choice((1, 3)), opted_out=out),)


def _salted(m: Maker, rng: random.Random) -> tuple[Round, ...]:
    """The same prompts come again under another salt, and under none."""
    prompts = tuple(m.tokens(m.whole_units(2) + rng.randint(1, m.unit)) for _ in range(2))
    return (
        Round(prompts, rng.random() < 0.5, 2, salts=("tenant-a", "tenant-a")),
        Round(prompts, rng.random() < 0.5, 2, salts=("tenant-b", rng.choice(("", "tenant-c")))),
    )


_KINDS = {
    "chunked-alone": _chunked_alone,
    "shorts": _shorts,
    "long": _long,
    "apart": _apart,
    "opt-out": _opt_out,
    "salted": _salted,
    "mixed": _mixed,
    "few": _few,
    "one-by-one": _one_by_one,
    "one-size": _one_size,
    "together": _together,
    "chunked": _chunked,
    "exact": _exact,
    "decode": _decode,
    "tails": _tails,
    "below": _below,
    "mostly-below": _mostly_below,
    "repeats": _repeats,
    "longer": _longer,
    "same-head": _same_head,
    "same-tail": _same_tail,
    "aborts": _aborts,
    "pressure": _pressure,
    "resumed": _resumed,
    "together-again": _together_again,
}
