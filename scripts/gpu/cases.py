"""What `scripts/gpu_check.py` runs, and what each run must show. Pure: data and two small functions."""

from __future__ import annotations

from dataclasses import dataclass

OP = "unified_attention_with_output"
SAVE = "save_kv_layer"
SAVE_RANGE = "gpu_layer_store.save_kv_layer"
"""What the connector calls its own work in torch's profiler: it is done inside the attention op."""
BLOCK_STEPS = 24
"""Steps of a block of the ratio: so many tokens are generated of each prompt."""
OWN = "GpuLayerStore"
FULL_MODES = ("FULL", "FULL_AND_PIECEWISE")


@dataclass(frozen=True)
class Case:
    """One engine: the graph mode that is asked for, and whether the connector declares PIECEWISE.

    ``connector``: ours, or one of vLLM's that keeps KV in host memory: its prompts come twice.
    """

    mode: str  # eager | PIECEWISE | FULL | FULL_AND_PIECEWISE
    declares: bool
    backend: str  # "" leaves it to vLLM (CPU)
    connector: str = OWN

    @property
    def name(self) -> str:
        kind = "declares" if self.declares else "plain" if self.connector == OWN else self.connector.lower()
        parts = (self.mode.lower(), kind, self.backend.lower())
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Expected:
    """What must hold of the report."""

    used: str  # cudagraph mode at the first step
    seen: tuple[str, ...]  # runtime modes that must occur
    may: tuple[str, ...]  # ... and those that may
    full_finding: bool  # full-cudagraph-replay is found
    declared: bool  # the report says that the connector's declaration changed the mode


def matrix(device: str) -> list[Case]:
    """All cases, the most telling first: what there is no time for is skipped from the end."""
    if device == "cpu":
        return [Case("eager", declares, "") for declares in (False, True)]
    modes = ("FULL", "FULL_AND_PIECEWISE", "PIECEWISE", "eager")
    flash = [Case(mode, declares, "FLASH_ATTN") for declares in (False, True) for mode in modes]
    triton = [Case(mode, False, "TRITON_ATTN") for mode in ("FULL_AND_PIECEWISE", "FULL")]
    host = [
        Case("FULL_AND_PIECEWISE", False, "FLASH_ATTN", "OffloadingConnector"),
        Case("eager", False, "FLASH_ATTN", "SimpleCPUOffloadConnector"),
    ]
    first, rest = [*flash[:2], flash[4], *triton[:1]], [flash[2], flash[5], *triton[1:], flash[3], *flash[6:]]
    return [*first, *host, *rest]


def expected(case: Case, used: str = "") -> Expected:
    """Prompts are stored layer by layer, in their first step; decode tokens never are.

    Args:
        used: the mode that the report gives. It decides in one case: an attention backend may take FULL
            graphs for decode steps alone (FlashAttention but for version 3, Hopper's); FULL is changed then.
    """
    if case.mode == "eager":
        return Expected("NONE", ("NONE",), ("NONE",), False, False)
    if case.mode == "PIECEWISE" or case.declares:
        changed = case.declares and case.mode in FULL_MODES
        return Expected("PIECEWISE", ("PIECEWISE",), ("PIECEWISE", "NONE"), False, changed)
    if case.mode == "FULL" and used == "FULL_DECODE_ONLY":
        return Expected(used, ("FULL", "NONE"), ("FULL", "NONE"), False, False)
    if case.mode == "FULL" and used != "FULL_AND_PIECEWISE":
        return Expected("FULL", ("FULL",), ("FULL", "NONE"), True, False)
    return Expected("FULL_AND_PIECEWISE", ("FULL", "PIECEWISE"), ("FULL", "PIECEWISE", "NONE"), False, False)
