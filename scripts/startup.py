#!/usr/bin/env python3
"""How long kvtrace takes to answer, measured beside an empty Python.

    python scripts/startup.py [--rounds N]

Each round runs `python -c pass` and each command, in turn, with compiled modules as an installed package has
them (in a folder of their own: nothing is written into the checkout). Printed are the least and the median
processor time of each (a busy machine changes these less than the time on the wall), and their ratio to the
empty Python's. tests/cli/test_quick.py holds what is loaded; the times are the machine's, and not tested.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = str(ROOT / "reports" / "demo" / "report.json")
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "kvtrace --version": ["-m", "kvtrace", "--version"],
    "kvtrace --help": ["-m", "kvtrace", "--help"],
    "kvtrace explain --help": ["-m", "kvtrace", "explain", "--help"],
    "kvtrace explain REPORT": ["-m", "kvtrace", "explain", REPORT],
    "kvtrace explain -v REPORT": ["-m", "kvtrace", "explain", "-v", REPORT],
}


def seconds(words: list[str], environ: dict[str, str]) -> float:
    """Processor time of one Python with these arguments."""
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, *words], environ)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"startup.py: {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = max(1, parser.parse_args().rounds)
    took: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPYCACHEPREFIX"] = folder
        for words in COMMANDS.values():
            seconds(words, environ)  # compiles
        for _ in range(rounds):
            for name, words in COMMANDS.items():
                took[name].append(seconds(words, environ))
    base = took["python -c pass"]
    print(f"{'':28}{'least':>10}{'median':>10}{'ratio of least':>16}{'of medians':>12}")
    for name, times in took.items():
        least, middle = min(times), statistics.median(times)
        ratios = f"{least / min(base):>15.1f}x{middle / statistics.median(base):>11.1f}x"
        print(f"{name:28}{least * 1e3:>7.1f} ms{middle * 1e3:>7.1f} ms{ratios}")


if __name__ == "__main__":
    main()
