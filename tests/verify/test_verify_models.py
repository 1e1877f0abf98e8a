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


def test_an_adapter_fits_the_model_that_it_is_for(tmp_path: Path) -> None:
    path = models.make_adapter(tmp_path)
    data = (path / "adapter_model.safetensors").read_bytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    shapes, rank = (
        models.KINDS[models.FIRST].shapes(),
        json.loads((path / "adapter_config.json").read_text())["r"],
    )
    for name in set(head) - {"__metadata__"}:
        of, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        out, into = shapes[f"{of}.weight"]
        assert tuple(head[name]["shape"]) == ((rank, into) if part.startswith("A") else (out, rank))


@pytest.mark.parametrize("kind", models.KINDS)
def test_transformers_takes_its_configuration(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(str(models.make(kind, tmp_path)))
    assert config.model_type == models.KINDS[kind].config["model_type"]
