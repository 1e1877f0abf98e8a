"""Sketches of KV: about which numbers a block holds, in 63 bits. SKETCHES records.

Of each layer every fifth number is looked at; it is in one of 64 parts, others in each layer. With secret
signs, the numbers of a part are added up, as a share of how large the layer's are. Of 48 of these sums the
signs are kept. KV that was rounded has nearly the same signs, KV that has nothing in common half of them;
nothing can be got back. Computed where the KV lies, behind the step's own work.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from kvtrace.agent.state import AGENT
from kvtrace.trace.rows import SIGNS, SIZE_OFFSET, SIZE_STEPS

_EVERY = 5
"""Seldom a factor of a block's sizes: numbers of all channels, heads and tokens are among these."""
_BUCKETS = 64
PARTS = _BUCKETS + 1
"""Sums of a block, and how large its numbers are."""


def secret(what: bytes) -> Any:
    """A generator of numbers that are the same in every process of the run."""
    seed = hashlib.blake2b(what, key=AGENT.config.salt, digest_size=8).digest()
    return sys.modules["torch"].Generator().manual_seed(int.from_bytes(seed, "little"))


class Signs:
    """Secret signs for the numbers of a block that are looked at, by device and how many they are."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, int], Any] = {}

    def of(self, tensor: Any, nbytes: int) -> Any:
        """float32 of shape (numbers,), for blocks of so many bytes. The first call waits for a device."""
        key = tensor.device, -(-nbytes // tensor.element_size() // _EVERY)
        if key not in self._known:
            torch = sys.modules["torch"]
            made = torch.randint(0, 2, (key[1],), generator=secret(b"sketches"), device="cpu")
            self._known[key] = (made * 2 - 1).to(tensor.device, torch.float32)
        return self._known[key]


def parts_of(words: Any, dtype: Any, signs: Any, layer: int) -> Any:
    """Of one layer: float32 of shape (blocks, PARTS); the last one is a binary logarithm.

    Args:
        words: the bytes, as whole numbers of the size of the KV's, of shape (blocks, numbers).
        dtype: of the KV tensor, floating.
        layer: its number in the group: those of layers that change places are not alike.
    """
    torch = sys.modules["torch"]
    values = words.view(dtype)[:, ::_EVERY].to(torch.float32)
    usual = torch.linalg.vector_norm(values, dim=1) / values.shape[1] ** 0.5
    usual = usual.nan_to_num(0.0, 0.0, 0.0).clamp_min(2.0**-SIZE_OFFSET)
    values = torch.nn.functional.pad(values * signs, (0, -values.shape[1] % _BUCKETS))
    sums = values.view(len(values), -1, _BUCKETS).sum(1) / usual[:, None]
    return torch.cat((sums.roll(layer, 1), usual.log2()[:, None]), dim=1)


def sketches_of(parts: Any, layers: int) -> Any:
    """int64 of shape (blocks,), above the lowest bit, which is not written.

    Args:
        parts: the sum of what :func:`parts_of` gives for so many layers.
    """
    torch = sys.modules["torch"]
    bits = 1 << torch.arange(SIGNS, device=parts.device)
    signs = ((parts[:, :SIGNS] > 0) * bits).sum(1)
    size = ((parts[:, -1] / layers + SIZE_OFFSET) * SIZE_STEPS).round().clamp(1, (1 << (63 - SIGNS)) - 1)
    return (signs | size.to(torch.int64) << SIGNS) << 1
