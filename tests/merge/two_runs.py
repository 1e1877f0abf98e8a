"""A prefill and a decode engine as two synthetic runs, with what they hand over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from synth import Entry, Policy, Prompt, Sim, SpoolFile

from kvtrace.trace.format import Fact, Kind
from kvtrace.trace.rows import ROWS, kind

SECOND = 10**9


@dataclass
class Host:
    """A host's clock: wall time = its times + ``shift``."""

    name: str = "h1"
    boot: str = "boot-1"
    shift: int = 0


@dataclass
class Engine:
    """One run with one engine. ``at``: the host's time when its first request comes."""

    folder: Path
    tag: int
    role: str
    id: str
    host: Host = field(default_factory=Host)
    at: int = SECOND
    kvtrace: str = "0.1.0"
    pid: int = 0

    def __post_init__(self) -> None:
        transfer = {
            "connector": "Hands",
            "role": self.role,
            "module_path": "m",
            "engine_id": self.id,
            "extra": {},
        }
        header: dict[str, Any] = {
            "kvtrace": self.kvtrace, "pid": self.pid or 10 * self.tag, "ppid": 1, "role": "scheduler",
            "host": self.host.name,
            "boot": self.host.boot, "perf_ns": self.at, "wall_ns": self.at + self.host.shift or 1,
        }  # fmt: skip
        base = SpoolFile(self.folder, f"engine-{self.tag}", header)
        self.sim = Sim(
            self.folder, tag=self.tag, role=self.role, base=base, in_process=True,
            engine_facts={"kv_transfer": transfer},
        )  # fmt: skip
        self.sim.t = self.at

    def client(self, client: str, engine: str) -> None:
        self.sim.scheduler.fact(Fact.CLIENT_ID, {"client": client, "engine": engine}, self.sim.t)

    def brought(self, request: str, ids: Mapping[str, str], asks: Sequence[str] = ()) -> None:
        self._hand_over(request, ids, asks, returned=False)

    def returned(self, request: str, ids: Mapping[str, str]) -> None:
        self._hand_over(request, ids, (), returned=True)

    def _hand_over(self, request: str, ids: Mapping[str, str], asks: Sequence[str], returned: bool) -> None:
        value = {"request": request, "returned": returned, "ids": dict(ids), "asks": list(asks)}
        self.sim.scheduler.fact(Fact.HAND_OVER, value, self.sim.clock())

    def computes(self, request: str, prompt: int, saved: int) -> None:
        """A prompt of which the connector saves the first positions."""

        def store(one: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
            return [Entry(one.id, min(end, saved) - start, start=start)] if start < saved else []

        self.sim.serve([Prompt(request, prompt)], Policy(store))

    def loads(self, request: str, prompt: int, loaded: int) -> None:
        """A prompt of which the connector brings the first positions; the others are computed."""
        match = Policy(lambda *_: [], lambda one, local: loaded)
        self.sim.serve([Prompt(request, prompt, output=3)], match)

    def fetches(
        self, request: str, ids: Mapping[str, str], prompt: int, loaded: int, asks: Sequence[str] = ()
    ) -> None:
        """A prompt that comes with the ids of another engine's work, and loads what that one computed."""
        self.sim.arrive(Prompt(request, prompt))
        self.brought(request, ids, asks)
        self.loads(request, prompt, loaded)

    def write(self) -> Path:
        self.sim.write()
        return self.folder


def pair(place: Path, here: Host | None = None, early: int = 0, **more: Any) -> tuple[Engine, Engine]:
    """A prefill engine, and a decode engine half a second later (`early` ns less)."""
    there = Engine(place / "prefill", 3, "kv_producer", "engine-p")
    host = here or there.host
    at = there.at + there.host.shift - host.shift + SECOND // 2 - early
    return there, Engine(place / "decode", 4, "kv_consumer", "engine-d", host, at, **more)


def handed_over(place: Path, here: Host | None = None, early: int = 0) -> tuple[Path, Path]:
    """A request of 600 tokens: 512 saved there, 384 loaded here, 216 computed here: 128 of them again."""
    there, decode = pair(place, here, early)
    there.brought("p-1", {}, ["do_remote_decode"])
    there.computes("p-1", 600, 512)
    ids = {"remote_request_id": "p-1", "remote_engine_id": "engine-p"}
    there.returned("p-1", ids)
    decode.fetches("d-1", ids, 600, 384, ["do_remote_prefill"])
    return there.write(), decode.write()


class Moved(SpoolFile):
    """A spool on another host's clock: its times are less by ``by``."""

    by = 0

    def add(self, head: int, *words: int) -> None:
        fields = ROWS[Kind(kind(head))]._fields
        moved = [
            word - self.by if word and name in ("t", "t0", "t1") else word
            for name, word in zip(fields[1:], words, strict=False)
        ]
        super().add(head, *moved, *words[len(moved) :])
