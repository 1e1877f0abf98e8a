"""The other Pythons of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def pythons(names: list[str], check: str = "") -> Iterator[str]:
    """One of each name, as pyenv keeps it or by PATH, that runs the code of the check."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for name in names:
        kept = sorted(str(path) for path in home.glob(f"versions/*/bin/{name}"))
        for place in (*kept, *filter(None, [shutil.which(name)])):
            if subprocess.run([place, "-c", check], capture_output=True, check=False).returncode == 0:
                yield place
                break
