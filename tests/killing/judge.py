"""Holds what kvtrace made of a run that was cut short against what the connector wrote down itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from killing.kinds import Seen, explain
from killing.twins import Ends
from kvtrace.report.build import build_report
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import STEP_MASK, Flag, Kind
from kvtrace.trace.reader import Spool, spool_paths

_ENDED = (
    "(the command was ended by SIG|the command ended with exit code|had not ended when the recording did)"
)
_WORDS = {
    "launcher": "still running|the run's end is not recorded",
    "disk-full": r"recording is incomplete .*a write failed \(disk full, quota\)",
}
"""What ``explain`` must say of a run that was cut short so; of the others that requests had not ended."""


@dataclass
class Log:
    """Of one process, by its own word: ``saved`` is the tokens of each call, by (step, layer)."""

    saved: dict[tuple[int, str], list[tuple[str, int, int]]] = field(default_factory=dict)
    built: set[int] = field(default_factory=set)


@dataclass
class Recorded:
    """Of one process, by kvtrace's: the calls of both hooks, and the requests that came and ended. ``saved``:
    those that came back. One that a signal broke off may have a line in the log or none."""

    saved: set[tuple[int, str]] = field(default_factory=set)
    built: int = 0
    open: set[str] = field(default_factory=set)


def said(code: int | None) -> str:
    """An end in words."""
    return f"exit code {code}" if code is not None else "does not end"


def read_log(path: Path) -> Log:
    """Whole lines of a connector's log."""
    log = Log()
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        what, step, *rest = line.split()
        if what == "meta":
            log.built.add(int(step))
        else:
            saves = [one.rsplit(":", 2) for one in rest[1:]]
            log.saved[int(step), rest[0]] = [(name, int(start), int(end)) for name, start, end in saves]
    return log


def read_spool(path: Path) -> tuple[int, Recorded]:
    """The process that wrote it, and what it recorded."""
    spool, found = Spool(path), Recorded()
    tables = [chunk for chunk in spool.chunks() if len(chunk)]
    table = np.concatenate(tables) if tables else np.empty((0, 8), np.int64)
    call = rows.of_kind(rows.HookCall, table)
    codes, steps = rows.code(call.head), call.step & STEP_MASK
    saves = (codes == hooks.SAVE_LAYER.code) & (rows.flags(call.head) & Flag.RAISED == 0)
    found.saved = {
        (int(step), spool.names[int(layer)])
        for step, layer in zip(steps[saves], call.layer[saves], strict=True)
        if step
    }
    found.built = int(np.count_nonzero(codes == hooks.BUILD_METADATA.code))
    came, gone = rows.of_kind(rows.Arrival, table), rows.of_kind(rows.Finish, table)
    found.open = {spool.names[int(one)] for one in set(came.request.tolist()) - set(gone.request.tolist())}
    assert not np.count_nonzero(rows.kind(table[:, 0]) == Kind.QUIET), "the run is small"
    return int(spool.header["pid"]), found


def problems(seen: Seen, answers: dict[int, list[int]], ends: Ends) -> list[str]:
    """What is wrong with a traced run. ``answers``: the tokens that each prompt gets untraced, to the end;
    ``ends``: the exit codes that untraced runs cut short in the same way have."""
    if seen.problems:
        return seen.problems
    return [
        *_of_the_outside(seen, answers, ends),
        *(_without_a_directory(seen) if "deleted" in seen.kinds else _of_the_recording(seen)),
    ]


def _of_the_outside(seen: Seen, answers: dict[int, list[int]], ends: Ends) -> Iterator[str]:
    """Exit codes, processes, tokens."""
    codes = seen.codes()
    if seen.setup.forks and (seen.code or len(codes) != len(seen.kinds)):
        yield f"exit code {seen.code}, forks {seen.ends}"
    for kind, code in codes:
        if code not in ends.get(kind, set()):
            untraced = ", ".join(sorted(said(one) for one in ends.get(kind, set())))
            yield f"{kind}: {said(code)}, untraced {untraced or 'not seen'}"
    if seen.left:
        yield f"left behind: {', '.join(seen.left)}"
    for prompt, tokens in seen.given:
        if tokens != answers[prompt][: len(tokens)]:
            yield f"prompt {prompt}: {tokens}, untraced {answers[prompt]}"


def _without_a_directory(seen: Seen) -> Iterator[str]:
    text = explain(seen.place)
    if not text.startswith("exit code 2: ") or "Traceback" in text:
        yield f"explain of a directory that was deleted: {text}"
    output = seen.place.output.read_text(errors="replace")
    if "was deleted" not in output or "loaded no plugin" in output:
        yield "run does not say that its directory was deleted"


def _of_the_recording(seen: Seen) -> Iterator[str]:
    logs = {int(path.name[4:]): read_log(path) for path in seen.place.store.glob("log-*")}
    spools = dict(read_spool(path) for path in spool_paths(seen.place.run))
    full = "disk-full" in seen.kinds
    for pid, log in logs.items():
        yield from _lost(pid, log, spools.get(pid, Recorded()), full)
    report: Any = build_report(seen.place.run)
    yield from _numbers(report, logs, spools)
    for finding in report["findings"]:
        if finding["severity"] == "fault":
            yield f"a fault that is none: {finding['id']}: {finding['title']}"
    text = explain(seen.place)
    if text.startswith("exit code"):
        yield f"explain: {text[:300]}"
    expected = [_WORDS[kind] for kind in seen.kinds if kind in _WORDS]
    if seen.code is None:  # kvtrace, too, was killed in the end
        expected.append(_WORDS["launcher"])
    if any(spool.open for spool in spools.values()):
        expected.append(_ENDED)
    for words in expected:
        if not re.search(words, text):
            yield f"explain does not say {words!r}"
    if "launcher" in seen.kinds and not re.search(_WORDS["launcher"], seen.live):
        yield f"explain of the run that still goes on: {seen.live[:300]}"


def _lost(pid: int, log: Log, spool: Recorded, full: bool) -> Iterator[str]:
    """At most the last step is lost, and nothing is invented; on a full disk it ends before."""
    invented = spool.saved - set(log.saved)
    if invented:
        yield f"process {pid}: recorded and not in the connector's log: {sorted(invented)[:4]}"
    missing = {step for step, _ in set(log.saved) - spool.saved}
    last = max((step for step, _ in log.saved), default=0)
    if not full and missing - {last}:
        yield f"process {pid}: steps {sorted(missing)} of {last} are lost"
    if full and missing and missing != set(range(min(missing), last + 1)) & {step for step, _ in log.saved}:
        yield f"process {pid}: steps in the middle are lost: {sorted(missing)} of {last}"
    if not full and not 0 <= len(log.built) - spool.built <= 1:
        yield f"process {pid}: {spool.built} of {len(log.built)} calls of build_connector_meta are recorded"


def _numbers(report: Any, logs: dict[int, Log], spools: dict[int, Recorded]) -> Iterator[str]:
    """Saved token-layers: not more than the connector wrote, not less than the whole steps that are there."""
    least = most = 0
    for pid, log in logs.items():
        spool = spools.get(pid, Recorded())
        last = max((step for step, _ in spool.saved), default=0)
        for (step, layer), saves in log.saved.items():
            tokens = sum(end - start for _, start, end in saves)
            most += tokens
            least += tokens if (step, layer) in spool.saved and step < last else 0
    saves = report["ledger"]["saves"]
    saved = saves["accounts"].get("saved", 0)
    if not least <= saved <= most:
        yield f"{saved} token-layers saved; the connector wrote {least} in whole steps, {most} in all"
    if sum(saves["accounts"].values()) != saves["total"]:
        yield f"the books do not balance: {saves['accounts']} of {saves['total']}"
