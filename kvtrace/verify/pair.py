"""Two servers as one engine: every request goes to the one that saves, then to the one that loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvtrace.verify.engine import Reply, RequestToMake
from kvtrace.verify.evidence import Evidence, read
from kvtrace.verify.served import TracedServer

ASKS = {
    "do_remote_decode": True, "do_remote_prefill": False,
    "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""``kv_transfer_params`` of a request to the prefill server, as vLLM's own proxies write them."""


class ServerPair:
    """A prefill and a decode server, both traced, read as one. What the first one answers with
    (``kv_transfer_params``) goes to the second one."""

    def __init__(self, prefill: TracedServer, decode: TracedServer) -> None:
        decode.salt = prefill.salt  # fingerprints are compared across the two
        self._prefill, self._decode = self._both = prefill, decode

    def start(self) -> None:
        """Raises VerifyError."""
        with ThreadPoolExecutor(2) as pool:  # a model takes minutes to load
            for started in [pool.submit(side.start) for side in self._both]:
                started.result()

    def stop(self) -> None:
        for side in self._both:
            side.stop()

    other_model = False

    def restart(self, other: bool = False) -> None:
        self.stop()
        self.start()

    @property
    def adapters(self) -> int:
        return min(side.adapters for side in self._both)

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        """One that the prefill server does not answer has its error, and goes no further."""
        first = self._prefill.ask(
            [replace(one, generate=1, leaves=False, preempted=False, transfer=ASKS) for one in requests],
            patience,
        )
        onward = [
            replace(one, transfer=reply.transfer)
            for one, reply in zip(requests, first, strict=True)
            if not reply.error
        ]
        replies = iter(self._decode.ask(onward, patience) if onward else [])
        return [reply if reply.error else next(replies) for reply in first]

    def reset(self, patience: float) -> bool | None:
        """None where one of them does not tell, False where one of them could not."""
        told = [side.reset(patience) for side in self._both]
        return False if False in told else None if None in told else True

    def gone(self) -> str:
        return self._prefill.gone() or self._decode.gone()

    def look(self) -> Evidence:
        for side in self._both:
            side.nudge()
        return read([run for side in self._both for run in side.runs])

    def usage(self) -> Mapping[str, int]:
        """Of all processes of both."""
        return dict(sum((Counter(side.usage()) for side in self._both), Counter()))
