"""Scores kvtrace's answers on generated connectors against what is true of them. No files, no engine.

Two columns: *passive*, what a report says of a traced run, and *verify*, which properties fail where what was
stored is asked for again. A fault that shows only in what comes back (``return-only``) is verify's: there the
right passive answer is no fault, and no number above grade ``read`` for what is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.catalogue import PLACES, Fault

RIGHT, SECOND, WRONG, SILENT, FALSE_ALARM = "right", "second", "wrong", "silent", "false_alarm"
VERDICTS = (RIGHT, SECOND, WRONG, SILENT, FALSE_ALARM)
NONE = "none"

FAILED = "failed"
"""The answer of verify that says that a property does not hold."""

PROVED_GRADES = ("proved",)
"""Grades that say that a token's KV is there and right."""

AT_REST_GRADES = (*PROVED_GRADES, "written")
"""Grades that say that a token's KV came to rest: as many bytes must be there at the end, also where they are
spoilt or under a wrong name, which only ``proved`` denies; but for what the report says was only
sent (``ledger.saves.sent``): that left for a peer whose keeping the report does not vouch for. It must have
been taken from the KV cache, as what is read, and where it is not at rest a note counts the run."""

TAKEN_GRADES = (*AT_REST_GRADES, "read")
"""Grades that say that a token's own KV was taken from the KV cache, wherever it went then."""

OBSERVED_TRUST = ("measured", "mixed")
"""What a report without grades says of numbers that are not the connector's own word alone."""


@dataclass(frozen=True)
class Claims:
    """What a report says of saved tokens, in token-layers.

    Attributes:
        observed: whether it rests on more than the connector's own word.
        proved: said to be there and right; None where the report knows no grades.
        resting: said to be at rest; None where the report knows no grades.
        sent: said to have left for a peer, and no more: part of ``taken``, not of ``resting``.
        taken: said to be saved, seen at least while they were read.
        by_request: the same of each request: request -> (proved, resting, taken), None where a grade is not
            said.
        total, not_observed: of the ledger of saves.
    """

    observed: bool
    resting: int | None
    taken: int
    by_request: Mapping[str, tuple[int | None, int | None, int]]
    total: int
    not_observed: int
    sent: int = 0
    proved: int | None = None


@dataclass(frozen=True)
class Scored:
    """One run's score.

    Attributes:
        fault: name of what was planted; "" where nothing was.
        choice: name of the deliberate choice of a healthy connector; "" for none.
        shows: where the fault shows without verify; "" for a healthy one.
        verify: verdict of the verify column; "" where it was not run, or nothing has to fail.
        failed: properties that verify says fail, in order.
        first: id of the finding that counts; "none".
        findings: ids of all findings, in order.
        wrong_number: what the report calls saved and is not, judged by what its grade says, in words; "".
        not_resting: what it calls saved and is not at rest, whatever its grade says.
        not_kept: what it says was sent, or is at rest, and is not at rest, in words; "".
        declared_number: the same where the report says that the number is the connector's own word.
        ruled_out: ids among the rule-outs that would have been right as the finding.
    """

    seed: int
    fault: str
    verdict: str
    first: str
    findings: tuple[str, ...]
    wrong_number: str = ""
    not_resting: str = ""
    declared_number: str = ""
    not_kept: str = ""
    total: int = 0
    not_observed: int = 0
    ruled_out: tuple[str, ...] = ()
    choice: str = ""
    shows: str = ""
    verify: str = ""
    failed: tuple[str, ...] = ()


_BY_RETURN = frozenset({"kv-load-wrong"})
"""What plain traffic shows of KV that comes back other than it was, where a prompt comes twice."""


def verdict(fault: Fault | None, findings: Sequence[Mapping[str, Any]], shows: str = "") -> tuple[str, str]:
    """The verdict and the finding that counts for it (or, with its severity, the first that does not).

    ``shows``: where the fault shows without verify; the place that the catalogue gives it by default.
    """
    faults = [str(f["id"]) for f in findings if f["severity"] == "fault"]
    everything = [str(f["id"]) for f in findings]
    if fault is None:
        return (FALSE_ALARM, faults[0]) if faults else (RIGHT, NONE)
    if (shows or fault.shows) == "return-only":
        first = faults[0] if faults else NONE
        true = fault.right | (_BY_RETURN if "returns-equal" in fault.breaks else frozenset())
        return (RIGHT if not faults or first in true else WRONG), first
    if fault.grade == "limit" and faults:
        return FALSE_ALARM, faults[0]
    counting = faults if fault.grade == "fault" else everything
    first = counting[0] if counting else NONE
    if not counting and everything:
        first = f"{everything[0]} ({findings[0]['severity']})"
    if first in fault.right:
        return RIGHT, first
    if fault.right.intersection(everything):
        return SECOND, first
    return (WRONG, first) if faults or (fault.grade != "fault" and everything) else (SILENT, first)


def verify_verdict(
    fault: Fault | None,
    answers: Mapping[str, str] | None,
    unpromised: frozenset[str],
    breaks: frozenset[str],
) -> tuple[str, tuple[str, ...]]:
    """The verdict of the verify column, and what fails.

    Args:
        answers: of each property; None where verify was not run.
        unpromised: properties that such a connector, sound, does not promise.
        breaks: properties of which the fault breaks one (``Plan.breaks``); none: nothing has to fail.
    """
    if answers is None:
        return "", ()
    failed = tuple(name for name, answer in answers.items() if answer == FAILED)
    if fault is None or fault.grade == "limit":
        return (FALSE_ALARM if set(failed) - unpromised else RIGHT), failed
    if not breaks:
        return "", failed
    if breaks.intersection(failed):
        return RIGHT, failed
    return (WRONG if failed else SILENT), failed


def claims(report: Mapping[str, Any], layers: int) -> Claims:
    """What a report says is saved, of a model of so many layers."""
    saves = report["ledger"]["saves"]
    accounts: Mapping[str, int] = saves["accounts"]
    grades: Mapping[str, int] | None = saves.get("grades", {}).get("saved")
    sent = sum(int(one["amount"]) for one in saves.get("sent", ()))
    if grades is None and "grades" in saves:
        grades = {}
    proved = None
    if grades is None:
        observed, resting = saves.get("trust") in OBSERVED_TRUST, None
        taken = accounts.get("saved", 0)
    else:
        observed, resting = True, _of(grades, AT_REST_GRADES)
        proved = _of(grades, PROVED_GRADES)
        taken = _of(grades, TAKEN_GRADES)
    listed = report["requests"]["rows"]
    if grades is not None and _of(grades, tuple(grades)) > taken:
        # a request's number without grades may be the connector's own word
        listed = [row for row in listed if "grades" in row]
    rows = {str(row["id"]): _row(row, layers) for row in listed}
    unseen = sum(n for name, n in accounts.items() if name.split(":")[0] == "not-observed")
    return Claims(observed, resting, int(taken), rows, int(saves["total"]), int(unseen), sent, proved)


def _of(grades: Mapping[str, float], names: Sequence[str]) -> int:
    return round(sum(grades.get(name, 0) for name in names))


def _row(row: Mapping[str, Any], layers: int) -> tuple[int | None, int | None, int]:
    """A request's tokens (averages over layers) as token-layers."""
    grades = row.get("grades")
    if grades is None:
        return None, None, round(float(row.get("saved") or 0) * layers)
    proved, resting, taken = (
        round(sum(float(grades.get(name, 0)) for name in names) * layers)
        for names in (PROVED_GRADES, AT_REST_GRADES, TAKEN_GRADES)
    )
    return proved, resting, taken


def wrong_number(claimed: Claims, truth: Mapping[str, Any], strict: bool = False) -> str:
    """How a saved number exceeds what its grade says of it; "" where none does. Exact to the token-layer.

    ``strict``: whatever is called saved must be at rest.
    """
    layers = int(truth["layers"])
    right = {request["id"]: int(request["claimable"]) for request in truth["requests"]}
    resting = {request["id"]: _ceiling(request, "written") for request in truth["requests"]}
    taken = {request["id"]: _ceiling(request, "taken") for request in truth["requests"]}
    if strict:
        taken = resting = right
    word = "at rest" if strict else "taken"
    if claimed.resting is None:
        taken, word = right, "at rest"
    elif claimed.resting > sum(resting.values()):
        return f"{claimed.resting} token-layers said to be at rest, {sum(resting.values())} are"
    if (claimed.proved or 0) > sum(right.values()):
        return f"{claimed.proved} token-layers said to be proved, {sum(right.values())} are right"
    if claimed.taken > sum(taken.values()):
        return f"{claimed.taken} token-layers called saved, {sum(taken.values())} {word}"
    for name, said in claimed.by_request.items():
        told = ("proved", "said to be at rest", "called saved")
        true = (right.get(name, 0), resting.get(name, 0), taken.get(name, 0))
        for one, what, most in zip(said, told, true, strict=True):
            if one is not None and one > most:
                end = f" {word}" if what == "called saved" else " are"
                return f"{name}: {one / layers:g} tokens {what}, {most / layers:g}{end}"
    return ""


def _ceiling(request: Mapping[str, Any], name: str) -> int:
    """What may be said of a request at most; a truth that does not know it knows what is at rest."""
    return max(int(request["claimable"]), int(request.get(name, 0)))


def score(
    seed: int,
    fault: Fault | None,
    report: Mapping[str, Any] | None,
    truth: Mapping[str, Any],
    shows: str = "",
    verified: tuple[str, tuple[str, ...]] = ("", ()),
) -> Scored:
    """Scores one run. A report that could not be made is a wrong answer.

    Args:
        shows: where the fault shows in this run; the place that the catalogue gives it by default.
        verified: of ``verify_verdict``.
    """
    name, choice = fault.name if fault is not None else "", str(truth.get("choice", ""))
    place = (shows or fault.shows) if fault is not None else ""
    if report is None:
        said = WRONG if fault else FALSE_ALARM
        return Scored(seed, name, said, "no report", (), "", "", "", "", 0, 0, (), choice, place, *verified)
    said, first = verdict(fault, report["findings"], place)
    claimed = claims(report, int(truth["layers"]))
    wrong, strict = wrong_number(claimed, truth), wrong_number(claimed, truth, strict=True)
    return Scored(
        seed,
        name,
        said,
        first,
        tuple(str(f["id"]) for f in report["findings"]),
        wrong if claimed.observed else "",
        strict if claimed.observed else "",
        "" if claimed.observed else wrong,
        _not_kept(claimed, truth),
        claimed.total,
        claimed.not_observed,
        _denied(fault, report),
        choice,
        place,
        *verified,
    )


def _not_kept(claimed: Claims, truth: Mapping[str, Any]) -> str:
    """How what was sent, or is at rest, exceeds what is at rest; "" where nothing was sent."""
    resting = sum(int(request["claimable"]) for request in truth["requests"])
    said = (claimed.resting or 0) + claimed.sent
    over = claimed.sent and said > resting
    return f"{said} token-layers said to be sent or at rest, {resting} are at rest" if over else ""


def _denied(fault: Fault | None, report: Mapping[str, Any]) -> tuple[str, ...]:
    """Rule-outs of what was planted."""
    right = fault.right if fault is not None else frozenset()
    return tuple(sorted({str(one["id"]) for one in report["ruled_out"]} & right))


def _group(one: Scored) -> tuple[str, str]:
    if one.fault:
        return one.fault, one.shows
    return ("(healthy)", "") if not one.choice else (f"(choice) {one.choice}", "")


def table(scores: Iterable[Scored]) -> list[str]:
    """The confusion table: a line for each fault (and place where it shows) and each choice, with what was
    found first, and in the last but one column how many verify judged right of those that it has to judge."""
    groups: dict[tuple[str, str], list[Scored]] = {}
    for one in scores:
        groups.setdefault(_group(one), []).append(one)
    layout = "{:<31}{:<12}{:>5}{:>6}{:>7}{:>6}{:>7}{:>12}{:>8}{:>8}  {}"
    lines = [layout.format("fault", "shows in", "runs", *VERDICTS, "numbers", "verify", "first findings")]
    for (name, place), group in sorted(groups.items()):
        firsts = Counter(one.first for one in group)
        found = ", ".join(f"{ident} {n}" if n > 1 else ident for ident, n in firsts.most_common())
        lines.append(layout.format(name, place or "-", len(group), *_cells(group), found))
    return lines


def _cells(group: Sequence[Scored]) -> list[str]:
    counts = Counter(one.verdict for one in group)
    numbers = sum(bool(one.wrong_number) for one in group)
    return [str(n) if n else "." for n in (*(counts[v] for v in VERDICTS), numbers)] + [verify_share(group)]


def verify_share(scores: Iterable[Scored]) -> str:
    """How many verify judged right, of those that it has to judge; "-" where there are none."""
    judged = [one.verify for one in scores if one.verify]
    return f"{judged.count(RIGHT)}/{len(judged)}" if judged else "-"


def places(scores: Sequence[Scored]) -> list[str]:
    """The scores by the place where what was planted shows without verify."""
    layout = "{:<31}{:>5}{:>6}{:>7}{:>6}{:>7}{:>12}{:>8}{:>8}"
    groups = {
        **{f"shows in: {place}": [s for s in scores if s.fault and s.shows == place] for place in PLACES},
        "healthy": [s for s in scores if not s.fault and not s.choice],
        "healthy, a deliberate choice": [s for s in scores if s.choice],
    }
    lines = [layout.format("", "runs", *VERDICTS, "numbers", "verify")]
    lines += [layout.format(name, len(group), *_cells(group)) for name, group in groups.items() if group]
    if not any(one.verify or one.failed for one in scores):
        lines.append("verify: not run")
    return lines


def not_kept(scores: Iterable[Scored]) -> list[Scored]:
    """Runs of which a report says, truly, that KV was sent to a server, which does not keep it all."""
    return [one for one in scores if one.not_kept and not one.wrong_number]


def notes(scores: Sequence[Scored]) -> list[str]:
    """What the last line has no room for."""
    total, unseen = sum(s.total for s in scores), sum(s.not_observed for s in scores)
    declared = sum(bool(s.declared_number) for s in scores)
    unrest = sum(bool(s.not_resting) and not s.wrong_number for s in scores)
    share = f"{unseen / total:.1%}" if total else "0 %"
    denied = [f"{one.seed} {ident}" for one in scores for ident in one.ruled_out]
    return [
        f"not observed: {share} of all token-layers",
        f"numbers that are true of what was read or sent, and above what is at rest: {unrest} runs",
        f"of these, said to be sent to a server, which does not keep all of it: {len(not_kept(scores))} runs",
        f"numbers that a report calls the connector's own word, and that are wrong: {declared} runs",
        f"rule-outs of a cause that would have been right: {', '.join(denied) or 'none'}",
    ]


def last_line(scores: Sequence[Scored]) -> str:
    counts = Counter(one.verdict for one in scores)
    numbers = sum(bool(one.wrong_number) for one in scores)
    cells = " ".join(f"{name}={counts[name]}" for name in VERDICTS)
    return f"accuracy: runs={len(scores)} {cells} wrong_numbers={numbers}"
