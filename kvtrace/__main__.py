"""``python -m kvtrace`` is the ``kvtrace`` command."""

from __future__ import annotations

from kvtrace.cli.app import main

if __name__ == "__main__":
    main()
