"""An engine that can be asked, however it runs: what a driver needs of it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class RequestToMake:
    """One request to make. ``id``: the client's, also in the run directory. ``adapter``: number of one of the
    engine's LoRA adapters, from 1; 0 the model itself. ``transfer``: its ``kv_transfer_params``. ``image``:
    number of one that stands in front of the words of these tokens, from 1; 0 the tokens alone."""

    id: str
    tokens: Sequence[int]
    generate: int
    salt: str = ""
    leaves: bool = False
    preempted: bool = False
    adapter: int = 0
    image: int = 0
    transfer: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        tokens: generated, as their ids; of one that left those until then.
        logprobs: of each token its own, and the best few at its place by their ids; () not told.
        error: why there is no answer, in the engine's words; "" none.
        late: there was none when the patience ended.
        transfer: the answer's ``kv_transfer_params``.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[float, dict[int, float]], ...] = ()
    error: str = ""
    late: bool = False
    seconds: float = 0.0
    transfer: Mapping[str, Any] | None = None


class EngineUnderTest(Protocol):
    """An engine with a connector. All calls come from one thread."""

    @property
    def adapters(self) -> int:
        """LoRA adapters that it serves."""

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        """Make them together; the replies in their order. Never raises: errors stand in the replies."""

    def reset(self, patience: float) -> bool | None:
        """Empty the engine's own prefix cache, waiting so long for its blocks to be given back. None: whether
        it was is not known."""

    @property
    def other_model(self) -> bool:
        """Whether it can be started with another model of the same shape."""

    def restart(self, other: bool = False) -> None:
        """Stop it, start it anew with the same configuration; or with the other model.

        Raises:
            VerifyError: it can't be, or it did not start.
        """

    def gone(self) -> str:
        """Why it cannot be asked any more, in its own words; "" it can."""
