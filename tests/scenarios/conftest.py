from __future__ import annotations

from pathlib import Path

import pytest
from scenario_runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    return Runs(out=tmp_path_factory.mktemp("scenarios"), model=tiny_model)
