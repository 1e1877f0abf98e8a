"""Prompts that come in parts, a session each: ``python -m matrix_rows.stream SPEC.json``.

Knows nothing of kvtrace. SPEC as for play.py, of one engine; of each prompt of its acts the engine gets
``part`` tokens, answers, gets the next ones, and so on, one prompt after another.
"""

from __future__ import annotations

import sys
from typing import Any

import sessions

from matrix_rows import play


def work(spec: dict[str, Any]) -> play.Answers:
    asked = [
        sessions.Sessions(act["prompts"], act["part"], act["params"]["max_tokens"]) for act in spec["acts"]
    ]
    return sessions.run(spec["engines"][0], asked)


def main() -> int:
    spec = play.read_spec()
    return 1 if play.record(spec, lambda: work(spec)) else 0


if __name__ == "__main__":
    sys.exit(main())
