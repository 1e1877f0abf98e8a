"""What is asked most, answered without loading the command line's library: the version, the help of every
command, and the short answer of a report.json.

Each says what the long way (:mod:`kvtrace.cli.commands`) says; a test holds them together. Whatever is not
plainly one of these takes the long way: its errors, its other options, narrow terminals.
"""

from __future__ import annotations

import os

from kvtrace import __version__

_HELP = ("-h", "--help")
_DETAIL = {"-v": 1, "--verbose": 1, "-vv": 2}
HELP_WIDTH = 80
"""Terminals from here on get the same help."""


def quick(words: list[str]) -> bool:
    """Whether this command line is answered, on stdout."""
    if "_KVTRACE_COMPLETE" in os.environ or not words:
        return False
    if words in (["--version"], ["-V"]):
        return _say(f"kvtrace {__version__}\n")
    if words[-1] in _HELP:
        return _help(" ".join(words[:-1]))
    return words[0] == "explain" and _explain(words[1:])


def _help(verb: str) -> bool:
    from kvtrace.cli.screen import terminal_columns

    if terminal_columns() < HELP_WIDTH or (verb and not verb.replace(" ", "").isalpha()):
        return False
    try:  # made by scripts/help_texts.py, for terminals of 80 columns and more
        with open(help_file(verb), encoding="utf-8") as file:
            return _say(file.read())
    except OSError:  # no verb of this name: the command line's library says so
        return False


def help_file(verb: str) -> str:
    """Where the help of a command (``""``: of kvtrace alone) stands."""
    return os.path.join(os.path.dirname(__file__), "help", f"{verb.replace(' ', '-') or 'kvtrace'}.txt")


def _explain(words: list[str]) -> bool:
    """The short answer, or with ``-v`` the long one, of a file."""
    paths = [word for word in words if not word.startswith("-")]
    options = [word for word in words if word.startswith("-")]
    if len(paths) != 1 or not os.path.isfile(paths[0]) or not {"--no-color", *_DETAIL}.issuperset(options):
        return False
    if os.path.basename(paths[0]) == "merged.json":  # no report: kvtrace.merge reads it
        return False
    from kvtrace.cli.screen import screen
    from kvtrace.render.brief import explained_text
    from kvtrace.report.load import read_report

    path, here = paths[0], screen("--no-color" in options)
    traced = _traced(path)
    detail = sum(_DETAIL.get(word, 0) for word in options)
    return _say(explained_text(read_report(path), here, path, traced, detail))


def _traced(path: str) -> str | None:
    """The folder of a report.json, where it is a run directory with spools."""
    from kvtrace.trace.format import SPOOL_DIR, SPOOL_SUFFIX

    folder = os.path.dirname(path)
    try:
        there = any(name.endswith(SPOOL_SUFFIX) for name in os.listdir(os.path.join(folder, SPOOL_DIR)))
    except OSError:
        return None
    return os.path.normpath(folder or ".") if there else None


def _say(text: str) -> bool:
    from kvtrace.cli.screen import wrote

    wrote(text)
    return True
