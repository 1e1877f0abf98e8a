"""Scores kvtrace's reports of generated connectors against what is true of them. No files, no engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.catalogue import Fault

GATE_RIGHT_SHARE: float | None = None
"""The least share of right first findings on faulty runs; None: nothing is asked of it."""

RIGHT, SECOND, WRONG, SILENT, FALSE_ALARM = "right", "second", "wrong", "silent", "false_alarm"
VERDICTS = (RIGHT, SECOND, WRONG, SILENT, FALSE_ALARM)
NONE = "none"

OBSERVED_GRADES = ("proved", "written", "read")
"""Grades at which a saved number must be true; a report without grades has a trust instead."""

OBSERVED_TRUST = ("measured", "mixed")


@dataclass(frozen=True)
class Claims:
    """Attributes:
    observed: whether the saved numbers rest on more than the connector's own word.
    saved: token-layers that the report calls saved.
    by_request: request -> tokens that it calls saved (the average over layers).
    total, not_observed: token-layers of the ledger of saves.
    """

    observed: bool
    saved: int
    by_request: Mapping[str, float]
    total: int
    not_observed: int


@dataclass(frozen=True)
class Scored:
    """One run's score.

    Attributes:
        fault: name of what was planted; "" where nothing was.
        first: id of the finding that counts; "none".
        findings: ids of all findings, in order.
        wrong_number: what the report calls saved and is not at rest, in words; "".
        declared_number: the same where the report says that the number is the connector's own word.
    """

    seed: int
    fault: str
    verdict: str
    first: str
    findings: tuple[str, ...]
    wrong_number: str = ""
    declared_number: str = ""
    total: int = 0
    not_observed: int = 0


def verdict(fault: Fault | None, findings: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The verdict and the finding that counts for it (or, with its severity, the first that does not)."""
    faults = [str(f["id"]) for f in findings if f["severity"] == "fault"]
    everything = [str(f["id"]) for f in findings]
    if fault is None:
        return (FALSE_ALARM, faults[0]) if faults else (RIGHT, NONE)
    counting = faults if fault.grade == "fault" else everything
    first = counting[0] if counting else NONE
    if not counting and everything:
        first = f"{everything[0]} ({findings[0]['severity']})"
    if first in fault.right:
        return RIGHT, first
    if fault.right.intersection(everything):
        return SECOND, first
    return (WRONG, first) if faults or (fault.grade != "fault" and everything) else (SILENT, first)


def claims(report: Mapping[str, Any]) -> Claims:
    """What a report says is saved."""
    saves = report["ledger"]["saves"]
    accounts: Mapping[str, int] = saves["accounts"]
    grades = saves.get("grades", {}).get("saved")
    if grades is None:
        observed = saves.get("trust") in OBSERVED_TRUST
        saved = accounts.get("saved", 0)
    else:
        observed = True
        saved = sum(grades.get(grade, 0) for grade in OBSERVED_GRADES)
    rows = {str(row["id"]): float(row.get("saved") or 0) for row in report["requests"]["rows"]}
    unseen = sum(n for name, n in accounts.items() if name.split(":")[0] == "not-observed")
    return Claims(observed, int(saved), rows, int(saves["total"]), int(unseen))


def wrong_number(claimed: Claims, truth: Mapping[str, Any]) -> str:
    """How a saved number exceeds what is at rest; "" where none does. Exact to the token-layer."""
    layers = int(truth["layers"])
    at_rest = {request["id"]: int(request["claimable"]) for request in truth["requests"]}
    if claimed.saved > sum(at_rest.values()):
        return f"{claimed.saved} token-layers called saved, {sum(at_rest.values())} at rest"
    for name, tokens in claimed.by_request.items():
        if round(tokens * layers) > at_rest.get(name, 0):
            return f"{name}: {tokens:g} tokens called saved, {at_rest.get(name, 0) / layers:g} at rest"
    return ""


def score(
    seed: int, fault: Fault | None, report: Mapping[str, Any] | None, truth: Mapping[str, Any]
) -> Scored:
    """Scores one run. A report that could not be made is a wrong answer."""
    name = fault.name if fault is not None else ""
    if report is None:
        return Scored(seed, name, WRONG if fault else FALSE_ALARM, "no report", ())
    said, first = verdict(fault, report["findings"])
    claimed = claims(report)
    wrong = wrong_number(claimed, truth)
    return Scored(
        seed,
        name,
        said,
        first,
        tuple(str(f["id"]) for f in report["findings"]),
        wrong if claimed.observed else "",
        "" if claimed.observed else wrong,
        claimed.total,
        claimed.not_observed,
    )


def table(scores: Iterable[Scored]) -> list[str]:
    """The confusion table: a line for each fault, with what was found first instead of it."""
    groups: dict[str, list[Scored]] = {}
    for one in scores:
        groups.setdefault(one.fault or "(healthy)", []).append(one)
    heads = ("fault", "runs", *VERDICTS, "numbers", "first findings")
    lines = ["{:<26}{:>5}{:>6}{:>7}{:>6}{:>7}{:>12}{:>8}  {}".format(*heads)]
    for name in sorted(groups):
        group = groups[name]
        counts = Counter(one.verdict for one in group)
        firsts = Counter(one.first for one in group)
        found = ", ".join(f"{ident} {n}" if n > 1 else ident for ident, n in firsts.most_common())
        numbers = sum(bool(one.wrong_number) for one in group)
        cells = [counts[v] or "." for v in VERDICTS]
        lines.append(
            "{:<26}{:>5}{:>6}{:>7}{:>6}{:>7}{:>12}{:>8}  {}".format(
                name, len(group), *cells, numbers or ".", found
            )
        )
    return lines


def notes(scores: Sequence[Scored]) -> list[str]:
    """What the last line has no room for."""
    total, unseen = sum(s.total for s in scores), sum(s.not_observed for s in scores)
    declared = sum(bool(s.declared_number) for s in scores)
    share = f"{unseen / total:.1%}" if total else "0 %"
    return [
        f"not observed: {share} of all token-layers",
        f"numbers that a report calls the connector's own word, and that are wrong: {declared} runs",
    ]


def last_line(scores: Sequence[Scored]) -> str:
    counts = Counter(one.verdict for one in scores)
    numbers = sum(bool(one.wrong_number) for one in scores)
    cells = " ".join(f"{name}={counts[name]}" for name in VERDICTS)
    return f"accuracy: runs={len(scores)} {cells} wrong_numbers={numbers}"
