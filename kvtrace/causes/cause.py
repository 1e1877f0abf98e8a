"""What a file in ``kvtrace/causes/rules/`` says about its cause."""

from __future__ import annotations

from dataclasses import dataclass

from kvtrace.causes.diagnosis import NotObserved, RuledOut
from kvtrace.ledger.ends import LoadEnd, SaveEnd
from kvtrace.terms import Stage
from kvtrace.versions import OLDEST, since

SAVES, LOADS = "saves", "loads"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One entry of the catalogue. The texts are whole sentences of plain English, without Markdown."""

    id: str
    """Never renamed: reports, baselines and contracts hold it. The file has the same name, with _ for -."""
    severity: str
    """FAULT, LIMIT (by the connector's design) or NOTE; a single finding may have another one."""
    meaning: str
    seen_as: str
    """What has to be seen in a trace for a finding."""
    remedy: str
    """The connector's own fix first, then settings of the engine with what they cost."""
    stage: Stage | None = None
    """Where the tokens are lost; None for loads and for notes that concern no token."""
    ledger: str | None = None
    """SAVES or LOADS, where tokens are assigned to it; None for notes."""
    versions: str = since(OLDEST)
    live: bool = True
    """Seen on a real vLLM by a scenario; False where the rule was tested on synthetic traces only."""
    timed: bool = False
    """A note about time: on a busy machine any run may show it."""
    about_calls: bool = True
    """False where hooks are called all the same, though the cause is one of the early stages."""
    asks: bool = True
    """False of a note that asks for nothing: it stands last."""
    wrong_data: bool = False
    """What a request computed on is not its own, or may not be: worse than anything that was not stored."""
    weighs: bool = False
    """It weighs whatever it cost: a hook that raised ended the step of all tokens in it, one that hangs keeps
    all that are still to come, and where no connector started there never were any."""
    save_ends: tuple[SaveEnd, ...] = ()
    """The ends of a token's way into the store that this cause stands behind."""
    load_ends: tuple[LoadEnd, ...] = ()
    """The same for loads."""

    def ruled_out(self, evidence: str) -> RuledOut:
        """This was looked for, and is not the cause; `evidence` says what was seen instead."""
        return RuledOut(self.id, evidence)

    def not_observed(self, why: str) -> NotObserved:
        """The trace does not show whether it is the cause."""
        return NotObserved(self.id, why)
