"""What the agent keeps of a step's metadata: rows for its entries, a document for what is not understood."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from kvtrace.agent.metadata import Admissions, Declared, StepRequests, Totals, is_empty, read
from kvtrace.agent.metadata.adapters import Adapter, Adapters
from kvtrace.agent.state import AGENT
from kvtrace.trace import rows
from kvtrace.trace.facts import UnreadableMetadataFact
from kvtrace.trace.format import Kind, Role, pack_head

_MOST_KINDS = 8
"""Different things that are not understood, of one connector, that are written down."""
_NOTHING = Declared()


class Reader:
    """Reads the metadata of this process's schedulers, step by step."""

    def __init__(self) -> None:
        self.admissions = Admissions()
        self._step: tuple[Any, StepRequests] | None = None
        """The SchedulerOutput at hand and its requests: shared by connectors inside a connector."""
        self._counts: dict[int, dict[tuple[str, str, str], int]] = {}

    def built(self, index: int, connector: Any, meta: Any, output: Any, child: bool, t: int) -> Totals:
        """The connector of that index (``child``: inside another one) has built the metadata of a step."""
        adapter = self._adapters.of(type(connector), child)
        if adapter is None and is_empty(meta):
            declared = _NOTHING
        else:
            declared = self._read(adapter, meta, output, child)
        if not child:
            self._step = None
            self._write(declared, t, 0)
            if self.admissions.awaited:
                self.admissions.ran(output.num_scheduled_tokens)
        else:
            self._write(declared, t, index)
        if declared.problems and (child or not getattr(connector, "_connectors", None)):
            self._explain(index, meta, declared)  # those inside it have explained theirs
        return declared

    @cached_property
    def _adapters(self) -> Adapters:
        return Adapters(AGENT.config.metadata_adapter)

    def _read(self, adapter: Adapter | None, meta: Any, output: Any, child: bool) -> Declared:
        adapters, requests = self._adapters, self._requests(output)
        answer = None if adapter is None else adapter.entries(meta, requests)
        if child and answer is not None:
            adapters.answered[id(meta)] = (meta, answer)
        declared = read(meta, requests, answer, adapters.answered)
        if not child:
            adapters.answered.clear()
        return declared

    def _requests(self, output: Any) -> StepRequests:
        if self._step is None or self._step[0] is not output:
            scheduler = AGENT.scheduler
            self._step = output, StepRequests(scheduler.current(), output, self.admissions, scheduler.step)
        return self._step[1]

    def _write(self, declared: Declared, t: int, inside: int) -> None:
        """META records of the connector ``inside`` another one, or (0) of the outermost one."""
        step = AGENT.scheduler.step
        for entry in declared.entries:
            head = pack_head(Kind.META, Role.SCHEDULER, 0, inside, entry.direction, AGENT.thread())
            ident = AGENT.request_id(entry.req_id) if entry.req_id else 0
            row = rows.MetadataEntry(
                head, t, ident, step, slots=entry.slots, tokens=entry.tokens, start=entry.start
            )
            AGENT.add(row)

    def _explain(self, index: int, meta: Any, declared: Declared) -> None:
        """Say what is not understood: at the first time, and whenever it has come twice as often."""
        counts = self._counts.setdefault(index, {})
        cls = type(meta).__name__
        for problem in dict.fromkeys(declared.problems):
            key = (cls, problem.field, problem.shape)
            if key not in counts and len(counts) >= _MOST_KINDS:
                continue
            steps = counts[key] = counts.get(key, 0) + 1
            if steps & (steps - 1) == 0:
                document = UnreadableMetadataFact(
                    index, cls, problem.field, problem.shape, problem.load, steps
                )
                AGENT.fact(document, Role.SCHEDULER, flush=False)


READER = Reader()
