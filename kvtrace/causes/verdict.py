"""The one sentence that a person reads first."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS
from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence import measured
from kvtrace.causes.outcomes import not_saved
from kvtrace.causes.pipeline import Prompts, prompt_tokens
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.run import NO_KV
from kvtrace.terms import FAULT, NOTE, Grade
from kvtrace.words import count, percent, plural, sentence

NOT_STARTED, NO_CONNECTOR = "engine-did-not-start", "connector-failed-to-start"


def verdict(case: Case, findings: list[Finding]) -> str:
    """What became of the prompt tokens, as well as it is seen, and the first reason why not more were saved;
    then what is wrong with the loads, where something is."""
    loads = [finding for finding in findings if CATALOGUE[finding.id].ledger == LOADS]
    of_saves = [finding for finding in findings if CATALOGUE[finding.id].ledger != LOADS]
    saves = _saves(case, of_saves)
    saves += _doubts(case, of_saves, saves)
    wrong = [finding.headline for finding in loads if finding.severity == FAULT and finding.headline]
    return _recorded(case, f"{saves} Loads: {wrong[0]}." if wrong else saves)


def _recorded(case: Case, said: str) -> str:
    """What was not recorded is not observed: nothing that is said here holds for it."""
    lacks = case.run.incomplete
    if not lacks:
        return said
    more = f", and {len(lacks) - 1} more" if len(lacks) > 1 else ""
    return (
        f"The recording is incomplete ({lacks[0]}{more}). Of what was recorded: {said[:1].lower()}{said[1:]}"
    )


def _doubts(case: Case, findings: list[Finding], said: str) -> str:
    """The first fault that explains no token that the ledger counts as lost, where it was not said yet."""
    doubts = [one for one in findings if one.severity == FAULT and one.id not in case.assigned]
    doubts = [one for one in doubts if one.headline and one.headline.lower() not in said.lower()][:1]
    sizes = [f" ({plural(one.tokens, 'token')})" if one.tokens else "" for one in doubts]
    return "".join(f" {sentence(one.headline)}{size}." for one, size in zip(doubts, sizes, strict=True))


def _saves(case: Case, findings: list[Finding]) -> str:
    known = [one for one in findings if not one.tokens or one.id in case.assigned]
    reasons = [finding for finding in known if finding.severity != NOTE and finding.headline]
    # The sentence is about prompts: what explains lost prompt tokens is the better reason.
    reasons.sort(key=lambda finding: 0 if _explains_prompts(case, finding)
                 else 1 if finding.id not in case.assigned and finding.severity == FAULT else 2)  # fmt: skip
    why = reasons[0].headline if reasons else ""
    lost = case.whole.prompts.get(not_saved(reasons[0].id), 0) if reasons else 0
    if not case.requests and not why:
        why = next((one.line for one in case.run.start_failures), "")
    if any(one.id == NOT_STARTED for one in findings):
        return f"{sentence(why)}."
    if not case.run.engines and any(one.id == NO_CONNECTOR for one in findings):
        return f"The engine did not start{_because(why)}."
    if not case.run.engines:
        return f"No engine was seen in this run{_because(why)}."
    if not case.requests:
        return f"No request reached an engine in this run{_because(why)}."
    if all(engine.keeps_no_kv for engine in case.run.engines):
        return f"{sentence(NO_KV)}."
    partly = any(one.tokens for one in case.run.kept)
    reused = bool(case.run.total and not case.assigned)
    prompts = prompt_tokens(case)
    few = lost if lost < sum(prompts.lost.values()) else 0  # then it is no reason for all of them
    if few:
        why += _most(case, reasons)
    everywhere = " in every layer on every rank" if partly else ""
    ended = {end for row in case.run.load_rows for end, amount in row.ends.items() if amount}
    back = _NOT_AS_THEY_WERE if ended & _AMISS else ""
    return _tokens(prompts, why, reused, everywhere, few, back)


def _most(case: Case, reasons: list[Finding]) -> str:
    """The reason of most of what was not saved, where it is not the first one."""
    of = {one.id: case.whole.prompts.get(not_saved(one.id), 0) for one in reasons}
    most = max(reasons, key=lambda one: of[one.id])
    return f"; {count(of[most.id])} of them: {most.headline}" if of[most.id] > of[reasons[0].id] else ""


def _explains_prompts(case: Case, finding: Finding) -> bool:
    return finding.id in case.assigned and any(case.assigned[finding.id].of_prompts.values())


_AT_REST = (Grade.PROVED, Grade.WRITTEN)
_AS = (
    ((Grade.READ,), "read by the connector", ", and whether they come back is not known"),
    ((Grade.DECLARED, Grade.NOT_OBSERVED), "announced for saving", ", and no more was seen of them"),
)
"""What saved tokens are called that were not seen to leave, by how well it is seen that they were."""
_NOT_AS_THEY_WERE = ", and are not known to come back as they were"
_AMISS = frozenset({LoadEnd.WRONG, LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY, LoadEnd.FAILED})


def _named(prompts: Prompts, back: str = "") -> list[tuple[float, str, str]]:
    """Saved tokens, what they are called, and a note: the best seen first. ``back``: the note, where a load
    brought other KV, or none."""
    sent = sum(prompts.sent.values())
    stored = sum(prompts.saved.get(grade, 0.0) for grade in _AT_REST)
    unseen = f" ({measured.kept_unseen(prompts.sent).removeprefix('and ')})"
    found = [(stored, "stored", ""), (sent, f"sent to {measured.peers(prompts.sent)}", unseen)]
    for of, words, note in _AS:
        amount = sum(prompts.saved.get(grade, 0.0) for grade in of) - (sent if Grade.READ in of else 0.0)
        found.append((amount, words, back if back and Grade.READ in of else note))
    return [one for one in found if one[0] >= 1]


def _tokens(
    prompts: Prompts, why: str, reused: bool, everywhere: str = "", few: int = 0, back: str = ""
) -> str:
    """The sentence for what became of the prompt tokens; no "all" and no "none" where some are not
    observed. ``few``: why so many of those that were not saved were not; 0: why all were not."""
    whole = prompts.known + prompts.unseen + prompts.pending
    if whole < 1:
        if reused:
            return "No prompt token was computed here that could be saved: all were reused or loaded."
        return f"No prompt KV was computed here{_because(why)}."
    saved = _named(prompts, back)
    lost = sum(prompts.lost.values())
    tokens = f"{plural(whole, 'prompt token')} computed here"
    known = prompts.unseen + prompts.pending < 1
    if known and not saved:
        return f"None of the {tokens} was saved{everywhere}{_by_metadata(prompts, lost)}{_because(why, few)}."
    if known and lost < 1 and len(saved) == 1:
        _, words, note = saved[0]
        return f"All {tokens} were {words}{note}{'; ' + why if why else ''}."
    if not saved and lost < 1 and prompts.pending < 1:
        return f"It is not known whether the {tokens} were saved{'; ' + why if why else ''}."
    parts = [f"{_were(n)} {words}{note}" for n, words, note in saved]
    if saved:
        n, words, note = saved[0]
        parts[0] = f"{count(n)} of {tokens} ({percent(n, whole)}) were {words}{note}"
    if prompts.unseen >= 1:
        parts.append(f"of {count(prompts.unseen)} it is not known")
    if prompts.pending >= 1:
        parts.append(f"{_were(prompts.pending)} on their way when the trace ended")
    if lost >= 1:
        parts.append(f"{_were(lost)} not saved{_by_metadata(prompts, lost)}{_because(why, few)}")
    elif why:
        parts.append(why)
    return ("" if saved else f"Of {tokens}, ") + "; ".join(parts) + "."


def _by_metadata(prompts: Prompts, lost: float) -> str:
    """Says where the metadata alone tells that tokens were not saved."""
    if prompts.declared < 1:
        return ""
    which = "" if prompts.declared >= lost else f"{count(prompts.declared)} of them "
    return f" ({which}going by the connector's metadata alone)"


def _were(tokens: float) -> str:
    number = count(tokens)
    return f"{number} {'was' if number == '1' else 'were'}"


def _because(why: str, few: int = 0) -> str:
    which = f", {count(few)} of them" if few else ""
    return f"{which}: {why.rstrip('.')}" if why else ""  # vLLM's own messages end in one
