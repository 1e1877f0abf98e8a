"""The ways in which a run is cut short: what is done to it at a moment of the seed, and what follows."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from killing.engines import (
    CORE,
    ENDING,
    FRONT,
    KVTRACE,
    LAUNCHER,
    PATIENCE,
    WORKER,
    Engine,
    NotReached,
    Place,
    Setup,
    until,
)

DISK_BYTES = 8 << 20
"""Size of the file system that a run fills up: what a run of the tiny model writes fits in it."""

SCRIPT, FAMILY = Setup("script", False), Setup("family", False, forks=8)
SERVER, PAIR = Setup("server", True), Setup("pair", True, ranks=2)
SETUPS = {one.name: one for one in (SCRIPT, FAMILY, SERVER, PAIR)}
_FROM, _TO = 4, 90
"""The kill comes after so many calls of ``save_kv_layer``; a run without one makes about 250."""


SETTLED = 60
"""Seconds after the end of an untraced command in which its processes go, or are counted as left."""


@dataclass
class End:
    """How one command ended. ``kinds``: how it was cut short, fork by fork; ``code``: as a shell says it,
    None where the command did not end; ``ends``: exit code of each fork; ``left``: what outlived it, of an
    untraced one all, of a traced one what no untraced one leaves."""

    setup: Setup
    kinds: tuple[str, ...]
    code: int | None = 0
    ends: dict[int, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def codes(self) -> list[tuple[str, int | None]]:
        """(kind, exit code) of what was cut short: the command, or each fork that ended."""
        if self.setup.forks:
            return [(self.kinds[fork], code) for fork, code in self.ends.items()]
        return [(self.kinds[0], self.code)]


@dataclass
class Seen(End):
    """What was seen of one command. ``live``: what ``explain`` said while it still ran."""

    place: Place = field(kw_only=True)
    given: list[tuple[int, list[int]]] = field(default_factory=list)
    live: str = ""
    problems: list[str] = field(default_factory=list)


def _killed(what: str) -> Callable[[Engine, random.Random], None]:
    def kill(engine: Engine, rng: random.Random) -> None:
        pids = engine.pids(what)
        if not pids:
            raise NotReached(f"no {what} among {sorted(engine.processes().values())}")
        engine.kill([rng.choice(pids)], signal.SIGKILL)

    return kill


def _all(engine: Engine, rng: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.process.pid, signal.SIGKILL)


def _signalled(signum: int, times: int = 1) -> Callable[[Engine, random.Random], None]:
    """To the command (kvtrace passes it on), or to its group, as a terminal does."""

    def send(engine: Engine, rng: random.Random) -> None:
        group = rng.random() < 0.5
        for _ in range(times):
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(engine.process.pid, signum)

    return send


def _goes_on(engine: Engine) -> None:
    """Nothing is amiss with the engine: it answers what it is asked, and ends as it is told to."""
    engine.answer_all()
    engine.kill(engine.pids(FRONT) if engine.setup.server else [], signal.SIGTERM)


def _launcher(engine: Engine, rng: random.Random) -> None:
    _killed(LAUNCHER)(engine, rng)
    engine.wait()


def fill(place: Place) -> None:
    """Until nothing more fits on the file system of the run directory."""
    with contextlib.suppress(OSError), (place.run.parent / "filler").open("wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while filler.write(bytes(size)) == size:
                    pass


def _fill(engine: Engine, rng: random.Random) -> None:
    fill(engine.place)


def _delete(engine: Engine, rng: random.Random) -> None:
    shutil.rmtree(engine.place.run, ignore_errors=True)


@dataclass(frozen=True)
class Kind:
    """``survives``: the engine does, and is ended afterwards. Untraced nothing is done to it then: what is
    killed, filled or deleted is kvtrace's. ``setups``: the names of those in which it happens. ``drops``: the
    clients go away with it."""

    do: Callable[[Engine, random.Random], None]
    setups: tuple[str, ...]
    survives: bool = False
    drops: bool = False


_ALL = ("server", "pair", "script")
KINDS: dict[str, Kind] = {
    "front": Kind(_killed(FRONT), _ALL),
    "core": Kind(_killed(CORE), ("server", "pair")),
    "worker": Kind(_killed(WORKER), ("server", "pair")),
    "all": Kind(_all, _ALL),
    "term": Kind(_signalled(signal.SIGTERM), _ALL, drops=True),
    "int": Kind(_signalled(signal.SIGINT), _ALL, drops=True),
    "int-twice": Kind(_signalled(signal.SIGINT, 2), _ALL, drops=True),
    "launcher": Kind(_launcher, _ALL, survives=True),
    "disk-full": Kind(_fill, _ALL, survives=True),
    "deleted": Kind(_delete, _ALL, survives=True),
}
FORKED = {
    "kill": (signal.SIGKILL, 1), "term": (signal.SIGTERM, 1), "int": (signal.SIGINT, 1),
    "int-twice": (signal.SIGINT, 2),
}  # fmt: skip
"""What is sent to a forked engine, and how often."""


def cut_short(
    setup: Setup,
    kinds: tuple[str, ...],
    place: Place,
    seed: int,
    traced: bool = True,
    twin: End | None = None,
) -> Seen:
    """Start the command, cut it short, and say what was seen. ``kinds``: one; of forks one each.
    ``twin``: an untraced run that was cut short in this way: what it leaves may be left."""
    seen = Seen(setup, kinds, place=place)
    rng = random.Random(f"{seed} {setup.name} {kinds}")
    with _file_system(place, traced and "disk-full" in kinds), Engine(setup, place, seed, traced) as engine:
        try:
            engine.start()
            if setup.forks:
                _forks(engine, kinds, rng)
            else:
                _one(engine, kinds[0], rng, seen)
            code = engine.wait(_patience(kinds, traced, twin))
            seen.code = 128 - code if code is not None and code < 0 else code
            _leave(engine, seen, Counter(twin.left if twin else ()))
        except NotReached as error:
            seen.problems.append(str(error))
        seen.given = engine.given()
        seen.ends = {fork[0]: code[0] for fork, code in engine.said("ended").items()}
        if traced and "disk-full" in kinds:  # the file system goes with the run: what lies on it is kept
            kept = place.folder / "kept"
            shutil.copytree(place.run, kept, ignore=shutil.ignore_patterns("overlay"))
            seen.place.run = kept
    return seen


def _patience(kinds: tuple[str, ...], traced: bool, twin: End | None) -> float:
    """Seconds in which the command must end: a traced one has five times as long as untraced ones, which
    need not end at all."""
    if kinds[0] in KINDS and not KINDS[kinds[0]].survives:
        if not traced or (twin and twin.code is None):
            return ENDING
        return 5 * ENDING
    return PATIENCE


def _one(engine: Engine, name: str, rng: random.Random, seen: Seen) -> None:
    kind = KINDS[name]
    at = rng.randint(_FROM, _TO)
    until(lambda: engine.calls() >= at, f"the connector made {at} calls")
    if engine.traced or not kind.survives:
        kind.do(engine, rng)
    if kind.drops:
        engine.drop()
    if kind.survives:
        if engine.traced and name == "launcher":
            seen.live = explain(engine.place)
        _goes_on(engine)


def _forks(engine: Engine, kinds: tuple[str, ...], rng: random.Random) -> None:
    for fork, name in enumerate(kinds):
        at = rng.randint(_FROM, _TO)
        until(lambda fork=fork: (fork,) in engine.said("fork"), f"fork {fork} begins")
        pid = engine.said("fork")[(fork,)][0]
        until(lambda pid=pid, at=at: engine.calls(pid) >= at, f"fork {fork} made {at} calls")
        signum, times = FORKED[name]
        engine.kill([pid] * times, signum)
        until(lambda fork=fork: (fork,) in engine.said("ended"), f"fork {fork} has ended")


def _leave(engine: Engine, seen: Seen, may: Counter[str]) -> None:
    """Wait until nothing lives any more that need not; what does after all stands in ``seen.left``."""
    try:
        if engine.traced:
            until(lambda: Counter(engine.left()) <= may, "all processes have gone", 5 * SETTLED)
        else:
            until(lambda: not engine.processes(), "all processes have gone", SETTLED)
    except NotReached:
        seen.left = engine.left()


def explain(place: Place) -> str:
    """What ``kvtrace explain`` says, as one line; with its exit code where that is not 0."""
    done = subprocess.run(
        [*KVTRACE, "explain", "-v", str(place.run)],
        env=place.env,
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    code = f"exit code {done.returncode}: {done.stderr}" if done.returncode else ""
    return " ".join(f"{code} {done.stdout}".split())


@contextlib.contextmanager
def _file_system(place: Place, small: bool):
    """A small file system for the run directory, where one is wanted.

    Raises:
        NotReached: this user may not mount one.
    """
    if not small:
        yield
        return
    disk = place.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "none", str(disk)], capture_output=True
    )
    if mounted.returncode:
        raise NotReached("a small file system cannot be mounted here (it takes root)")
    place.run = disk / "run"
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
