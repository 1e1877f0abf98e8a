"""What is asked of an engine, as a line of text.

    a96 b64&c64 ; a96 c64b32@x*8

Words are asked one after the other, those with ``&`` between them together. ``a96`` is a prompt of the first
96 tokens of stream a, ``a96b10`` the same with 10 tokens of stream b behind them: prompts that share a
beginning are written with one, and ``a96+`` has behind it what the request for ``a96`` was answered last.
Behind a prompt: ``~1`` the first of the server's LoRA adapters, ``#1`` the same words in a chat, behind the
first image (``#2``: behind another one), ``@x`` its cache salt, ``*8`` tokens to generate, ``!`` the client
leaves after the first of them, ``^`` the engine takes its blocks back then (a preemption).

At ``;`` the engine comes to rest and its own prefix cache is emptied; with ``restart``, ``model``, ``gone``,
``cut``, ``garbage``, ``read-only``, ``full`` or ``slow`` as the first word behind it also that happens to the
server, or to its store. ``model``: it is started anew with another model of the same shape.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from kvtrace.trace.config import STORE_FULL, STORE_READ_ONLY, STORE_SLOW
from kvtrace.verify.answers import VerifyError

GENERATED = 4
"""Tokens that a request generates where nothing else is said."""
FIRST_TOKEN, LAST_TOKEN = 100, 499
"""Ids of prompts' tokens: ordinary ones in every vocabulary."""
RESET = "reset"
RESTART, MODEL = "restart", "model"
STORE_ACTS = (STORE_SLOW, "gone", "cut", "garbage", STORE_READ_ONLY, STORE_FULL)
ACTS = (RESTART, MODEL, *STORE_ACTS)

_PROMPT = re.compile(
    r"((?:[a-z]\d{1,7})+)(\+?)(?:~(\d))?(?:#(\d))?(?:@([\w-]{1,32}))?(?:\*(\d{1,4}))?([!^]?)\Z"
)
_PIECE = re.compile(r"([a-z])(\d+)")
_MOST_TOKENS = 1 << 20


class Piece(NamedTuple):
    """The first ``length`` tokens of a stream."""

    stream: str
    length: int


@dataclass(frozen=True)
class Prompt:
    """One request."""

    pieces: tuple[Piece, ...]
    salt: str = ""
    generate: int = GENERATED
    leaves: bool = False
    preempted: bool = False
    adapter: int = 0
    goes_on: bool = False
    """Behind it stands the answer that it got before."""
    image: int = 0

    @property
    def asker(self) -> tuple[str, int, int]:
        """Whose KV it may get: of the same salt, adapter and image."""
        return self.salt, self.adapter, self.image

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def text(self) -> str:
        pieces = "".join(f"{piece.stream}{piece.length}" for piece in self.pieces) + "+" * self.goes_on
        adapter = f"~{self.adapter}" * bool(self.adapter) + f"#{self.image}" * bool(self.image)
        salt = f"@{self.salt}" if self.salt else ""
        generate = f"*{self.generate}" if self.generate != GENERATED else ""
        return f"{pieces}{adapter}{salt}{generate}{'!' if self.leaves else '^' if self.preempted else ''}"


Batch = tuple[Prompt, ...]
"""Asked together."""


@dataclass(frozen=True)
class Round:
    """What is asked between two rests. ``act``: what happens before it, "" before the first round."""

    act: str
    batches: tuple[Batch, ...]

    @property
    def text(self) -> str:
        words = ["&".join(prompt.text for prompt in batch) for batch in self.batches]
        return " ".join([self.act, *words] if self.act in ACTS else words)


@dataclass(frozen=True)
class Workload:
    rounds: tuple[Round, ...]

    @cached_property
    def text(self) -> str:
        return " ; ".join(one.text for one in self.rounds)

    @property
    def acts(self) -> tuple[str, ...]:
        return tuple(one.act for one in self.rounds)

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for one in self.rounds for batch in one.batches for prompt in batch]

    def fitting(self, most: int) -> Workload | None:
        """Those of the prompts that fit, with what they generate, into ``most`` tokens; None where a round
        has none."""
        rounds = [
            replace(one, batches=tuple(filter(None, (_fitting(batch, most) for batch in one.batches))))
            for one in self.rounds
        ]
        return Workload(tuple(rounds)) if all(one.batches for one in rounds) else None


def _fitting(batch: Batch, most: int) -> Batch:
    return tuple(prompt for prompt in batch if prompt.length + prompt.generate <= most)


def parse(text: str) -> Workload:
    """Raises VerifyError where it is no workload."""
    rounds = []
    for number, part in enumerate(text.split(";")):
        words = part.split()
        act = RESET if number else ""
        if words and words[0] in ACTS:
            if not number:
                raise VerifyError(f"the case {text!r} begins with {words[0]}", "ask something before")
            act = words.pop(0)
        if not words:
            raise VerifyError(f"the case {text!r} has a round without a prompt", "a prompt is a96")
        rounds.append(
            Round(act, tuple(tuple(_prompt(one, text) for one in word.split("&")) for word in words))
        )
    return Workload(tuple(rounds))


def _prompt(word: str, text: str) -> Prompt:
    prompt = None
    if found := _PROMPT.match(word):
        pieces = tuple(Piece(name, int(length)) for name, length in _PIECE.findall(found[1]))
        asks = int(found[6] or GENERATED), found[7] == "!", found[7] == "^"
        prompt = Prompt(pieces, found[5] or "", *asks, int(found[3] or 0), bool(found[2]), int(found[4] or 0))
    if prompt is None or not 0 < prompt.length <= _MOST_TOKENS or prompt.generate < 1:
        raise VerifyError(f"{word!r} in the case {text!r} is no prompt", "a prompt is a96, a96b10, a96@x*8")
    return prompt


class Streams:
    """The tokens behind the letters: other ones for each seed and each name."""

    def __init__(self, seed: int | str) -> None:
        self._seed = seed
        self._known: dict[tuple[str, str], tuple[random.Random, list[int]]] = {}

    def tokens(self, of: str, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of the workload called ``of``."""
        found: list[int] = []
        for name, length in prompt.pieces:
            source, tokens = self._known.setdefault(
                (of, name), (random.Random(f"kvtrace verify {self._seed} {of} {name}"), [])
            )
            while len(tokens) < length:
                tokens.append(source.randint(FIRST_TOKEN, LAST_TOKEN))
            found += tokens[:length]
        return found
