"""The picture of ``kvtrace top``: from a snapshot to the lines of one screen. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtrace.live.look import ProcessLook, Snapshot
from kvtrace.render.answers import outcomes
from kvtrace.render.layout import bar
from kvtrace.render.report import SEVERITY_STYLES, outcome_label
from kvtrace.render.styled import Styled, cell_len
from kvtrace.render.terminal import STYLES
from kvtrace.terms import severity_word
from kvtrace.trace.stuck_file import STEP
from kvtrace.words import clean, count, duration, percent, plural

if TYPE_CHECKING:
    from kvtrace.report.model import LedgerRow

WIDTH, HEIGHT = 80, 24
SLOW_S = 1.0
"""A step that is open for longer is shown."""
_STATES = {
    "running": ("running", "green"),
    "ended": ("ended", "bold"),
    "lost": ("no process of it is here, and its end is not recorded", "yellow"),
}
# The parts in their order, and the lines that each has at least, its heading included.
_LEAST = {"open": 2, "tokens": 4, "hooks": 4, "processes": 4, "findings": 3}
_FIXED = 3  # two lines of the head, and the foot


def picture(look: Snapshot, width: int = WIDTH, height: int = HEIGHT) -> list[Styled]:
    """At most `height` lines of at most `width` cells: never more, whatever the run holds."""
    width, height = max(width, 20), max(height, 2)
    parts = {
        "open": list(_open_hooks(look)),
        "tokens": list(_tokens(look)),
        "hooks": list(_hooks(look)),
        "processes": list(_processes(look)),
        "findings": list(_findings(look)),
    }
    room = _room({name: len(lines) for name, lines in parts.items()}, height - _FIXED)
    body = [line for name in _LEAST for line in _cut(parts[name], room[name])]
    lines = [*_head(look), *body][: height - 1]
    return [_fitted(line, width) for line in [*lines, _foot(look)]]


def _room(wanted: dict[str, int], lines: int) -> dict[str, int]:
    """Lines for each part: what it wants where all fit, else its least and a share of what is left."""
    given = {name: min(wanted[name], _LEAST[name]) for name in wanted}
    while sum(given.values()) > max(lines, 0):  # a very low screen: the last parts go first
        name = next(name for name in reversed(_LEAST) if given[name])
        given[name] -= 1
    left = lines - sum(given.values())
    while left > 0 and (hungry := [name for name in _LEAST if given[name] < wanted[name]]):
        for name in hungry[:left]:
            given[name] += 1
        left -= len(hungry[:left])
    return given


def _cut(lines: list[Styled], most: int) -> list[Styled]:
    """So many lines; the last one says how many are left out."""
    if len(lines) <= most:
        return lines
    if most < 2:
        return lines[:most]
    return [*lines[: most - 1], Styled(f"  … {len(lines) - most + 1} more", "dim")]


def _fitted(line: Styled, width: int) -> Styled:
    if cell_len(line.text) <= width:
        return line
    text = line.text
    while cell_len(text) > width - 1:
        text = text[:-1]
    cut = Styled(f"{text}…")
    cut.spans = line.spans
    return cut


# ------------------------------------------------------------------------------ the head


def _head(look: Snapshot) -> Iterator[Styled]:
    words, style = _STATES[look.state]
    line = Styled(clean(look.run, 30), "bold")
    line.append(" · ")
    line.append(words, style)
    if look.seconds is not None and look.state != "lost":
        line.append(f" · {duration(look.seconds)}")
    run = look.analysis.report["run"] if look.analysis else None
    for engine in run["engines"][:1] if run else []:
        connector = engine["connector"]
        line.append(f" · vLLM {clean(run['vllm'], 20)}" if run and run["vllm"] else "")
        name = clean(connector["class"] or connector["name"], 40) if connector else ""
        line.append(f" · {name}" if name else " · no KV connector")
    yield line
    rate = "" if look.steps_per_s is None else f" ({look.steps_per_s:.1f}/s)"
    facts = [
        f"{plural(look.steps, 'step')}{rate}",
        f"{plural(look.arrived, 'request')}, {count(look.unfinished)} not finished",
        *([plural(look.preempted, "preemption")] if look.preempted else []),
        f"{plural(look.records, 'record')}",
    ]
    yield Styled(" · ".join(facts))


def _foot(look: Snapshot) -> Styled:
    ends = (
        "s: stacks now · q ends"
        if look.state == "running"
        else f"kvtrace explain {clean(look.directory, 60)}"
    )
    if look.notice:
        return Styled(clean(look.notice, 300), "bold")
    if look.problem:
        return Styled(clean(look.problem, 300), "yellow")
    if look.analysis is None:
        return Styled(f"the ledger is being made · {ends}", "dim")
    one = look.analysis
    made = (
        f"ledger and findings: as of {duration(max(one.made_s, 0.0))} ago" if one.made_s >= 1 else "up to now"
    )
    return Styled(f"{made} · {ends}", "dim")


# ------------------------------------------------------------------------------ the parts


def _tokens(look: Snapshot) -> Iterator[Styled]:
    if look.analysis is None:
        return
    saves, loads = (look.analysis.report["ledger"][name] for name in ("saves", "loads"))
    yield Styled(f"{'Tokens':<43}{'tokens':>12}{'share':>9}   grade", "bold")
    yield from _outcomes(saves, "no token was computed yet")
    if loads["total"] > 0:
        yield Styled("Loads", "bold")
        yield from _outcomes(loads, "")


def _outcomes(ledger: LedgerRow, nothing: str) -> Iterator[Styled]:
    if ledger["total"] <= 0 and nothing:
        yield Styled(f"  {nothing}", "dim")
    for name, tokens, share, grade in outcomes(ledger):
        line = Styled(f"  {clean(outcome_label(name), 40):<41}", "red" if ":" in name else "")
        line.append(f"{count(tokens):>12}{percent(share):>9}   ")
        line.append(f"{grade:<9}", "dim")
        line.append(bar(share, 4), "cyan")
        yield line


def _open_hooks(look: Snapshot) -> Iterator[Styled]:
    if not look.open_hooks:
        return
    yield Styled(f"{'Open hooks':<38}{'at least':>10}{'at most':>10}   in", "bold")
    for one in look.open_hooks:
        what = "a step, in no hook" if one.what == STEP else one.what
        line = Styled("  ")
        line.append(f"{clean(f'{what} · {one.process} (pid {one.pid})', 35):<36}", "bold red")
        line.append(f"{duration(one.least_s):>10}{duration(one.most_s):>10}   {clean(one.call, 80)}")
        yield line


def _hooks(look: Snapshot) -> Iterator[Styled]:
    if not look.hooks:
        return
    yield Styled(
        f"{'Hooks, most time first':<38}{'calls':>9}{'mean':>10}{'longest':>10}{'total':>10}", "bold"
    )
    for name, times in sorted(look.hooks.items(), key=lambda item: -item[1].total_ns):
        mean = times.total_ns / times.calls / 1e9 if times.calls else 0.0
        numbers = (duration(mean), duration(times.longest_ns / 1e9), duration(times.total_ns / 1e9))
        line = Styled(
            f"  {clean(name, 34):<36}{count(times.calls):>9}" + "".join(f"{n:>10}" for n in numbers)
        )
        if times.raised:
            line.append(f" {count(times.raised)} raised", "bold red")
        yield line


def _processes(look: Snapshot) -> Iterator[Styled]:
    if not look.processes:
        return
    yield Styled(f"{'Processes, open steps first':<38}{'last record':>16}   open step", "bold")
    for one in sorted(look.processes, key=lambda one: -(one.open_s or 0.0)):
        silent = "" if one.silent_s is None else f"{duration(one.silent_s)} ago"
        line = Styled(f"  {clean(f'{one.name} (pid {one.pid})', 34):<36}")
        line.append(
            "recording ended" if one.stopped else f"{silent or 'none yet':>16}", "dim" if one.stopped else ""
        )
        said, style = _open(one, look.state == "running")
        line.append(f"   {said}" if said else "", style)
        yield line


def _open(one: ProcessLook, running: bool) -> tuple[str, str]:
    if one.open_step is None:
        return "", ""
    if not running:
        return f"step {one.open_step} did not end", "yellow"
    if one.open_s is None or one.open_s < SLOW_S:
        return "", ""
    more = f" and {one.open_steps - 1} more" if one.open_steps > 1 else ""
    return f"{one.open_step}{more}, {duration(one.open_s)}", "bold yellow"


def _findings(look: Snapshot) -> Iterator[Styled]:
    if look.analysis is None:
        return
    found = look.analysis.report["findings"]
    yield Styled(
        f"Findings so far: {len(found)}" if look.state == "running" else f"Findings: {len(found)}", "bold"
    )
    for one in found:
        line = Styled("  ")
        line.append(f"{severity_word(one['severity']):<7}", STYLES[SEVERITY_STYLES[one["severity"]]])
        line.append(clean(one["id"], 40), "bold")
        line.append(f" {percent(one['share'])}" if one["share"] > 0 else "")
        line.append(f"  {clean(one['title'], 200)}", "dim")
        yield line
