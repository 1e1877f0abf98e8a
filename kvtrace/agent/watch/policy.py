"""Which steps are watched.

Every step that stores, loads or computes prompt tokens, the hooks of the step right after it that are not
called layer by layer (``wait_for_save``, ``get_finished``: some connectors copy a step later), and the same
hooks of a step in which requests end (some copy then). Of a connector that was seen to copy in a hook that is
not for copying, these hooks are watched in the 8 steps behind each watched one. What the watch costs is paid
for from an account: it begins with a credit, so that short runs are watched in full, and gets the budget's
share of the steps' time. The cost is processor time, so that a machine that is busy with something else does
not use the credit up. Where the account is empty, and where the user asked for less, steps are sampled: the
first 8 with something to store (or to load), then every 32nd. Without a credit nothing is watched that the
account does not hold, from the first step on, and a watched call counts whole, by host time, with the
connector's own work in it. A step that was watched says so in its EXEC record; of others nothing is
concluded.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from kvtrace.agent import limits
from kvtrace.agent.budget import BudgetAccount
from kvtrace.agent.state import AGENT
from kvtrace.trace.config import WATCHES
from kvtrace.trace.facts import Limit
from kvtrace.trace.format import Flag

FIRST = 8
EVERY = 32
FIRST_COST = 10_000_000
"""ns that a watched step is taken to cost before one was seen, where the budget holds from the beginning."""
_MAX_STEPS = 256
_MOST_BEHIND = 8
"""Steps behind a watched one in which a connector that copies later is watched."""
_EVERY_STEP = WATCHES[-1]


class _Samples:
    """Which of the steps with work are sampled, where not all are watched."""

    def __init__(self) -> None:
        self._seen = 0

    def take(self) -> bool:
        seen, self._seen = self._seen, self._seen + 1
        return seen < FIRST or (AGENT.config.watch != "first" and seen % EVERY == 0)


class _Work(NamedTuple):
    """What there may be to see in a step."""

    stores: bool
    loads: bool
    any: bool

    @classmethod
    def of(cls, declared: Any) -> _Work:
        unread = not declared.readable and AGENT.worker.prompt
        # Entries of 0 slots have nothing to show: where sizes are known, they are no work.
        stores = bool(declared.store_slots if declared.readable else declared.store_entries) or unread
        # An entry that says neither "store" nor "load" (is_store false) may be a load.
        loads = bool(declared.load_entries or declared.undirected) or unread
        return cls(stores, loads, stores or loads or AGENT.worker.prompt or not declared.readable)


class _Connector:
    def __init__(self) -> None:
        self.store, self.load = _Samples(), _Samples()
        self.copies_later = False
        """A hook that is not for copying was seen to copy KV."""
        self.behind = 0
        """Steps since the last one that was watched."""

    def may_copy(self) -> bool:
        """Whether what an earlier step named may be copied in this one."""
        self.behind += 1
        return self.copies_later and self.behind <= _MOST_BEHIND


class Policy:
    """Of this process's worker."""

    def __init__(self) -> None:
        self._connectors: defaultdict[int, _Connector] = defaultdict(_Connector)
        self.account: BudgetAccount | None = None
        self._config: Any = None
        self._bounded = False
        self._samples = False
        """Of the steps that the account may allow, samples alone are watched."""
        self._cost = 0
        """ns that the watch took in the step at hand."""
        self._steps: dict[int, None] = {}
        self._after = False
        """The step before this one was watched."""
        self._begun = False
        """The first step has begun: what was watched before takes nothing from the steps."""
        self._granted = False
        """The account held what the step at hand costs, as it began."""

    # --- the account ----------------------------------------------------------------------

    def _accounts(self) -> BudgetAccount | None:
        config = AGENT.config
        if config is not self._config:
            self._config = config
            every = config.watch == _EVERY_STEP
            self._bounded = not config.credit
            self.account, self._samples = None, not every
            if every or self._bounded:
                credit, cost = round(config.credit * 1e9), FIRST_COST if self._bounded else 0
                self.account = BudgetAccount(config.watching, config.share, credit, cost)
        return self.account

    @property
    def bounded(self) -> bool:
        """Whether nothing is watched that the account does not hold."""
        self._accounts()
        return self._bounded

    def _pays(self) -> bool:
        """Whether what begins is watched whatever was watched before."""
        account = self._accounts()
        return account is not None and not self._samples and account.take()

    def spent(self, cost: int) -> None:
        """The watch took ``cost`` ns: processor time; of a whole call, without a credit, host time."""
        if self.account is not None:
            self._cost += cost
            self.account.spent(cost)

    # --- steps ----------------------------------------------------------------------------

    def step_begins(self) -> None:
        """What comes before the metadata is bound, and the binding itself, is watched in the step right after
        a watched one, and where prompt tokens are computed: some connectors copy as their work comes."""
        if not self._begun:
            self._begun, account = True, self._accounts()
            if account is not None:
                account.settle()
        self._granted = AGENT.worker.prompt and self._pays()
        if self._after or self._granted:
            AGENT.worker.watch_after = True

    def begin(self, index: int, declared: Any) -> None:
        """Metadata was bound to the (outermost) connector of that index."""
        worker = AGENT.worker
        worker.watch_store = worker.watch_load = worker.watch_after = None
        after, self._after = self._after, False
        if not worker.step or AGENT.recorder is None or not AGENT.recorder.alive:
            return
        connector = self._connectors[index]
        work = _Work.of(declared)
        if work.any:
            self._choose(connector, work)
        if worker.watch_store is None:
            if work.any:
                limits.say(Limit.STEPS, AGENT.config.watch, index, worker.step)
            due = connector.may_copy() or worker.finishes
            if after or (due and self._pays()):
                worker.watch_after = True
        worker.watched |= Flag.STORE if worker.watch_store is not None else 0
        worker.watched |= Flag.LOAD if worker.watch_load is not None else 0
        if worker.watched:
            self._after = True
            connector.behind = 0
            self._steps[worker.step] = None
            while len(self._steps) > _MAX_STEPS:
                del self._steps[next(iter(self._steps))]

    def _choose(self, connector: _Connector, work: _Work) -> None:
        worker = AGENT.worker
        if self._granted or self._pays():
            worker.watch_store = worker.watch_load = True
        elif not self._bounded or (self.account is not None and self.account.take()):
            if work.stores and connector.store.take():
                worker.watch_store = worker.watch_load = True  # what is saved may be copied in any hook
            if work.loads and connector.load.take():
                worker.watch_load = True

    def copied_elsewhere(self, index: int) -> None:
        """A hook of the connector of that index which is not for copying copied KV."""
        self._connectors[index].copies_later = True

    def end(self) -> None:
        """The step's metadata was cleared."""
        worker = AGENT.worker
        if self._bounded and self.account is not None and worker.watched:
            self.account.learned(self._cost)
        self._cost = 0
        worker.watch_store = worker.watch_load = worker.watch_after = None

    def background(self, step: int) -> bool:
        """Whether work in the background for that step (0: not known for which) is watched."""
        return step in self._steps or self._pays()


POLICY = Policy()
