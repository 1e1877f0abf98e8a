"""The ``kvtrace`` command: how a command line is run, and how its errors end.

Exit codes: 0 fine, 1 a gate failed, 2 usage or unreadable input; ``run`` returns the child's.
What is asked most (:mod:`kvtrace.cli.quick`) is answered before the verbs and their options are loaded.
"""

from __future__ import annotations

import os
import sys

from kvtrace.errors import KvtraceError

TYPE_CHECKING = False  # typing alone would take as long as all else here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits the process with its code."""
    for stream in (sys.stdout, sys.stderr):
        # a report may hold characters that the terminal's encoding lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_call(sys.argv[1:] if argv is None else list(argv)))


def _call(words: list[str]) -> int:
    """The exit code of one command line; what went wrong is on stderr, in one line."""
    try:
        from kvtrace.cli.quick import quick

        if quick(words):
            return 0
        from kvtrace.cli.commands import app

        result = app(args=words, prog_name="kvtrace", standalone_mode=False)
    except KvtraceError as error:
        _say(str(error) or type(error).__name__)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    except OSError as error:
        _say(": ".join(part for part in (error.strerror or str(error), str(error.filename or "")) if part))
        return 2
    except Exception as error:
        # typer carries its own copy of click in some versions: known by its shape, not its class
        if type(error).__name__ == "Abort":
            return _interrupted()
        message = getattr(error, "format_message", None)
        if message is not None:
            _usage(error, str(message()))
            return 2
        import traceback

        if os.environ.get("KVTRACE_DEBUG"):
            traceback.print_exc()
        what = traceback.extract_tb(error.__traceback__)[-1]
        _say(
            f"internal error: {type(error).__name__}: {error} "
            f"({os.path.basename(what.filename)}:{what.lineno}): "
            "please report it, with the output of KVTRACE_DEBUG=1"
        )
        return 2
    return result if isinstance(result, int) else 0


def _interrupted() -> int:
    _say("interrupted")
    return 130


def _usage(error: Exception, message: str) -> None:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{message}\n")  # kvtrace alone: the help, as a usage error
        return
    path = context.command_path if context is not None else "kvtrace"
    _say(f"{message.rstrip('.')}: see {path} --help")


def _say(line: str) -> None:
    from kvtrace.launch.say import say  # not before there is something to say

    say(line)
