"""metadata-has-no-store: what the scheduler side did not offer, by a rule that kvtrace does not know."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.causes.case import CaseRequest, kept_parts
from kvtrace.causes.evidence import transfers, unlike
from kvtrace.causes.evidence.numbers import between
from kvtrace.causes.evidence.unstored import metadata_unread, part_of_prompts, said_of_unread
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LoadEnd, LostSpan, Results, Stage, Turn
from kvtrace.causes.rules import config_key_unused
from kvtrace.ledger.intervals import union
from kvtrace.ledger.run import Engine
from kvtrace.words import count, listed, of_all, plural

CAUSE = Cause(
    id="metadata-has-no-store",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "The connector's scheduler side did not put these tokens into any step's metadata, by a rule that "
        "kvtrace does not know: admission, a quota, a minimum, a state of its own. It may be meant."
    ),
    seen_as=(
        "No metadata names slots of these positions; and they were seen not to be read, or the metadata of "
        "all steps of their requests is readable, and neither a save in the background nor a lookup that "
        "finds them speaks of a store that was not seen. Otherwise they are not observed."
    ),
    remedy=(
        "Look at build_connector_meta of this connector: what must be true of a request before it is offered "
        "for storing?"
    ),
)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    return unclaimed


CLAIMS = {Turn.LAST: claim}


def rule(case: Case) -> Results:
    if rows := case.affected(CAUSE):
        left_out = _LeftOut(case, rows)
        yield case.finding(
            CAUSE,
            f"{left_out.title()} Is that meant?",
            evidence=left_out.evidence(),
            remedy=left_out.remedies(),
            headline=left_out.headline(),
        )


class _LeftOut:
    """What is known of the requests that were left out, and of the others of their engines."""

    def __init__(self, case: Case, rows: Sequence[CaseRequest]) -> None:
        self._case, self._rows = case, rows
        self._engine = case.engines[rows[0].engine]
        tags = dict.fromkeys(r.engine for r in rows)
        of_engine = [r for tag in tags for r in case.of_engine(tag)]
        self._unit_known = all(case.units.get(tag) is not None for tag in tags)
        self._affected = of_all(len(rows), len(of_engine), "prompt")
        self._without = [r for r in rows if not r.entries]
        self._stored = [r for r in of_engine if r.stored_end]
        here = {r.row for r in rows}
        self._others = [r for r in self._stored if r.row not in here]
        self._unread = metadata_unread(self._engine, rows)
        self._silent = bool(self._unread) or self._engine.names_no_store
        self._did, self._done = ("took", "seen to be read") if self._silent else ("offered", "offered")
        self._told = unlike.of_saves(case, CAUSE)
        self._odd = self._silent and _other_slots(case)
        self._loads = (unlike.LOADS, True) in self._told
        self._first = _first_alone(rows)
        self._limit = between(self._engine, self._first, self._first) if self._first else ""
        self._across, self._ends = _across_chunks(case, rows), _ends_alone(case, rows)
        every = len(rows)
        self._alone = _TOGETHER if self._across == every else _NOT_FULL if self._ends == every else ""
        asked = [r.id for r in self._without], [r.id for r in self._stored]
        self._unasked = transfers.not_asked(case, self._engine, *asked)

    def _what(self) -> str:
        if self._alone:
            return f"{self._did} no {self._alone}, of {self._affected}"
        part = len(self._without) < len(self._rows)
        nothing = "nothing, or a part alone," if part else "nothing"
        return f"{self._did} {nothing if self._without else 'a part alone'} of {self._affected} for storing"

    def headline(self) -> str:
        return f"the connector {self._what()}"

    def title(self) -> str:
        reasons = (
            ("", self._alone),
            (", as they ask for no transfer", self._unasked),
            (", those that it loads for", self._loads),
            (", by a rule that is not known, or as other slots were read in the place of theirs", self._odd),
            (", by a rule that is not known", True),
        )
        return f"{self._engine.connector_name} {self._what()}{next(why for why, holds in reasons if holds)}."

    def evidence(self) -> list[str]:
        rows, lengths = self._rows, [r.prompt for r in self._rows]
        spread = " to ".join(count(n) for n in sorted({min(lengths), max(lengths)}))
        limit = f"; the connector holds {self._limit}" if self._limit else ""
        first = f"no more than the first {count(self._first)} tokens of any of these was {self._done}{limit}"
        unit = "which the unit allows" if self._unit_known else "and no unit with a name gives these stores"
        whose = len(rows), "prompt"
        return [
            *([self._unasked] if self._unasked else []),
            *self._told.values(),
            *part_of_prompts(self._case, CAUSE),
            *([first] if self._first else []),
            *([f"of {of_all(self._ends, *whose)} {_ENDS}"] if self._ends else []),
            f"{self._done}: nothing of {count(len(self._without))} of these, a part of "
            f"{count(len(rows) - len(self._without))}; some of {plural(len(self._others), 'other prompt')}",
            *said_of_unread(self._unread, rows),
            f"their prompts have {spread} tokens, {unit}",
            *([f"of {of_all(self._across, *whose)} {_ACROSS}"] if self._across else []),
            *([] if self._stored else _switched_off(self._engine)),
        ]

    def remedies(self) -> list[str]:
        """What the evidence points at, and then the cause's."""
        apart, part = unlike.numbers_between(self._told), len(self._without) < len(self._rows)
        keys = config_key_unused.unused(self._case)
        return [text for text, holds in (
            (transfers.REMEDY, self._unasked),
            *((_MEANT.format(one, "mean that"), True) for one in unlike.flags_of(self._told, True)),
            *((_MEANT.format(one, "ask for it"), True) for one in unlike.flags_of(self._told, False)),
            (_FIRST_REMEDY.format(self._limit or "what ends a store", count(self._first)), self._first),
            (f"see {apart}: it lies between the prompts that are stored and those that are not", apart),
            (_ACROSS_REMEDY, self._alone == _TOGETHER),
            (_ENDS_REMEDY, self._alone == _NOT_FULL),
            (_LOADS_REMEDY, self._loads),
            *((text, not self._told and keys.keys) for text in config_key_unused.to_set(keys)),
            (_SWITCH, not self._silent and not self._stored and len(self._rows) >= _SEVERAL),
            (_ODD_REMEDY, self._odd),
            (_ON_THE_WORKER, self._silent),
            (CAUSE.remedy, not self._silent),
            (_SLOTS_REMEDY, self._unread and part),
        ) if holds]  # fmt: skip


_SEVERAL = 3
"""Lengths of prompts: of fewer it may be chance."""


def _first_alone(rows: Sequence[CaseRequest]) -> int:
    """How many first tokens were kept of each of these prompts of which it stored any; 0 where that differs,
    or others than the first ones were."""
    some = [(r, kept_parts(r)) for r in rows if r.saved]
    ends = {end for _, parts in some for _, end in parts}
    first = all(len(parts) == 1 and parts[0][0] <= r.local + r.external for r, parts in some)
    return ends.pop() if first and len(ends) == 1 and len({r.prompt for r, _ in some}) >= _SEVERAL else 0


_ON_THE_WORKER = (
    "Look at build_connector_meta for what must be true of a request before it is offered for storing, and "
    "at the save hooks for what they pass over (a store that is full, a limit)."
)
_SLOTS_REMEDY = "compare the slots that the save hook indexes with those that the metadata names"
_MEANT = "nothing to mend where {} in kv_transfer_params is to {}"
_FIRST_REMEDY = "see {}: of a prompt no more than the first {} tokens are stored"
_SWITCH = (
    "nothing of any prompt is offered: see what switches saving on (a role, a setting, an environment "
    "variable), before what must be true of a request"
)
_LOADS_REMEDY = (
    "see whether build_connector_meta passes over requests that load: what they compute is not stored"
)
_ACROSS_REMEDY = (
    "store such a block in the step that fills it: the first block of a chunk is the one in which it begins"
)
_ACROSS = "the tokens that are left out lie in a block across the end of a prefill chunk"
_ODD_REMEDY = (
    "first see which slots the save hooks read: where others are read in the place of a block, it is left out"
)
_TOGETHER, _NOT_FULL = "block that two prefill chunks fill together", "last block that is not full"
"""Which blocks alone are left out, where it is such a kind alone."""
_ENDS = "no more is left out than the last block, which is not full"
_ENDS_REMEDY = "nothing to change where whole blocks alone are to be stored"


def _other_slots(case: Case) -> bool:
    """Whether slots are read in the place of others, or other KV comes back, so that they may be."""
    return "kv-misplaced" in case.assigned or any(LoadEnd.WRONG in row.ends for row in case.run.load_rows)


def _ends_alone(case: Case, rows: Sequence[CaseRequest]) -> int:
    """Of how many prompts no more was left out than their last block, which is not full."""
    at = case.assigned[CAUSE.id].at
    return sum(all(start >= r.prompt // max(1, r.block) * r.block for start, _, _ in at[r.row]) for r in rows)


def _across_chunks(case: Case, rows: Sequence[CaseRequest]) -> int:
    """Of how many prompts a block was left out that two chunks fill together: it is whole in neither."""
    at = {
        row: union((start, end) for start, end, _ in parts)
        for row, parts in case.assigned[CAUSE.id].at.items()
    }
    return sum(
        r.chunks > 1 and any(start < r.first_end < end and end - start <= r.block for start, end in at[r.row])
        for r in rows
    )


def _switched_off(engine: Engine) -> list[str]:
    """Options of the connector that are off."""
    words = ("false", "off", "none", "never", "disabled")
    off = [
        f"{key} = {str(value).lower()}" for key, value in engine.extra.items() if str(value).lower() in words
    ]
    return (
        [f"switched off in kv_connector_extra_config: {listed(off)}; this may be the reason"] if off else []
    )
