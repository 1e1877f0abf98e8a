"""vLLM's example connector, which answers all probes in its first step, on both sides of vLLM."""

from __future__ import annotations

import atexit
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

sys.path.append(str(Path(__file__).parents[1]))
import probes


class Probing(probes.Climbing, ExampleConnector):
    """A connector's own documentation."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.side = "worker" if role == KVConnectorRole.WORKER else "scheduler"
        self.folder = Path(extra["shared_storage_path"]).parent
        self.asked = False
        self.held: dict[str, Any] | None = None
        self.before = probes.begin(self, self.folder / f"files-{self.side}")
        self.before.update(
            descriptors=len(probes._descriptors()),
            references=sys.getrefcount(self),
            atexit=atexit._ncallbacks(),  # type: ignore[attr-defined]
        )

    def own(self) -> type:
        return Probing

    def hooks(self) -> list[str]:
        return ["save_kv_layer", "wait_for_layer_load", "bind_connector_metadata", "get_finished"]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.before["caches"] = kv_caches

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self.has_connector_metadata() and self._get_connector_metadata().requests:  # type: ignore[attr-defined]
            self._ask(sys._getframe(1), ())
            if self.held is None:
                self.held = probes.hold(self.before["folder"])
        elif self.held:
            answers = probes.release(self.before["folder"], self.held)
            (self.folder / "held.json").write_text(json.dumps(answers))
            self.held = {}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        made = super().build_connector_meta(scheduler_output)
        if scheduler_output.num_scheduled_tokens:
            self._ask(sys._getframe(1), (scheduler_output,))
        return made

    def _ask(self, caller: Any, given: tuple[Any, ...]) -> None:
        if self.asked:
            return
        self.asked = True
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            warnings.warn("from a hook", stacklevel=3)
        records: list[logging.LogRecord] = []
        log = logging.getLogger("probing")
        log.addFilter(lambda record: bool(records.append(record)))
        log.warning("from a hook", stacklevel=3)
        probes.BEFORE.clear()
        probes.BEFORE.update(
            self.before,
            caller=caller.f_code,
            warned=[one.filename for one in warned],
            logged=[record.funcName for record in records],
            given=[sorted(vars(one)) for one in given],
        )
        answers = probes.ask(self)
        (self.folder / f"{self.side}.json").write_text(json.dumps(answers))
