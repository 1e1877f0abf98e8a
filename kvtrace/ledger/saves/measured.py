"""What watched save calls really did, by worker, step and KV layer.

An ``EFFECT`` record says what one call read of one layer's KV tensor and wrote to files. Here
they become one cell per worker, step and KV layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtrace.ledger.model import Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import STEP_MASK, STEP_SHIFT, Flag

WHOLE = -1
"""The column of what a call did without a layer to its name."""
_SAVING = frozenset(hook.code for hook in hooks.SAVING)


@dataclass(frozen=True)
class Cell:
    """What was measured of one layer in one step of one worker."""

    slots: int = -1  # KV slots read, -1 where none could be watched
    unsure: bool = False  # of some call it can't be said what it read
    bytes: int = 0  # in files opened for writing
    files: int = 0
    targets: Mapping[int, int] = field(default_factory=dict)  # digest of a file's path -> latest time
    replaced: bool = False  # the file of a call held something before, and was written anew


@dataclass(frozen=True)
class Measured:
    """The cells of one worker: step -> column of its KV layers (or WHOLE) -> cell."""

    steps: Mapping[int, Mapping[int, Cell]] = field(default_factory=dict)
    most: int = 0  # the greatest number of slots that any call of a save hook was seen to read
    elsewhere: bool = False  # a hook that is not for saving was seen to read

    @property
    def later(self) -> bool:
        """Whether other hooks read, and no save hook ever did: that these read nothing in a step says nothing
        of its tokens."""
        return self.elsewhere and not self.most


def measure(scans: Sequence[SpoolScan], workers: Sequence[Worker]) -> dict[tuple[int, str], Measured]:
    """The cells of each worker, by Worker.key."""
    by_spool = {scan.name: scan for scan in scans}
    effects: dict[tuple[int, str], list[rows.Effect]] = defaultdict(list)
    for scan in scans:
        for words in scan.effects.tolist():
            effect = rows.Effect._make(words)
            if effect.step & STEP_MASK:
                effects[effect.step >> STEP_SHIFT, scan.name].append(effect)
    return {
        worker.key: _measured(effects[worker.key], worker, by_spool[worker.spool].names) for worker in workers
    }


def _measured(effects: Sequence[rows.Effect], worker: Worker, names: Mapping[int, str]) -> Measured:
    of_layer = {name: column for column, name in enumerate(worker.kv_layers)}
    index = worker.connector.ordinal & 0xFF if worker.connector else None
    # A connector inside another one is measured twice: the outer one counts.
    outer = any(rows.detail(effect.head) == index for effect in effects)
    steps: dict[int, dict[int, list[rows.Effect]]] = defaultdict(lambda: defaultdict(list))
    most, elsewhere = 0, False
    for effect in effects:
        marks, saving = rows.flags(effect.head), rows.code(effect.head) in _SAVING
        if marks & Flag.STORE and saving:
            most = max(most, effect.slots)
        elif marks & Flag.STORE:
            elsewhere = elsewhere or effect.slots > 0
        if not saving or (marks & Flag.LOAD and not marks & Flag.STORE):
            continue
        if outer and rows.detail(effect.head) != index:
            continue
        name = names.get(effect.layer, "") if effect.layer else ""
        if not name or name in of_layer:
            steps[effect.step][of_layer[name] if name else WHOLE].append(effect)
    return Measured(
        steps={
            step: {column: _cell(of_cell) for column, of_cell in columns.items()}
            for step, columns in steps.items()
        },
        most=most,
        elsewhere=elsewhere,
    )


def _cell(effects: Sequence[rows.Effect]) -> Cell:
    read = [effect.slots for effect in effects if effect.slots >= 0]
    wrote = [effect for effect in effects if effect.target and effect.files > 0]
    targets: dict[int, int] = {}
    for effect in wrote:
        targets[effect.target] = max(effect.t, targets.get(effect.target, effect.t))
    return Cell(
        slots=sum(read) if read else -1,
        unsure=len(read) < len(effects),
        bytes=sum(max(0, effect.bytes) for effect in effects),
        files=sum(max(0, effect.files) for effect in effects),
        targets=targets,
        replaced=any(rows.flags(effect.head) & Flag.REPLACED for effect in wrote),
    )
