"""The models of the rows: ``python -m matrix_rows.weights NAME OUT``, in a process that needs torch.

A maker gets a folder and fills it once; a second call leaves what is finished as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import tiny_model

MAKERS: dict[str, Callable[[Path], object]] = {
    "tiny": tiny_model.make_tiny_model,
}


def main() -> int:
    name, out = sys.argv[1:]
    MAKERS[name](Path(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
