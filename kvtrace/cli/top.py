"""``kvtrace top``: a run while it goes on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import typer

from kvtrace.cli.output import NO_COLOR, emit, screen

if TYPE_CHECKING:
    from kvtrace.live.look import Snapshot
    from kvtrace.live.watch import LiveRun


_NOTICE_SECONDS = 10.0


def top(
    run: str | None = typer.Argument(
        None, metavar="[RUN]", help="A run directory of kvtrace run. [default: the newest one in reports/]"
    ),
    every: float = typer.Option(
        1.0, "--every", metavar="SECONDS", min=0.1, help="Time between two pictures."
    ),
    once: bool = typer.Option(False, "--once", help="Print one picture and end."),
    no_color: bool = NO_COLOR,
) -> None:
    """Show a run while it goes on.

    Steps, requests, tokens, hooks, open hooks and steps, findings so far. q or Ctrl-C ends it; it ends by
    itself with the run, and the last picture stays. Only files are read. s asks kvtrace run to look at
    where all processes stand.
    """
    from kvtrace.live.watch import LiveRun, find_run
    from kvtrace.merge.one_run import one_run

    if run is not None:
        one_run(run, "top")
    watch = LiveRun(find_run(run))
    if not once and sys.stdout.isatty():
        try:
            _follow(watch, every, screen(no_color).colours is not None)
        except KeyboardInterrupt:
            return
    emit(_text(watch.look(wait=True), no_color))


def _text(look: Snapshot, no_color: bool) -> str:
    from kvtrace.render.live import HEIGHT, picture

    here = screen(no_color)
    height = get_terminal_size().lines - 1 if sys.stdout.isatty() else HEIGHT
    lines = picture(look, here.width, height)
    return "".join(f"{line.coloured() if here.colours else line.plain()}\n" for line in lines)


def _follow(watch: LiveRun, every: float, colours: bool) -> None:
    """Pictures until the run or somebody ends it.

    Raises:
        KeyboardInterrupt: somebody did.
    """
    from kvtrace.cli.terminal_screen import drawn, taken_over
    from kvtrace.render.live import picture

    notice, pictures = "", 0
    with taken_over() as keys:
        while True:
            look = watch.look()
            if look.settled:
                return
            if pictures:
                look, pictures = replace(look, notice=notice), pictures - 1
            sys.stdout.write(drawn(picture(look, *get_terminal_size()), colours))
            sys.stdout.flush()
            asked = keys.asked(every)
            if asked == "end":
                raise KeyboardInterrupt
            if asked == "stacks":
                notice, pictures = _ask_for_stacks(watch.run_dir), max(1, round(_NOTICE_SECONDS / every))


def _ask_for_stacks(run_dir: Path) -> str:
    """Ask kvtrace run for a look at all processes; what to tell of it."""
    from kvtrace.trace.stuck_file import ASK_FILE, STUCK_FILE

    try:
        (run_dir / ASK_FILE).touch(mode=0o600)
    except OSError as error:
        return f"cannot ask for the stacks: {error.strerror or error}"
    return f"kvtrace run looks at all processes, twice, 5 s apart: {STUCK_FILE} has the stacks"
