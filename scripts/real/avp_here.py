"""Lets AVP's connector (avp 0.6.2, made for an older vLLM and a GPU) run on vLLM 0.32's CPU build.

What stands between it and vLLM: ``handle_preemptions``, which is given the metadata since, and the layout of
the KV cache ([K or V, block, slot, ...] there, [block, heads, slot, K beside V] here). What it stores, when,
under which key and in which thread is its own.
"""

from __future__ import annotations

from typing import Any

import torch
from avp.connectors import vllm_kv_connector as avp


def _take(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of these slots: [1, slots, heads x K and V]."""
    block = kv.shape[2]
    return kv[slots // block, :, slots % block].reshape(1, len(slots), -1).clone()


def _put(kv: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    block = kv.shape[2]
    kv[slots // block, :, slots % block] = rows[0].reshape(len(slots), kv.shape[1], -1)


avp._extract_request_kv, avp._inject_request_kv = _take, _put


class AvpHere(avp.AVPKVConnectorV1Dynamic):
    def handle_preemptions(self, metadata: Any = None) -> None:
        super().handle_preemptions()
