"""A worker whose third step with tokens waits, in the middle of its forward, for what never comes.

As a rank does in a collective operation that another rank did not get to.
"""

from __future__ import annotations

import threading
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

STEPS = 2


class WaitingWorker(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.left = STEPS
        self.never = threading.Event()
        self.model_runner.get_model().model.layers[2].register_forward_pre_hook(self.wait_for_the_others)

    def execute_model(self, scheduler_output: Any) -> Any:
        self.left -= scheduler_output.total_num_scheduled_tokens > 0
        return super().execute_model(scheduler_output)

    def wait_for_the_others(self, *_: Any) -> None:
        if self.left < 0:
            self.never.wait()
