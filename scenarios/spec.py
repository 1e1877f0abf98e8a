"""Scenario files: what runs, and what kvtrace must say of it. Standard library only.

A scenario is ``scenarios/<name>.toml``:

- ``title``, ``cause`` (the id that it is about) or ``twin_of`` (scenarios whose cause must not
  show here), ``processes``: "one" (engine in this process) or "many" (vLLM's own processes)
- ``[engine]``: arguments of ``LLM(...)`` / ``vllm serve``, on top of :data:`ENGINE`
- ``[connector]``: ``name``, ``module`` (out of tree), ``role``, ``path_option`` (the extra-config
  key that gets the store's directory), ``load_failure_policy`` and ``[connector.extra]``; left out: no
  connector
- ``[env]``: environment variables
- ``[[round]]``: ``prompts`` (a number = a new prompt of that many tokens; ``{tokens, seed,
  times, own}``: prompts of one seed share their beginning, up to the last ``own`` tokens), ``together``
  (all submitted at once, or one after another), ``max_tokens``, ``repeat``, ``prompt_logprobs``,
  ``abort_after`` (seconds until the client gives up), or ``abort_steps`` (engine steps until then)
  with ``aborted_at`` (tokens computed by then), ``idle_steps`` (engine steps after each batch), ``hangs``,
  ``forget`` (before it vLLM is asked to reset its prefix cache, and the connector's store with it),
  ``part`` (streaming input: prompts in parts of so many tokens, one prompt after another; then in all
  rounds, with ``processes = "many"``)
- ``raises``: type of the exception that ends the engine, where one does
- ``stuck_after``, ``stuck_in``: its engine hangs in that function; ``kvtrace run --stuck-after`` so many
  seconds looks where, and then the process is killed; ``compiled``: what it expects is what the recorder in C
  keeps of a step that never ends
- ``[expect]``: see :class:`Expect`
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).resolve().parent
MODULE_DIRS = (HERE / "connectors", HERE / "workers")
VOCABULARY = range(3, 500)

ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    # explicit, so that vLLM neither measures memory nor warms up; the blocks, as VLLM_CPU_KVCACHE_SPACE takes
    # whole GiB, goes before the bytes, and a GiB of zeroes takes half a second
    "kv_cache_memory_bytes": 64 << 20,
    "num_gpu_blocks_override": 2048,
    "seed": 0,
    # half precision makes near ties of a random model flip with the shape of the batch
    "dtype": "float32",
}


@dataclass(frozen=True)
class Round:
    prompts: list[list[int]]
    together: bool
    max_tokens: int
    prompt_logprobs: int | None
    abort_after: float | None = None
    """Seconds after which requests without an answer are aborted; None waits."""
    abort_steps: int | None = None
    """Engine steps after which all requests of the round are aborted."""
    idle_steps: int = 0
    """Engine steps after each batch with nothing to compute: what finished is told to the workers."""
    aborted_at: int = 0
    """Tokens that have KV by then, all requests together."""
    hangs: bool = False
    """Its step never ends: nothing of it is in the trace of its process."""
    forget: bool = False
    """Before it vLLM resets its prefix cache, and the connector's store with it."""
    part: int | None = None
    """Tokens of the prompt that come at once, each part with an answer; None: all of it."""

    def parts(self, prompt: list[int]) -> int:
        """How many parts a prompt of it comes in, each with an answer."""
        return -(-len(prompt) // self.part) if self.part else 1


@dataclass(frozen=True)
class Expect:
    """What the report of a scenario must say. Counts are tokens (of one layer and rank)."""

    first: str | None
    """Id of the first finding; None for a healthy run: no finding of severity fault."""
    severity: str | None = None
    allowed: tuple[str, ...] = ()
    """Ids of the other findings that may stand beside it."""
    absent: tuple[str, ...] = ()
    """Ids that must not be among the findings (a twin's: the causes of its scenarios)."""
    ruled_out: tuple[str, ...] = ()
    """Ids that must be ruled out, with evidence."""
    total: int | None = None
    saves: dict[str, int] = field(default_factory=dict)
    """Save accounts, exactly; they sum to the total, so an account not named here must be empty."""
    loads: dict[str, int] = field(default_factory=dict)
    traced: bool = True
    """False where the engine is kept from being traced: no token has an outcome."""
    in_store: int | None = None
    """Tokens that the store holds in the end, where some were saved again under the same key."""
    evidence: tuple[str, ...] = ()
    """Words that the first finding's title, evidence or remedy must hold."""


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    cause: str | None
    twin_of: tuple[str, ...]
    one_process: bool
    engine: dict[str, Any]
    connector: dict[str, Any] | None
    env: dict[str, str]
    rounds: list[Round]
    expect: Expect
    raises: str | None = None
    stuck_after: float | None = None
    stuck_in: str = ""
    compiled: bool = False

    @property
    def shares_process(self) -> bool:
        """Whether it may run in one process with others, engine after engine."""
        return self.one_process and self.stuck_after is None

    def engine_args(self, model: str, store: Path) -> dict[str, Any]:
        """Keyword arguments for ``LLM(...)``; the store is where the connector writes."""
        args: dict[str, Any] = {**ENGINE, **self.engine, "model": model}
        if self.connector is not None:
            extra = dict(self.connector.get("extra", {}))
            extra[self.connector.get("path_option", "path")] = str(store)
            if "connectors" in extra:  # of a MultiConnector
                extra["connectors"] = [
                    {**part, "kv_connector_extra_config": {
                        **part.get("kv_connector_extra_config", {}), "path": str(store / str(at))}}
                    for at, part in enumerate(extra["connectors"])
                ]  # fmt: skip
            config = {
                "kv_connector": self.connector["name"],
                "kv_role": self.connector.get("role", "kv_both"),
                "kv_connector_extra_config": extra,
            }
            if "module" in self.connector:
                config["kv_connector_module_path"] = self.connector["module"]
            if "load_failure_policy" in self.connector:
                config["kv_load_failure_policy"] = self.connector["load_failure_policy"]
            args["kv_transfer_config"] = config
        return args

    @property
    def streams(self) -> bool:
        """Whether its prompts come in parts."""
        return any(part.part for part in self.rounds)

    def prompt_tokens(self) -> int:
        return sum(len(prompt) for part in self.rounds for prompt in part.prompts)

    def total_tokens(self) -> int:
        """Tokens whose KV the engine computes or reuses: the last token of an answer has none, and a
        request that is given up before it ran has none at all. Of a round that hangs its first step counts,
        where that is recorded."""
        rounds = [
            part
            for part in self.rounds
            if part.abort_after is None and part.abort_steps is None and not part.hangs
        ]
        whole = sum(len(p) + part.parts(p) * (part.max_tokens - 1) for part in rounds for p in part.prompts)
        hanging = [part for part in self.rounds if part.hangs] if self.compiled else []
        begun = sum(len(prompt) for part in hanging for prompt in part.prompts)
        return whole + begun + sum(part.aborted_at for part in self.rounds)


class ScenarioError(Exception):
    """A scenario file that does not exist or cannot be read; the message is one line."""


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.toml"))


def load(name: str) -> Scenario:
    """Reads one scenario. Raises :class:`ScenarioError`."""
    path = HERE / f"{name}.toml"
    if not path.is_file():
        raise ScenarioError(f"no scenario named {name!r} in {HERE} (there are: {', '.join(names())})")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        expect = data["expect"]
        for key in ("allowed", "absent", "ruled_out", "evidence"):
            expect[key] = tuple(expect.get(key, ()))
        return Scenario(
            name=name,
            title=data["title"],
            cause=data.get("cause"),
            twin_of=tuple(data.get("twin_of", ())),
            one_process=data.get("processes", "one") == "one",
            engine=data.get("engine", {}),
            connector=data.get("connector"),
            env={key: str(value) for key, value in data.get("env", {}).items()},
            rounds=_rounds(data["round"], seed=name),
            expect=Expect(**{"first": None, **expect}),
            raises=data.get("raises"),
            stuck_after=data.get("stuck_after"),
            stuck_in=data.get("stuck_in", ""),
            compiled=data.get("compiled", False),
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ScenarioError(f"{path.name}: {type(error).__name__}: {error}") from error


def _rounds(entries: list[dict[str, Any]], seed: str) -> list[Round]:
    rounds = []
    fresh = 0
    for entry in entries:
        for _ in range(entry.get("repeat", 1)):
            prompts: list[list[int]] = []
            for item in entry["prompts"]:
                if isinstance(item, int):
                    fresh += 1
                    prompts.append(_tokens(f"{seed}/{fresh}", item))
                else:
                    prompt = _tokens(f"{seed}/named {item['seed']}", item["tokens"])
                    if own := item.get("own", 0):
                        fresh += 1
                        prompt[-own:] = _tokens(f"{seed}/{fresh}", own)
                    prompts.extend([prompt] * item.get("times", 1))
            rounds.append(
                Round(
                    prompts=prompts,
                    together=entry.get("together", True),
                    max_tokens=entry.get("max_tokens", 1),
                    prompt_logprobs=entry.get("prompt_logprobs"),
                    abort_after=entry.get("abort_after"),
                    abort_steps=entry.get("abort_steps"),
                    aborted_at=entry.get("aborted_at", 0),
                    idle_steps=entry.get("idle_steps", 0),
                    hangs=entry.get("hangs", False),
                    forget=entry.get("forget", False),
                    part=entry.get("part"),
                )
            )
    return rounds


def _tokens(seed: str, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.choice(VOCABULARY) for _ in range(count)]
