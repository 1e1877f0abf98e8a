"""The small models: the same bytes each time, in files that others can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtrace.verify import models


@pytest.mark.parametrize("kind", models.KINDS)
def test_a_model_is_made_once_and_can_be_read(kind: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    path = models.make(kind, tmp_path)
    data = (path / "model.safetensors").read_bytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {tuple(head[name]["shape"]) for name in head if name != "__metadata__"} == set(
        models.KINDS[kind].shapes().values()
    )
    assert safetensors is not None
    before = (path / "config.json").stat().st_mtime_ns
    assert models.make(kind, tmp_path) == path and (path / "config.json").stat().st_mtime_ns == before
    assert (models.make(kind, tmp_path / "again") / "model.safetensors").read_bytes() == data


@pytest.mark.parametrize("kind", models.KINDS)
def test_transformers_takes_its_configuration(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(str(models.make(kind, tmp_path)))
    assert config.model_type == models.KINDS[kind].config["model_type"]
