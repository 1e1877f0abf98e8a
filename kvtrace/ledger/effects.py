"""What sampled hook calls really did: the measured side of the ledger of saves.

An ``EFFECT`` record says what one call read of one layer's KV tensor and wrote to files. Here
they become one cell per worker, store step and KV layer; :mod:`kvtrace.ledger.tokens` holds the
cells against what the metadata declared. Connectors whose metadata names no store at all, and
that decide on the worker what to save, get their entries from here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtrace.ledger.model import Engine, Swallowed, Worker
from kvtrace.ledger.requests import Chunk, Entry, Request
from kvtrace.ledger.scan import SpoolScan, Steps
from kvtrace.trace.format import HOOK_CODE, STEP_MASK, STEP_SHIFT, Flag

SAVE, WAIT = HOOK_CODE["save_kv_layer"], HOOK_CODE["wait_for_save"]
WHOLE = -1
"""The column of what a call did without a layer to its name."""


@dataclass
class Cell:
    """What was measured of one layer in one step of one worker."""

    slots: int = -1  # KV slots read, -1 where none could be watched
    unsure: bool = False  # of some call it can't be said what it read
    bytes: int = 0  # in files opened for writing
    files: int = 0
    hooks: int = 0  # bits: 1 << hook code of the calls that were measured
    targets: dict[int, int] = field(default_factory=dict)  # digest of a file's path -> latest time
    replaced: bool = False  # the file of a call held something before, and was written anew

    def add(
        self, hook: int, slots: int, size: int, files: int, target: int, t: int, replaced: bool = False
    ) -> None:
        if slots >= 0:
            self.slots = max(0, self.slots) + slots
        self.unsure |= slots < 0
        self.bytes += max(0, size)
        self.files += max(0, files)
        self.hooks |= 1 << hook
        if target and files > 0:
            self.targets[target] = max(t, self.targets.get(target, t))
            self.replaced |= replaced


@dataclass
class Measured:
    """The cells of one worker: step -> column of its KV layers (or WHOLE) -> cell."""

    steps: dict[int, dict[int, Cell]] = field(default_factory=dict)
    most: int = 0  # the greatest number of slots that any call of a save hook was seen to read
    elsewhere: bool = False  # a hook that is not for saving was seen to read
    unsure: bool = False  # of some call it can't be said what it read

    def cell(self, step: int, column: int) -> Cell | None:
        return self.steps.get(step, {}).get(column)

    @property
    def silent(self) -> bool:
        """Whether calls were watched in full, and none of them read anything."""
        return bool(self.steps) and not (self.most or self.elsewhere or self.unsure)

    def hooks(self, step: int) -> int:
        """Bits of the hooks of which any call was measured in a step."""
        bits = 0
        for cell in self.steps.get(step, {}).values():
            bits |= cell.hooks
        return bits


def collect(joined: Sequence[tuple[SpoolScan, Worker]]) -> dict[tuple[int, str], Measured]:
    """The cells of each worker, by Worker.key."""
    found: dict[tuple[int, str], Measured] = {}
    by_spool: dict[str, list[tuple[SpoolScan, Worker]]] = defaultdict(list)
    for scan, worker in joined:
        found[worker.key] = Measured()
        by_spool[scan.path.name].append((scan, worker))
    for found_pairs in by_spool.values():
        scan = found_pairs[0][0]
        if not len(scan.effects):
            continue
        tables = {
            worker.engine: (found[worker.key], {name: i for i, name in enumerate(worker.kv_layers)},
                            worker.connector.ordinal & 0xFF if worker.connector else None)
            for _, worker in found_pairs
        }  # fmt: skip
        outer = {
            tag: any(
                row[3] >> STEP_SHIFT == tag and (row[0] >> 24) & 0xFF == pair for row in scan.effects.tolist()
            )
            for tag, (_, _, pair) in tables.items()
        }
        for w0, t, layer, step, slots, size, files, target in scan.effects.tolist():
            if not step & STEP_MASK or step >> STEP_SHIFT not in tables:
                continue
            marks, hook = (w0 >> 32) & 0xFFFF, (w0 >> 16) & 0xFF
            whole = tables[step >> STEP_SHIFT][0]
            whole.unsure |= slots < 0
            if marks & Flag.STORE and hook in (SAVE, WAIT):
                whole.most = max(whole.most, slots)
            elif marks & Flag.STORE:
                whole.elsewhere |= slots > 0
            if hook not in (SAVE, WAIT) or (marks & Flag.LOAD and not marks & Flag.STORE):
                continue
            tag = step >> STEP_SHIFT
            measured, columns, pair = tables[tag]
            # A connector inside another one is measured twice: the outer one counts.
            if outer[tag] and pair is not None and (w0 >> 24) & 0xFF != pair:
                continue
            name = scan.names.get(layer, "") if layer else ""
            column = columns.get(name, -2) if name else WHOLE
            if column == -2:
                continue
            cell = measured.steps.setdefault(step, {}).setdefault(column, Cell())
            cell.add(hook, slots, size, files, target, t, bool(marks & Flag.REPLACED))
    return found


# ----------------------------------------------------------- stores that no metadata names


def imply(
    requests: list[Request],
    engines: list[Engine],
    measured: dict[tuple[int, str], Measured],
    unreadable: Steps,
) -> list[int]:
    """Add entries for what was measured in steps whose metadata names no store.

    Only where the slots can be given to the step's chunks without doubt. ``Engine.watched_steps`` gets
    the steps whose metadata says nothing readable and of which measurement says everything. Returns
    the steps with chunks of engines that decide on the worker of which nothing was measured, or
    nothing that can be given to a request: what happened in them is not known.
    """
    dark: list[int] = []
    chunks: dict[int, list[tuple[Request, Chunk]]] = defaultdict(list)
    named: set[int] = set()
    declared: set[int] = set()
    for request in requests:
        for chunk in request.chunks:
            chunks[chunk.step].append((request, chunk))
        for entry in request.entries:
            named.add(entry.step)
            declared.add(entry.step >> STEP_SHIFT)
    for engine in engines:
        tables = [measured[worker.key] for worker in engine.workers if worker.key in measured]
        seen = {step for table in tables for step in table.steps}
        most = {step: _most(tables, step) for step in seen}
        own = sorted(step for step in chunks if step >> STEP_SHIFT == engine.tag and step not in named)
        speaks = any(most.get(step, 0) > 0 and step not in named for step in seen)
        silent = bool(tables) and all(table.silent for table in tables)
        if not speaks and not silent:
            continue
        unknown: set[int] = set()
        watched: set[int] = set()
        partly: set[int] = set()
        for step in own:
            shares = _shares(chunks[step], most[step], engine.block_size) if most.get(step, -1) >= 0 else None
            if shares is None:
                unknown.add(step)
                continue
            if step in unreadable and not any(_unsure(table, step) for table in tables):
                watched.add(step)
                if any(
                    0 < slots < c.end - c.start for (_, c), slots in zip(chunks[step], shares, strict=True)
                ):
                    partly.add(step)
            for (request, chunk), slots in zip(chunks[step], shares, strict=True):
                if slots > 0:
                    entry = Entry(step, slots, -1, chunk.start, chunk.end, False, implied=True)
                    request.entries.append(entry)
                    request.entries.sort(key=lambda entry: entry.step)
        # Tails that were left are told apart by the unit, and for that all steps must be known.
        engine.watched_steps |= watched - partly if unknown else watched
        if speaks and engine.tag not in declared:
            # It never declares: a step without a measurement says nothing either way.
            dark.extend(unknown)
        decode = [most[step] for step in seen if step not in chunks and step not in named]
        engine.decode_measured = any(slots > 0 for slots in decode) if decode else None
    return dark


def _unsure(table: Measured, step: int) -> bool:
    """Whether a worker's part in a step was not watched in full."""
    cells = table.steps.get(step)
    return not cells or any(cell.unsure for cell in cells.values())


def _most(tables: list[Measured], step: int) -> int:
    """The most slots of one layer that any worker was seen to read in a step, -1 unknown."""
    return max(
        (cell.slots for table in tables for column, cell in table.steps.get(step, {}).items()
         if column != WHOLE),
        default=-1,
    )  # fmt: skip


def _shares(chunks: list[tuple[Request, Chunk]], slots: int, block: int) -> list[int] | None:
    """How many slots of each chunk were read, None where that can't be told."""
    sizes = [chunk.end - chunk.start for _, chunk in chunks]
    if slots <= 0:
        return [0] * len(chunks)
    if slots >= sum(sizes):
        return sizes
    if len(chunks) == 1:
        return [slots]
    for kept_back in (0, 1):
        if block <= 0:
            break
        floors = []
        for request, chunk in chunks:
            whole = max(0, request.prompt - kept_back) // block * block
            floors.append(max(0, min(whole, chunk.end // block * block) - chunk.start))
        if sum(floors) == slots:
            return floors
    return None


# ------------------------------------------------------------------ exceptions in a worker


@dataclass
class Caught:
    """Exceptions that a worker's connector raised and handled in its save hooks."""

    facts: list[Swallowed]

    def at(self, step: int, layer: str) -> bool:
        """Whether one is known of exactly this call."""
        return any((step, name) in fact.places for fact in self.facts for name in (layer, ""))

    @property
    def calls(self) -> int:
        return sum(fact.count for fact in self.facts)


HARMLESS = frozenset(
    {"FileExistsError", "FileNotFoundError", "TimeoutError", "BlockingIOError", "InterruptedError"}
)
"""Exceptions by which code finds out: caught, they prove nothing."""

_SAVE_HOOKS = ("save_kv_layer", "wait_for_save")


def caught(worker: Worker, swallowed: list[Swallowed]) -> Caught:
    """The handled exceptions in the save hooks of one worker."""
    return Caught(
        [
            fact
            for fact in swallowed
            if fact.spool == worker.spool
            and fact.type not in HARMLESS
            and fact.hook in _SAVE_HOOKS
            and (not fact.step or fact.step >> STEP_SHIFT == worker.engine)
        ]
    )
